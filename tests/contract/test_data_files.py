"""Data files on a real directory."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.store.files import DataFiles, Description, describe, description, parse_name

INO = (7 << 48) | 0x1234


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DataFiles]:
    made = DataFiles(tmp_path)
    yield made
    made.close()


def test_create_open_unlink(files: DataFiles) -> None:
    fd = files.create(INO, 0)
    os.write(fd, b"block")
    os.close(fd)
    fd = files.open(INO, 0, os.O_RDONLY)
    assert os.read(fd, 10) == b"block"
    os.close(fd)
    assert files.stat(INO, 0).st_size == 5
    assert files.stat(INO, 0).st_mode & 0o777 == 0o600
    assert files.unlink(INO, 0)
    assert not files.unlink(INO, 0)


def test_versions_are_different_files(files: DataFiles) -> None:
    os.close(files.create(INO, 0))
    os.close(files.create(INO, 1))
    assert files.unlink(INO, 0)
    assert files.stat(INO, 1)


def test_an_existing_data_file_is_never_taken_over(files: DataFiles) -> None:
    os.close(files.create(INO, 0))
    with pytest.raises(FileExistsError):
        files.create(INO, 0)


def test_a_missing_data_file(files: DataFiles) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(INO, 0, os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        files.stat(INO, 0)
    assert not files.unlink(INO, 0)


def test_the_path_is_that_of_the_file(files: DataFiles) -> None:
    os.close(files.create(INO, 3))
    assert os.path.exists(files.path(INO, 3))


def test_a_file_without_a_name_is_adopted(files: DataFiles) -> None:
    fd = files.tmpfile()
    os.write(fd, b"block")
    assert list(files.scan()) == []
    files.adopt(fd, INO, 0)
    os.close(fd)
    assert list(files.scan()) == [(INO, 0)]
    assert files.stat(INO, 0).st_size == 5


def test_scan_finds_every_data_file_and_strangers_the_rest(files: DataFiles) -> None:
    expected = {(INO + step * 977, step) for step in range(50)}
    for ino, version in expected:
        os.close(files.create(ino, version))
    Path(files.root, "notes").touch()
    Path(files.path(INO, 0)).with_name("core").touch()
    misplaced = Path(files.path(INO, 0)).with_name(f"{INO + (1 << 10):016x}.0")
    misplaced.touch()
    assert set(files.scan()) == expected
    assert {Path(path).name for path in files.strangers()} == {"notes", "core", misplaced.name}


@pytest.mark.parametrize(
    "name", ["", "x", "0" * 16, f"{1:016x}.", f"{1:016x}.x", f"{10:016X}.0", f"{1:016x}.00"]
)
def test_names_that_are_none(name: str) -> None:
    assert parse_name(name) is None


def test_names_are_read_back(files: DataFiles) -> None:
    name = os.path.basename(files.path(INO, 255))
    assert parse_name(name) == (INO, 255)


def test_a_data_file_describes_itself(files: DataFiles) -> None:
    fd = files.create(INO, 0)
    assert description(fd) is None
    written = Description(
        ino=INO,
        version=0,
        size=5,
        checksum=b"c" * 16,
        path=b"cache/a",
        mode=0o100644,
        uid=1,
        gid=2,
        mtime_ns=3,
    )
    if not describe(fd, written):
        pytest.skip("the filesystem of the tests keeps no extended attributes")
    assert description(fd) == written
    os.setxattr(fd, "user.kvfs", b"garbage")
    assert description(fd) is None
    os.close(fd)


def test_a_long_path_hint_is_left_out(files: DataFiles) -> None:
    fd = files.create(INO, 0)
    long = Description(
        ino=INO,
        version=0,
        size=0,
        checksum=b"",
        path=b"d/" * 2000,
        mode=0,
        uid=0,
        gid=0,
        mtime_ns=0,
    )
    if not describe(fd, long):
        pytest.skip("the filesystem of the tests keeps no extended attributes")
    found = description(fd)
    assert found is not None and found.path == b"" and found.ino == INO
    os.close(fd)
