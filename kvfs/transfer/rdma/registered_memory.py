"""The memory that a mover may read and write, in pieces.

| LENT pieces of a chunk, from which others read | LANDING pieces, where read bytes land |

It is a memfd: node and mover share it, and the node fills, empties and wipes it by system calls
that release the GIL.

Invariants
- A piece has one user, who wipes it before giving it back.
- A landing piece that its user left while the mover was using it comes back when the mover is done.
"""

import mmap
import os
import weakref
from typing import Final

import trio

from kvfs.cluster.peer_protocol import CHUNK_BYTES

LENT: Final = 16
LANDING: Final = 4
LANDING_BYTES: Final = 1 << 20
"""Bytes asked of the mover at once: arriving bytes show soon."""
BYTES: Final = LENT * CHUNK_BYTES + LANDING * LANDING_BYTES
_ZEROS: Final = bytes(CHUNK_BYTES)


class Landing:
    """A piece where bytes land."""

    __slots__ = ("at", "is_busy", "is_dirty", "is_left")

    def __init__(self, at: int) -> None:
        self.at: Final = at
        """The position in the memory."""
        self.is_busy = False
        """Whether the mover is using it."""
        self.is_dirty = False
        """Whether bytes may lie there."""
        self.is_left = False
        """Whether its user is not interested any more."""


class Memory:
    """The memory of one node's mover; for its event loop, except `fill`, `empty` and `wipe`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvfs-mover", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, BYTES)
        self._view = memoryview(mmap.mmap(self.fd, BYTES))
        self._lent = [number * CHUNK_BYTES for number in range(LENT)]
        first = LENT * CHUNK_BYTES
        self._landing = [Landing(first + n * LANDING_BYTES) for n in range(LANDING)]
        self._landed = trio.Semaphore(LANDING)

    # --- pieces that are lent

    def take(self, count: int) -> list[int]:
        """Returns the places of so many free pieces; empty if there are not so many."""
        if count > len(self._lent):
            return []
        return [self._lent.pop() for _ in range(count)]

    def give_back(self, pieces: list[int]) -> None:
        self._lent += pieces

    # --- pieces where bytes land

    async def land(self) -> Landing:
        """Waits for a landing piece."""
        await self._landed.acquire()
        piece = self._landing.pop()
        piece.is_left = False
        return piece

    def leave(self, piece: Landing) -> None:
        """Leaves a piece; called by its user, or by the mover when it is done with one that was
        left."""
        piece.is_left = True
        if not piece.is_busy:
            if piece.is_dirty:
                self._wipe_landed(piece)
            self._landing.append(piece)
            self._landed.release()

    def begun(self, piece: Landing) -> None:
        """Marks the piece as busy; called by the mover."""
        piece.is_busy = piece.is_dirty = True

    def done(self, piece: Landing) -> None:
        """Ends the mover's use of the piece; called by the mover."""
        piece.is_busy = False
        if piece.is_left:
            self.leave(piece)

    # --- bytes

    def fill(self, at: int, fd: int, offset: int, length: int) -> None:
        """Fills memory from a file. Raises OSError (EIO: it is shorter)."""
        done = 0
        while done < length:
            count = os.preadv(fd, [self._view[at + done : at + length]], offset + done)
            if not count:
                raise OSError(5, "the data file has become shorter")
            done += count

    def empty(self, piece: Landing, buffer: memoryview) -> None:
        """Moves as much as fits into the buffer, and wipes the piece."""
        done = 0
        while done < len(buffer):
            done += os.preadv(self.fd, [buffer[done:]], piece.at + done)
        self.wipe(piece.at, len(buffer))
        piece.is_dirty = False

    def _wipe_landed(self, piece: Landing) -> None:
        self.wipe(piece.at, LANDING_BYTES)
        piece.is_dirty = False

    def wipe(self, at: int, length: int) -> None:
        done = 0
        while done < length:
            done += os.pwrite(self.fd, memoryview(_ZEROS)[: length - done], at + done)
