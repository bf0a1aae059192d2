"""The daemon's part of the process that opens files for the locks of a view."""

import os
import socket
import subprocess
import sys
import threading

from gateway.fuse.views import lock_opener_process
from gateway.fuse.views.lock_opener_process import ANSWER, REQUEST


class LockOpener:
    """The process of one view, started when it is first asked. Used by one thread at a time."""

    def __init__(self, mountpoint: str, openers: set[int]) -> None:
        """`openers`: gets the number of the process, as long as it may ask the mount."""
        self._mountpoint = mountpoint
        self._openers = openers
        self._asking: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def open(self, number: int, access: int) -> int:
        """Returns a descriptor of a file on the mount, by the kernel's number. Raises OSError;
        waits for the mount, until it answers or `close` is called."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        asking = self._asking
        assert asking is not None, "it was started"
        asking.send(REQUEST.pack(access, number))
        answer, fds, _, _ = socket.recv_fds(asking, ANSWER.size, 1)
        if not answer:
            raise ConnectionAbortedError("the process that opens files for locks has ended")
        (error,) = ANSWER.unpack(answer)
        if error:
            raise OSError(error, os.strerror(error))
        return fds[0]

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = self._child = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", lock_opener_process.__file__),
                    *(str(lock_opener_process.VERSION), str(theirs.fileno()), self._mountpoint),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,  # who kills the daemon's process group does not kill it
            )
        self._asking = ours
        self._openers.add(child.pid)

    def close(self) -> None:
        """Ends the process, if there is one, as soon as it waits for nothing."""
        asking, child = self._asking, self._child
        self._asking = self._child = None
        if asking is not None:
            asking.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            asking.close()
        if child is not None:
            self._openers.discard(child.pid)
            threading.Thread(target=child.wait, name="kvfs-opener", daemon=True).start()
