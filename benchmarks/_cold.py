"""Cold files: no page of a backing file in memory, and proof of it.

Pages are dropped globally (/proc/sys/vm/drop_caches, root), which also clears what a FUSE inode
above may hold; without root by posix_fadvise on the backing files, which is honest only where
nothing above them caches (passthrough). Never by fadvise on a mount: that would drop the mount's
pages and leave those of the file beneath.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gds.io.page_cache import cached_bytes

_ATTEMPTS: Final = 8
_DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
_PAGE: Final = mmap.PAGESIZE


class NotCold(Exception):
    """Pages stayed in memory although they were dropped several times: a cold figure would be a
    lie.
    """


def can_drop_globally() -> bool:
    return os.access(_DROP_CACHES, os.W_OK)


def cached_pages(path: Path) -> int:
    """Pages of this file in the page cache. Raises NotCold where the kernel does not tell."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = cached_bytes(descriptor, 0, 0)
    finally:
        os.close(descriptor)
    if found is None:
        raise NotCold(f"{path}: the kernel does not tell what of it is in memory")
    return found // _PAGE


def make_cold(backing: Sequence[Path]) -> None:
    """Syncs and drops; raises NotCold when after several attempts a backing file still has a page
    in memory. A file that has gone meanwhile (a temporary one of a peer's cache) counts as cold.
    """
    for path in backing:
        with contextlib.suppress(FileNotFoundError):
            _sync(path)
    warm = list(backing)
    for attempt in range(_ATTEMPTS):
        _drop(warm)
        warm = [path for path in warm if _is_warm(path)]
        if not warm:
            return
        # A page under writeback or in use by the daemon stays until that ends.
        time.sleep(0.02 * 2**attempt)
    raise NotCold(f"{len(warm)} backing files keep pages in memory, {warm[0]} among them")


def _is_warm(path: Path) -> bool:
    try:
        return cached_pages(path) > 0
    except FileNotFoundError:
        return False


def _drop(paths: Iterable[Path]) -> None:
    if can_drop_globally():
        Path(_DROP_CACHES).write_text("1\n")
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _advise_gone(path)


def _advise_gone(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
