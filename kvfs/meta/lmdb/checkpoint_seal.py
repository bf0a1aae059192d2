"""The seal of a base: a digest of its pages, behind the last of them.

A bit that flips inside of a page shows nowhere in LMDB, and a rebuild would spread it in silence. A
seal is in the base's own file, so it comes and goes with it. Its length is no page's: the length of
a file alone says whether it has one, and a base of an earlier version, which has none, is as long
as its pages.
"""

import os
import struct
from pathlib import Path
from typing import Final

import xxhash

from kvfs.meta.lmdb.lmdb_file import read_metas
from kvfs.meta.lmdb.magic import refuse_later

_MAGIC: Final = b"KVFSBAS1"
_SEAL: Final = struct.Struct("<8sQ16s")
"""magic, bytes of pages before it, their xxh3-128."""
_LEAST_PAGE: Final = 512
_BUFFER_BYTES: Final = 128 << 10


def seal(fd: int) -> None:
    """Puts a seal behind the pages of a file; it reaches the disk with the next sync. Reads all of
    it, with the GIL released. Raises OSError."""
    size = os.fstat(fd).st_size
    _write(fd, _SEAL.pack(_MAGIC, size, _digest(fd, size)), size)


def find_damage(path: Path) -> str | None:
    """Returns the damage of a base, None if it is as it was taken. Raises NotSupported if a later
    version took it; OSError, except if the disk cannot read it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _find_damage(path, fd)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    finally:
        os.close(fd)


def check_version(path: Path) -> None:
    """Reads the seal alone. Raises NotSupported if a later version took the base, OSError."""
    with path.open("rb") as file:
        pages = os.fstat(file.fileno()).st_size - _SEAL.size
        if _is_sealed(pages + _SEAL.size):
            magic, _, _ = _SEAL.unpack(os.pread(file.fileno(), _SEAL.size, pages))
            refuse_later(path, _MAGIC, magic)


def pages_bytes(path: Path) -> int:
    """Returns the length of a base without its seal."""
    size = path.stat().st_size
    return size - _SEAL.size if _is_sealed(size) else size


def _find_damage(path: Path, fd: int) -> str | None:
    size = os.fstat(fd).st_size
    if not _is_sealed(size):
        ends = [(meta.last_page + 1) * meta.page_size for meta in read_metas(fd)]
        return None if ends and size >= max(ends) else f"it has {size} bytes, which is too short"
    pages = size - _SEAL.size
    magic, sealed, digest = _SEAL.unpack(os.pread(fd, _SEAL.size, pages))
    refuse_later(path, _MAGIC, magic)
    if (magic, sealed) != (_MAGIC, pages):
        return "what should be its seal is none"
    return None if digest == _digest(fd, pages) else "its pages are not those that were sealed"


def _is_sealed(size: int) -> bool:
    return size % _LEAST_PAGE == _SEAL.size


def _digest(fd: int, size: int) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    at = 0
    while at < size:
        count = os.preadv(fd, [buffer[: min(_BUFFER_BYTES, size - at)]], at)
        if not count:
            break
        digest.update(buffer[:count])
        at += count
    return digest.digest()


def _write(fd: int, data: bytes, at: int) -> None:
    if os.pwrite(fd, data, at) != len(data):
        raise OSError(28, os.strerror(28))
