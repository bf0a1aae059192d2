"""Memory that files are read into: whole huge pages if the kernel has them."""

import contextlib
import ctypes
import functools
import mmap
from pathlib import Path
from typing import Final

HUGE_BYTES: Final = 2 << 20
_MOST_BEYOND: Final = 1 / 16
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@functools.cache
def huge_pages() -> str:
    """Returns always, madvise or never; empty: this kernel has none."""
    try:
        text = _SETTING.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def is_huge(size: int) -> bool:
    """Returns whether memory of so many bytes comes in huge pages."""
    return size >= HUGE_BYTES and huge_pages() in ("always", "madvise")


def allocate(size: int) -> memoryview:
    """Returns `size` bytes of anonymous memory, all zero, that begin at a multiple of a huge page
    if they are as long as one, else of a page. The kernel backs them when they are first written;
    they go with the last view of them. Raises MemoryError."""
    if not is_huge(size):
        return memoryview(_mapped(max(size, 1)))[:size]
    mapping = _mapped(size + HUGE_BYTES)
    skip = -_address(mapping) % HUGE_BYTES
    end = min(skip + _huge_part(size), len(mapping))
    with contextlib.suppress(OSError):  # it was forbidden meanwhile
        mapping.madvise(mmap.MADV_HUGEPAGE, skip, end - skip)
        if end < len(mapping):
            mapping.madvise(mmap.MADV_NOHUGEPAGE, end, len(mapping) - end)
    return memoryview(mapping)[skip : skip + size]


def _huge_part(size: int) -> int:
    """Returns how many of the bytes should lie in huge pages: all, if the excess beyond them is
    small; else the last ones lie in small pages (with tensors of 2.1 MiB each nearly half of the
    memory was excess)."""
    behind = -size % HUGE_BYTES
    return size + behind if behind <= size * _MOST_BEYOND else size - (HUGE_BYTES - behind)


def _mapped(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes of memory are not to be had: {error.strerror}") from None


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
