"""Small pieces of a file, read past the page cache: the disk moves its own blocks for them, not
pages, which are 8 times as large. They are read, aligned, into memory of the thread's own, and
copied to their places."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from gds.io import native_aio
from gds.io.memory import HUGE_BYTES, allocate
from gds.io.native_aio import MOST, AioRead
from gds.plan.pages import page_down, page_up

Piece = tuple[memoryview, int]
"""The memory for bytes, and their offset in the file."""
ROOM_BYTES: Final = HUGE_BYTES
"""Size of one thread's buffer, for the pieces read at once."""


def batches(pieces: Sequence[Piece], unit: int) -> Iterator[Sequence[Piece]]:
    """Yields batches of pieces that can be read at once: each fits in the buffer. A piece that does
    not is alone. Pure."""
    first, held = 0, 0
    for at, piece in enumerate(pieces):
        size = _aligned(piece, unit).size
        if at > first and (at - first == MOST or held + size > ROOM_BYTES):
            yield pieces[first:at]
            first, held = at, 0
        held += size
    if first < len(pieces):
        yield pieces[first:]


def page_bytes(pieces: Sequence[Piece]) -> int:
    """Returns the bytes of the pages in which pieces lie, each counted for itself. Pure."""
    return sum(page_up(offset + len(view)) - page_down(offset) for view, offset in pieces)


def read_direct(fd: int, pieces: Sequence[Piece], unit: int) -> Sequence[Piece]:
    """Reads one of the `batches` from a file open with O_DIRECT, which needs multiples of `unit`
    bytes. Returns the pieces that were not read, also if the file ends within one: reading them
    otherwise finds the reason. Raises MemoryError."""
    reads, room = [], 0
    for piece in pieces:
        read = _aligned(piece, unit)
        reads.append(read._replace(address=_aside.address + room))
        room += read.size
    if room > ROOM_BYTES:
        return pieces
    try:
        with native_aio.lend() as aio:
            came = aio.read(fd, reads)
    except OSError:  # it is not to be had
        return pieces
    return [
        piece
        for piece, read, count in zip(pieces, reads, came, strict=True)
        if not _copy(piece, read, count)
    ]


def _aligned(piece: Piece, unit: int) -> AioRead:
    """Returns the aligned read that holds a piece; its address is not set yet."""
    view, offset = piece
    begin = offset // unit * unit
    return AioRead(0, -(-(offset + len(view)) // unit) * unit - begin, begin)


def _copy(piece: Piece, read: AioRead, count: int) -> bool:
    """Copies the piece, and returns whether all of it came."""
    view, offset = piece
    skip = offset - read.offset
    if count < skip + len(view):
        return False
    begin = read.address - _aside.address + skip
    view[:] = _aside.memory[begin : begin + len(view)]
    return True


class _Aside(threading.local):
    """A thread's buffer, in which nothing is under way between calls."""

    def __init__(self) -> None:
        self.memory = allocate(ROOM_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


_aside: Final = _Aside()
