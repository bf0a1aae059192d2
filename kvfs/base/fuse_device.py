"""The FUSE devices that a process has open: its own, and those of a mount's server that does not
answer.

A server that is stopped (SIGSTOP), or whose thread hangs, cannot tell the kernel to forget, and the
kernel goes on showing what it remembers. A process that may trace the server can copy its device
and tell the kernel in its place. The copy is held only for that write: while any process holds a
device, the kernel keeps waiting for a server that was killed.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Sequence
from typing import Final

from kvfs.base.descriptors import closing

_NUMBER: Final = os.makedev(10, 229)
_SYS_PIDFD_GETFD: Final = 438
"""System call since Linux 5.6, numbered alike on every architecture but alpha."""
UNSERVED: Final = (errno.ENOTCONN, errno.ECONNABORTED)
"""The errors of a mount whose server has gone."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


def unserved_mount(path: str) -> str:
    """Returns what is wrong with a path that gave one of UNSERVED, and the remedy."""
    found = at = os.path.abspath(path)
    while at != os.path.dirname(at):
        at = os.path.dirname(at)
        try:
            os.statvfs(at)
        except OSError as error:
            found = at if error.errno in UNSERVED else found
    return (
        f"nobody serves the mount at {found} any more: start its node again, or remove it with"
        f" `umount -l {found}`"
    )


def descriptors_of(process: int | str) -> set[int]:
    """Returns the numbers under which a process (a pid, or `self`) has a FUSE device open. Raises
    OSError."""
    directory = f"/proc/{process}/fd"
    return {int(name) for name in os.listdir(directory) if _is_device(f"{directory}/{name}")}


def write_for(pid: int, messages: Sequence[bytes], deadline_s: float) -> str:
    """Writes messages to the FUSE devices of another process. Returns why that did not succeed,
    else an empty text.

    Nothing need be forgotten that the kernel does not know. Past the deadline a thread of its own
    goes on: the kernel may hold it in a lock.
    """
    failures = ["it took too long"]

    def run() -> None:
        try:
            _write_all(pid, messages)
            failures.clear()
        except OSError as error:
            failures[:] = [error.strerror or repr(error)]

    thread = threading.Thread(target=run, name="kvfs-stand-in", daemon=True)
    thread.start()
    thread.join(deadline_s)
    return "".join(failures)


def _write_all(pid: int, messages: Sequence[bytes]) -> None:
    with closing(os.pidfd_open(pid)) as process:
        for number in descriptors_of(pid):
            _write(_copy(process, number), messages)


def _write(device: int, messages: Sequence[bytes]) -> None:
    with closing(device):
        for message in messages:
            with contextlib.suppress(FileNotFoundError):  # the kernel does not know it
                os.write(device, message)


def _copy(process: int, number: int) -> int:
    copy: int = _libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
    if copy < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return copy


def _is_device(path: str) -> bool:
    try:
        return os.stat(path).st_rdev == _NUMBER
    except OSError:
        return False
