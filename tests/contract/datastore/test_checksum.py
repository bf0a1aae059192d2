"""Checksums of real files, against the definition."""

import errno
import hashlib
import os
from pathlib import Path

import pytest
import xxhash

from kvfs.datastore.checksum import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    cached_sums,
    checksum,
    chunk_sums,
    combine,
)


def reference(content: bytes) -> bytes:
    starts = range(0, len(content), CHUNK_BYTES)
    return b"".join(
        xxhash.xxh3_128_digest(content[start : start + CHUNK_BYTES]) for start in starts
    )


def computed(path: Path, size: int) -> tuple[bytes, bytes] | None:
    fd = os.open(path, os.O_RDONLY)
    try:
        found = checksum(fd, size)
        return None if found is None else found[:2]
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "size",
    [0, 1, 4095, 128 << 10, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7],
)
def test_chunks_and_combination(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "data").write_bytes(content)
    expected = reference(content)
    assert computed(tmp_path / "data", size) == (xxhash.xxh3_128_digest(expected), expected)
    assert len(expected) == DIGEST_BYTES * -(-size // CHUNK_BYTES)
    assert combine(expected) == xxhash.xxh3_128_digest(expected)


@pytest.mark.parametrize("hole", [0, 2 * CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_the_md5_of_the_whole_beside(tmp_path: Path, hole: int) -> None:
    path, content = tmp_path / "data", os.urandom(CHUNK_BYTES + 7)
    with path.open("wb") as file:
        file.write(content)
        file.seek(hole, os.SEEK_CUR)
        file.write(content)
    size = path.stat().st_size
    with path.open("rb") as file:
        plain, found = checksum(file.fileno(), size), checksum(file.fileno(), size, md5=True)
    assert plain is not None
    assert plain.md5 == ""
    assert found == plain._replace(md5=hashlib.md5(path.read_bytes()).hexdigest())


def test_large_holes_have_no_md5(tmp_path: Path) -> None:
    """It would be computed for hours."""
    with (tmp_path / "data").open("w+b") as file:
        file.truncate(64 << 30)
        found = checksum(file.fileno(), 64 << 30, md5=True)
    assert found is not None
    assert found.md5 == ""


def test_holes_count_as_zeros(tmp_path: Path) -> None:
    size = 5 * CHUNK_BYTES + 100
    with (tmp_path / "data").open("wb") as file:
        file.truncate(size)
        file.seek(2 * CHUNK_BYTES + 5000)
        file.write(b"island")
    found = computed(tmp_path / "data", size)
    assert found is not None
    assert found[1] == reference((tmp_path / "data").read_bytes())


def test_a_huge_hole_is_not_read(tmp_path: Path) -> None:
    size = 1 << 36
    with (tmp_path / "data").open("wb") as file:
        file.truncate(size)
    found = computed(tmp_path / "data", size)
    assert found is not None
    assert found[1] == xxhash.xxh3_128_digest(bytes(CHUNK_BYTES)) * (size // CHUNK_BYTES)


def test_a_file_that_became_shorter_has_none(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 1000)
    assert computed(tmp_path / "data", 2000) is None


def test_who_may_not_wait_has_the_same_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(2 * CHUNK_BYTES + 5)
    (tmp_path / "data").write_bytes(content)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    read = os.preadv

    def of_which_half_is_in_memory(fd: int, buffers: list[memoryview], at: int, flags: int) -> int:
        if flags & os.RWF_NOWAIT and at >= len(content) // 2:
            raise BlockingIOError(errno.EAGAIN, "it would have to be read from the disk")
        return read(fd, buffers, at, flags & ~os.RWF_NOWAIT)

    monkeypatch.setattr(os, "preadv", of_which_half_is_in_memory)
    try:
        assert cached_sums(fd, len(content), 0, 1) == reference(content[:CHUNK_BYTES])
        assert cached_sums(fd, len(content), 1, 1) is None
        assert chunk_sums(fd, len(content), 0, 3) == reference(content)
    finally:
        os.close(fd)
