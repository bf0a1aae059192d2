"""The rows of the table of `private_fate`, for every pair of records that can meet."""

import stat

import pytest

from kvfs.meta import keys
from kvfs.meta.records import Flag, Inode
from kvfs.meta.replica.private_fate import Stays, place_of, stays, with_name_of


def record(name: bytes, *, published: bool = True, nlink: int = 1) -> Inode:
    return Inode(
        mode=stat.S_IFREG | 0o644,
        uid=0,
        gid=0,
        nlink=nlink,
        atime_ns=1,
        mtime_ns=1,
        ctime_ns=1,
        parent=7 if nlink else 0,
        name=name if nlink else b"",
        flags=Flag.PUBLISHED if published else 0,
    )


OWN = record(b"own")
OLD = record(b"old")
EARLIER = [place_of(OLD)]


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("name", [b"own", b"old"])
def test_of_what_the_server_had_nothing_it_was_told(name: bytes, *, published: bool) -> None:
    assert stays(None, record(name, published=published), OWN, []) is Stays.TOLD


@pytest.mark.parametrize(
    ("name", "earlier", "stay"),
    [
        (b"own", [], Stays.ALL),
        (b"own", EARLIER, Stays.ALL),
        (b"old", EARLIER, Stays.ALL),
        (b"other", [], Stays.CONTENT),
        (b"other", EARLIER, Stays.CONTENT),
    ],
)
def test_an_unpublished_file(name: bytes, earlier: list[bytes], stay: Stays) -> None:
    before = record(b"own", published=False)
    assert stays(before, record(name, published=False), OWN, earlier) is stay


@pytest.mark.parametrize("before", [OLD, record(b"old", published=False), None])
@pytest.mark.parametrize(
    ("theirs", "stay"),
    [
        (record(b"own"), Stays.TOLD),
        (record(b"old"), Stays.NAME),
        (record(b"old", nlink=2), Stays.NOTHING),
        (record(b"other"), Stays.NOTHING),
        (record(b"", nlink=0), Stays.NOTHING),
        (None, Stays.NOTHING),
    ],
)
def test_a_published_file_with_another_name_here(
    before: Inode | None, theirs: Inode | None, stay: Stays
) -> None:
    assert stays(before, theirs, OWN, EARLIER) is stay


def test_a_published_file_that_has_its_name_here() -> None:
    before = record(b"own", published=False)
    assert stays(before, record(b"own"), OWN, []) is Stays.TOLD
    assert stays(before, record(b"other"), OWN, []) is Stays.NOTHING
    assert stays(before, None, OWN, []) is Stays.NOTHING


def test_a_record_gets_names_and_the_later_time_of_another() -> None:
    named = record(b"new", nlink=2)
    named.ctime_ns, named.size = 5, 9
    made = with_name_of(record(b"old"), named)
    assert (made.name, made.nlink, made.ctime_ns, made.size) == (b"new", 2, 5, 0)
    assert place_of(made) == keys.file_entry(7, b"new")
    assert place_of(record(b"", nlink=0)) == b""
