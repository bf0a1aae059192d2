"""Listing: large directories, names that come and go under a reader, seekdir, `.` and `..`."""

import ctypes
import os
import stat
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.integration.conftest import Place
from tests.integration.harness import best_mode
from tests.integration.posix import folder, libc, make_of, touch

libc.opendir.restype = ctypes.c_void_p
libc.telldir.restype = ctypes.c_long
libc.readdir64.restype = ctypes.c_void_p

SYS_GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]


class Entry(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_ushort),
        ("kind", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


class Stream:
    """The C library's directory stream: Python's os has no seekdir."""

    def __init__(self, path: Path) -> None:
        self.stream = ctypes.c_void_p(libc.opendir(os.fsencode(path)))
        assert self.stream

    def read(self) -> str | None:
        found = libc.readdir64(self.stream)
        if not found:
            return None
        return os.fsdecode(ctypes.cast(found, ctypes.POINTER(Entry)).contents.name)

    def rest(self) -> list[str]:
        found = []
        while (name := self.read()) is not None:
            found.append(name)
        return found

    def tell(self) -> int:
        return int(libc.telldir(self.stream))

    def seek(self, position: int) -> None:
        libc.seekdir(self.stream, ctypes.c_long(position))

    def rewind(self) -> None:
        libc.rewinddir(self.stream)

    def close(self) -> None:
        libc.closedir(self.stream)


def fill(directory: Path, count: int) -> set[str]:
    at = os.open(directory, os.O_RDONLY)
    names = {f"name-{n:06d}" for n in range(count)}
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    return names


def test_an_empty_directory(here: Path) -> None:
    stream = Stream(here)
    assert sorted(stream.rest()) == [".", ".."]
    stream.close()
    assert os.listdir(here) == []


def test_entries_carry_type_and_number(here: Path) -> None:
    kinds = ["regular", "directory", "fifo", "socket", "symlink"]
    for kind in kinds:
        make_of(kind, here / kind)
    with os.scandir(here) as found:
        entries = {e.name: e for e in found}
    assert set(entries) == set(kinds)
    for name, entry in entries.items():
        assert entry.inode() == (here / name).lstat().st_ino
        assert entry.is_symlink() == (name == "symlink")
        assert entry.is_dir(follow_symlinks=False) == (name == "directory")
        assert entry.is_file(follow_symlinks=False) == (name == "regular")


def test_thousands_of_names(here: Path) -> None:
    names = fill(here, 10_000 if LONG else 3_000)
    assert set(os.listdir(here)) == names
    assert len(os.listdir(here)) == len(names)
    with os.scandir(here) as found:
        for entry in found:
            assert stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode)
    for name in sorted(names)[::2]:
        (here / name).unlink()
    assert set(os.listdir(here)) == set(sorted(names)[1::2])


def test_removing_while_reading_misses_nothing(here: Path) -> None:
    """What rm -r does: read some entries, remove them, read on with the same stream."""
    names = fill(here, 3_000)
    stream = Stream(here)
    removed = set()
    while (name := stream.read()) is not None:
        if name not in (".", ".."):
            (here / name).unlink()
            removed.add(name)
    stream.close()
    assert removed == names
    assert os.listdir(here) == []


def test_what_stays_is_seen_once_whatever_changes(here: Path) -> None:
    names = fill(here, 2_000)
    gone = set(sorted(names)[::3])
    stream = Stream(here)
    seen = [stream.read() for _ in range(100)]
    for name in gone:
        (here / name).unlink()
    for n in range(500):
        touch(here / f"new-{n}")
    seen += stream.rest()
    stream.close()
    stayed = [n for n in seen if n in names - gone]
    assert len(stayed) == len(set(stayed))
    assert set(stayed) == names - gone


def test_seeking_in_a_stream(here: Path) -> None:
    fill(here, 1_000)
    stream = Stream(here)
    positions, order = [], []
    while True:
        positions.append(stream.tell())
        name = stream.read()
        if name is None:
            break
        order.append(name)
    assert len(order) == 1_002
    for at in (0, 1, 2, 3, 500, 17, 1_001, 999, 1_000):
        stream.seek(positions[at])
        assert stream.read() == order[at]
    stream.seek(positions[700])
    for name in order[:100] + order[700:705]:
        if name not in (".", ".."):
            (here / name).unlink()
    stream.seek(positions[705])
    assert stream.rest() == order[705:]
    touch(here / "fresh")
    stream.rewind()
    assert "fresh" in stream.rest()
    stream.close()


def test_renames_while_reading(here: Path) -> None:
    names = fill(here, 500)
    with os.scandir(here) as found:
        for entry in found:
            os.rename(here / entry.name, here / f"moved-{entry.name[-6:]}")
            names.discard(entry.name)
            if not names:
                break
    assert not names
    assert len(os.listdir(here)) == 500


def test_dot_entries_have_the_right_numbers(here: Path) -> None:
    inner = folder(here / "a")
    assert os.stat(f"{inner}/.").st_ino == inner.stat().st_ino
    assert os.stat(f"{inner}/..").st_ino == here.stat().st_ino
    moved = inner.rename(folder(here / "b") / "a")
    assert os.stat(f"{moved}/..").st_ino == (here / "b").stat().st_ino


def test_numbers_are_unique_and_stable(here: Path) -> None:
    numbers = {touch(here / f"f{n}").stat().st_ino for n in range(200)}
    assert len(numbers) == 200
    before = (here / "f0").stat().st_ino
    (here / "f0").unlink()
    assert touch(here / "f0").stat().st_ino not in numbers - {before}


@pytest.mark.timeout(600)
def test_tens_of_thousands_of_names(here: Path, place: Place) -> None:
    """Hard links to a few files: it is the directory that is large here. In the modes that the
    node does not choose by itself a part of them, a hundred thousand where there is time."""
    count = (100_000 if LONG else 20_000) if place.mode == best_mode() else 5_000
    at = os.open(here, os.O_RDONLY)
    for n in range(count):
        name = b"%032x.data" % n
        if n % 1000:
            os.link(b"%032x.data" % (n // 1000 * 1000), name, src_dir_fd=at, dst_dir_fd=at)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=at))
    assert len(set(os.listdir(at))) == count
    assert os.stat(b"%032x.data" % (count - 1), dir_fd=at).st_nlink == 1000
    removed = 0
    with os.scandir(at) as found:
        for entry in found:
            os.unlink(entry.name, dir_fd=at)
            removed += 1
    assert removed == count
    assert os.listdir(at) == []
    os.close(at)


def test_the_first_reply_has_names_and_their_types(here: Path) -> None:
    """Overlayfs judges by it whether a filesystem tells types."""
    for kind in ("regular", "directory", "fifo"):
        make_of(kind, here / kind)
    reply = ctypes.create_string_buffer(32 << 10)
    fd = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    try:
        length = libc.syscall(SYS_GETDENTS64, fd, reply, len(reply))
    finally:
        os.close(fd)
    found, at = {}, 0
    while at < length:
        entry = Entry.from_buffer(reply, at)
        found[entry.name.decode()] = entry.kind << 12
        at += entry.length
    kinds = {"regular": stat.S_IFREG, "directory": stat.S_IFDIR, "fifo": stat.S_IFIFO}
    assert found == {".": stat.S_IFDIR, "..": stat.S_IFDIR, **kinds}
