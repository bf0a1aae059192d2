"""Memory that files are read into: whole huge pages where the kernel has them."""

import contextlib
import ctypes
import mmap
from typing import Final

HUGE_BYTES: Final = 2 << 20


def allocate(size: int) -> memoryview:
    """`size` bytes of anonymous memory, all zero, that begin at a multiple of a huge page where
    they are as long as one, else of a page. The kernel backs them when they are first written; they
    go with the last view of them. Raises MemoryError."""
    if size < HUGE_BYTES:
        return memoryview(_mapped(max(size, 1)))[:size]
    mapping = _mapped(size + HUGE_BYTES)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    skip = -_address(mapping) % HUGE_BYTES
    return memoryview(mapping)[skip : skip + size]


def _mapped(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory are not to be had: {error.strerror}") from None


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
