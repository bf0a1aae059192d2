"""Small pieces of a file, read past the page cache: the disk moves its own blocks for them, not
pages, which are 8 times as large. They come aligned into memory of the thread's own, and are copied
to where they belong.
"""

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
"""Bytes of one thread's room, for what is read at once."""


def batches(pieces: Sequence[Piece], unit: int) -> Iterator[Sequence[Piece]]:
    """Batches of pieces that can be read at once: each fits in the room. A piece that does not is
    alone. Pure."""
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
    """Bytes of the pages in which pieces lie, each counted for itself. Pure."""
    return sum(page_up(offset + len(view)) - page_down(offset) for view, offset in pieces)


def read_direct(fd: int, pieces: Sequence[Piece], unit: int) -> Sequence[Piece]:
    """Read one of the `batches` from a file that is open with O_DIRECT, which asks for multiples of
    `unit` bytes. Those that did not come are given back, also where the file ends within one: what
    keeps them is found by reading them otherwise. Raises MemoryError."""
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
    """The aligned read that holds a piece; its address is yet to be found."""
    view, offset = piece
    begin = offset // unit * unit
    return AioRead(0, -(-(offset + len(view)) // unit) * unit - begin, begin)


def _copy(piece: Piece, read: AioRead, count: int) -> bool:
    """Whether all of it came."""
    view, offset = piece
    skip = offset - read.offset
    if count < skip + len(view):
        return False
    begin = read.address - _aside.address + skip
    view[:] = _aside.memory[begin : begin + len(view)]
    return True


class _Aside(threading.local):
    """A thread's room, in which nothing is under way between calls."""

    def __init__(self) -> None:
        self.memory = allocate(ROOM_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


_aside: Final = _Aside()
