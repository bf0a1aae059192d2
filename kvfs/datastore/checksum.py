"""Checksums of data files: xxh3-128 of each chunk, and of all those together; on request the MD5 of
the whole in the same pass. For a worker thread: it waits for the disk, except for `cached_sums`.

The bytes go from the page cache into one reused buffer of 128 KiB and from there into the hash, all
in C with the GIL released: 10 GB/s on a core where hashing a mapping reached 26 (page cache warm,
AVX-512). The mapping is not used: a file that is truncated meanwhile would kill the process with
SIGBUS, and both are well above any disk.
"""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import xxhash

CHUNK_BYTES: Final = 4 << 20
DIGEST_BYTES: Final = 16
_BUFFER_BYTES: Final = 128 << 10
_RWF_DONTCACHE: Final = 0x80
_NO_BYTES: Final = bytes(_BUFFER_BYTES)
"""The bytes of a hole."""
_MOST_OF_HOLES: Final = 1 << 30
_Also = Callable[[memoryview], None]
"""Also takes each piece that is read."""


class FileChecksum(NamedTuple):
    """The checksums of a whole file."""

    combined: bytes
    """xxh3-128 of `chunks`: what the inode's record holds."""
    chunks: bytes
    """The xxh3-128 of each chunk of 4 MiB (the last one shorter), one after the other."""
    md5: str = ""
    """The MD5 of the whole, in hexadecimal; empty if it was not computed."""


def checksum(
    fd: int, size: int, *, md5: bool = False, step: Callable[[], None] | None = None
) -> FileChecksum | None:
    """Returns the checksums of the first `size` bytes; None when the file turned out shorter. Holes
    are not read. With `md5` it takes ten times as long, holes included; if they are larger than a
    GiB together there is no MD5. `step` is called before each chunk; an exception of it ends the
    work."""
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, max(size, 1))))
    digests = bytearray()
    flags = _read_flags(fd)
    md5 = md5 and _holes(fd, size) <= _MOST_OF_HOLES
    whole = hashlib.md5(usedforsecurity=False) if md5 else None
    also = None if whole is None else whole.update
    for start, end, is_hole in _chunks(fd, size):
        if step is not None:
            step()
        if is_hole:
            digest: bytes | None = _zeros(end - start, also)
        else:
            digest = _chunk(fd, start, end, buffer, flags, also)
        if digest is None:
            return None
        digests += digest
    hexadecimal = "" if whole is None else whole.hexdigest()
    return FileChecksum(combine(bytes(digests)), bytes(digests), hexadecimal)


def wrong_chunks(fd: int, size: int, chunks: bytes, first: int, count: int) -> list[int]:
    """Returns the chunks from number `first` on, at most `count`, that differ from `chunks`
    (checksums of all); one that cannot be read, or is missing, is wrong.

    Each is read again from the disk before it counts: a change in memory alone is thereby repaired
    for all readers of the file.
    """
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    wrong = []
    for number in range(first, min(first + count, len(chunks) // DIGEST_BYTES)):
        start = number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, size)
        said = chunks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if _is_chunk(fd, start, end, buffer, said):
            continue
        os.posix_fadvise(fd, start, end - start, os.POSIX_FADV_DONTNEED)
        if not _is_chunk(fd, start, end, buffer, said):
            wrong.append(number)
    return wrong


def _is_chunk(fd: int, start: int, end: int, buffer: memoryview, said: bytes) -> bool:
    try:
        return _chunk(fd, start, end, buffer, _read_flags(fd)) == said
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return False


def chunk_sums(fd: int, size: int, first: int, count: int) -> bytes | None:
    """Returns the xxh3-128 of `count` chunks from the chunk `first` on, of a file that counts as
    `size` bytes long; None if it turned out shorter."""
    return _sums(fd, size, first, count, 0)


def cached_sums(fd: int, size: int, first: int, count: int) -> bytes | None:
    """Like `chunk_sums`, for a caller that may not wait: None also if not all of it is in memory. 2
    MiB take 0.08 ms."""
    try:
        return _sums(fd, size, first, count, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
            return None
        raise


def _sums(fd: int, size: int, first: int, count: int, flags: int) -> bytes | None:
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    digests = bytearray()
    for start in range(first * CHUNK_BYTES, min(size, (first + count) * CHUNK_BYTES), CHUNK_BYTES):
        digest = _chunk(fd, start, min(start + CHUNK_BYTES, size), buffer, flags)
        if digest is None:
            return None
        digests += digest
    return bytes(digests)


def wrong_in(data: memoryview, chunks: bytes, first: int = 0) -> int | None:
    """Returns the first chunk of `data`, a file's bytes from its chunk `first` on, that differs
    from `chunks` (checksums of all); None: none does. Only the file's last may be shorter."""
    for number, start in enumerate(range(0, len(data), CHUNK_BYTES), first):
        state = xxhash.xxh3_128()  # unlike the function for one digest it releases the GIL
        state.update(data[start : start + CHUNK_BYTES])
        if state.digest() != chunks[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            return number
    return None


def combine(chunks: bytes) -> bytes:
    """Returns the checksum of a file from those of its chunks."""
    return xxhash.xxh3_128_digest(chunks)


def _read_flags(fd: int) -> int:
    try:
        os.preadv(fd, [bytearray(1)], 0, _RWF_DONTCACHE)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return 0
        raise
    return _RWF_DONTCACHE


def _chunk(
    fd: int, start: int, end: int, buffer: memoryview, flags: int, also: _Also | None = None
) -> bytes | None:
    state = xxhash.xxh3_128()
    while start < end:
        count = os.preadv(fd, [buffer[: end - start]], start, flags)
        if count == 0:
            return None
        state.update(buffer[:count])
        if also is not None:
            also(buffer[:count])
        start += count
    return state.digest()


def _chunks(fd: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Yields (start, end, lies wholly in a hole) of each chunk."""
    data = 0
    for start in range(0, size, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, size)
        if data < start or start == 0:
            data = _next_data(fd, start, size)
        yield start, end, data >= end


def _holes(fd: int, size: int) -> int:
    """Returns the bytes of chunks that are not read."""
    return sum(end - start for start, end, is_hole in _chunks(fd, size) if is_hole)


def _next_data(fd: int, start: int, size: int) -> int:
    """Returns the offset of the next data at or after `start`; `size` when only a hole follows."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        return start  # a filesystem that does not know holes: all is data


ZERO_CHUNK: Final = xxhash.xxh3_128_digest(bytes(CHUNK_BYTES))
"""The digest of a whole chunk of zeros."""


def _zeros(length: int, also: _Also | None) -> bytes:
    if also is not None:
        for start in range(0, length, _BUFFER_BYTES):
            also(memoryview(_NO_BYTES)[: length - start])
    return ZERO_CHUNK if length == CHUNK_BYTES else xxhash.xxh3_128_digest(bytes(length))
