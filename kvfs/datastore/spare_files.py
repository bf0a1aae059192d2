"""Data files made ahead of their use, so that a create does not wait for the filesystem to find an
inode.

ext4 without a journal does not use an inode again for some minutes after its deletion, and looks
past every such one when it makes a file: where files come and go, as in a full cache, a create
takes 210 us instead of 18. A spare is a file without a name (O_TMPFILE), made by a thread; giving
it its name takes 9 to 13 us. Spares have no name to leak: a kill ends them. Where a create takes no
such search (`kernel.inode_search`) there are none.
"""

import ctypes
import os
import threading
from collections import deque
from typing import Final

from kvfs.datastore.kernel.safe_open import create_file

SPARES: Final = 64
_LOW: Final = SPARES // 2
_AT_EMPTY_PATH: Final = 0x1000
_linkat: Final = ctypes.CDLL(None, use_errno=True).linkat


class Spares:
    """Up to SPARES nameless files in the directory that was last asked for. Only one thread may
    call `take`."""

    def __init__(self, directory: int) -> None:
        """`directory`: a descriptor that stays open until `close`."""
        self._directory = directory
        self._ready: deque[int] = deque()
        self._near = ""
        self._wanted = threading.Event()
        self._closing = False
        self.failure: str | None = None
        """The reason why there are none: the filesystem has no nameless files; else None."""
        self._thread = threading.Thread(target=self._run, name="kvfs-spares", daemon=True)
        self._thread.start()

    def take(self, near: str) -> int | None:
        """Returns a descriptor of a spare, or None when there is none yet. More are made in the
        directory `near` (relative to the one given), where neighbours lie."""
        self._near = near
        if len(self._ready) < _LOW:
            self._wanted.set()
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Ends the thread and lets the spares go; idempotent."""
        self._closing = True
        self._wanted.set()
        self._thread.join()
        while self._ready:
            os.close(self._ready.popleft())

    def let_go(self) -> None:
        """Lets go of the spares in the child of a fork, which lacks the thread: they are the
        parent's."""
        while self._ready:
            os.close(self._ready.popleft())

    def _run(self) -> None:
        flags = os.O_RDWR | os.O_TMPFILE
        while self._wanted.wait() and not self._closing:
            self._wanted.clear()
            try:
                while len(self._ready) < SPARES and not self._closing:
                    self._ready.append(create_file(self._directory, self._near, flags))
            except FileNotFoundError:
                continue  # the directory is made by the first create in it
            except OSError as error:
                self.failure = os.strerror(error.errno or 0)
                return


def name_spare(fd: int, directory: int, name: str) -> None:
    """Gives a nameless file its name in `directory` (a descriptor).

    Raises OSError: ENOENT if the directory in `name` is missing, or the process may not do this
    (CAP_DAC_READ_SEARCH); EEXIST.
    """
    if _linkat(fd, b"", directory, name.encode(), _AT_EMPTY_PATH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
