"""Who uses a data file, as the kernel says it. Leases are probed on the filesystem of the tests
first."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.datastore.file_lease import is_quiet, is_unused, supported


@pytest.fixture
def path(tmp_path: Path) -> Path:
    if not supported(str(tmp_path)):
        pytest.skip("the filesystem of the tests grants no leases")
    file = tmp_path / "data"
    file.write_bytes(b"x" * mmap.PAGESIZE)
    return file


@pytest.fixture
def own(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_a_file_nobody_has_open(own: int) -> None:
    assert is_unused(own)
    assert is_quiet(own)
    assert is_unused(own), "asking leaves nothing behind"


def test_a_reader_makes_it_used_but_quiet(path: Path, own: int) -> None:
    with path.open("rb"):
        assert is_unused(own) is False
        assert is_quiet(own)
    assert is_unused(own)


def test_a_writer_makes_it_used_and_not_quiet(path: Path, own: int) -> None:
    with path.open("r+b"):
        assert is_unused(own) is False
        assert is_quiet(own) is False
    assert is_quiet(own)


@pytest.mark.parametrize("writable", [False, True])
def test_a_shared_mapping_counts_after_its_descriptor_was_closed(
    path: Path, own: int, writable: bool
) -> None:
    with path.open("r+b" if writable else "rb") as file:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(file.fileno(), 0, prot=protection)
    assert is_unused(own) is False
    assert is_quiet(own) is not writable
    mapping.close()
    assert is_unused(own)
    assert is_quiet(own)


def test_another_process_counts(path: Path, own: int) -> None:
    program = (
        "import sys; f = open(sys.argv[1], 'r+b'); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"open\n"
        assert is_unused(own) is False
        assert is_quiet(own) is False
        other.stdin.close()
    assert is_unused(own)


def test_a_name_alone_does_not_count(path: Path, own: int) -> None:
    pinned = os.open(path, os.O_PATH)
    try:
        assert is_unused(own)
    finally:
        os.close(pinned)
