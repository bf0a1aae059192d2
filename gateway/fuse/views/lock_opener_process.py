"""Opens files on the node's mount for the locks of a view: a process of its own, because a daemon
that is killed while a thread of it waits for the mount would wait for the next daemon, and that one
for its end.

    python -I -S lock_opener_process.py VERSION SOCKET MOUNTPOINT

VERSION is that of these arguments and messages; given another one it ends at once with REPLACED. On
SOCKET, which keeps messages apart, it is asked with REQUEST (flags of the open, the file's number)
and answers with ANSWER (an errno; 0: the descriptor comes with it). It ends with the daemon's end
of it. It imports nothing of KVFS.
"""

import array
import ctypes
import os
import signal
import socket
import struct
import sys

VERSION = 1
"""Grows by one when arguments or messages change."""
REPLACED = 75
REQUEST = struct.Struct("=iQ")
ANSWER = struct.Struct("=i")
_HANDLE = struct.Struct("=IiIII")
"""Bytes of a file's handle and its kind, then FUSE's: inode, high half first, and generation."""
_HANDLE_BYTES, _INO64_GEN = 12, 0x81
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answers until nobody is left who asks."""
    # The terminal's ^C, and what ends all processes of a service, are for the daemon to heed.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.argv[1] != str(VERSION):
        sys.exit(REPLACED)
    mountpoint = sys.argv[3]
    with socket.socket(fileno=int(sys.argv[2])) as caller:
        while message := caller.recv(REQUEST.size):
            flags, number = REQUEST.unpack(message)
            try:
                fd = _open(mountpoint, number, flags)
            except OSError as error:
                caller.send(ANSWER.pack(error.errno))
                continue
            try:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
                caller.sendmsg([ANSWER.pack(0)], rights)
            finally:
                os.close(fd)


def _open(mountpoint: str, number: int, flags: int) -> int:
    root = os.open(mountpoint, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        handle = _HANDLE.pack(_HANDLE_BYTES, _INO64_GEN, number >> 32, number & 0xFFFFFFFF, 0)
        at = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        try:
            fd: int = _libc.open_by_handle_at(at, handle, flags | os.O_CLOEXEC)
        finally:
            os.close(at)
    finally:
        os.close(root)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return fd


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):  # the daemon has died meanwhile
        pass
