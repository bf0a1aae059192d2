"""What the page cache has of a file, also where the kernel has no cachestat."""

import mmap
import os
from collections.abc import Iterator

import pytest

from gds.io.page_cache import cached_bytes

MIB = 1 << 20
PAGE = mmap.PAGESIZE
SIZE = 3 * MIB + 100


@pytest.fixture(params=["newest", "before 6.5"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that runs, or one without cachestat."""
    if request.param == "before 6.5":
        monkeypatch.setattr("kvfs.datastore.kernel.cachestat._NUMBER", 100_000)
    return str(request.param)


@pytest.fixture
def fd() -> Iterator[int]:
    """Of a file that is nowhere but in memory."""
    made = os.memfd_create("file")
    os.write(made, bytes(SIZE))
    yield made
    os.close(made)


@pytest.mark.parametrize(
    ("begin", "length", "held"),
    [
        (0, 0, 3 * MIB + PAGE),
        (MIB, 0, 2 * MIB + PAGE),
        (MIB, MIB, MIB),
        (PAGE, PAGE, PAGE),
        (3 * MIB, MIB, PAGE),
        (8 * MIB, MIB, 0),
    ],
)
@pytest.mark.usefixtures("kernel")
def test_all_of_a_file_in_memory_is_there(fd: int, begin: int, length: int, held: int) -> None:
    assert cached_bytes(fd, begin, length) == held


@pytest.mark.usefixtures("kernel")
def test_what_was_never_written_is_not_there(fd: int) -> None:
    os.ftruncate(fd, 9 * MIB)
    os.pwrite(fd, b"x", 8 * MIB)
    assert cached_bytes(fd, 4 * MIB, 5 * MIB) == PAGE
    assert cached_bytes(fd, 0, 0) == 3 * MIB + 2 * PAGE


def test_of_a_file_of_others_the_old_kernel_tells_nothing(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.datastore.kernel.cachestat._NUMBER", 100_000)
    monkeypatch.setattr(os, "geteuid", lambda: os.fstat(fd).st_uid + 1)
    assert cached_bytes(fd, 0, 0) is not None, "it may be written to"
    monkeypatch.setattr(os, "access", lambda *_asked, **_how: False)
    assert cached_bytes(fd, 0, 0) is None
