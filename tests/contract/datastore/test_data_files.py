"""Data files on a real directory."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.datastore.files import (
    DataFiles,
    Description,
    describe,
    description,
    name_of,
    parse_name,
)
from kvfs.datastore.kernel import file_sequence, filesystem_magic, inode_search
from tests.cluster.waiting import wait_until

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


def nameless(directory: Path) -> int:
    """Open files of this process that lie there without a name."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            found += target.startswith(f"{directory}/") and target.endswith(" (deleted)")
    return found


def test_data_files_are_made_ahead_and_named_when_they_are_wanted(
    files: DataFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inode_search, "is_long_after_removals", lambda _directory: True)
    files.keep_spares()
    made = [files.create(INO, 0)]
    made.append(files.create(INO + 1, 0))
    wait_until(lambda: nameless(tmp_path) > 0, "the thread has made some ahead")
    before = time.clock_gettime_ns(time.CLOCK_REALTIME)
    made += [files.create(INO + n, 0) for n in range(2, 300)]
    tick = 20_000_000  # the kernel stamps files by a coarser clock
    assert all(os.fstat(fd).st_mtime_ns >= before - tick for fd in made[2:])
    made.append(files.create(INO + 4096, 0))  # in a directory that is not there yet
    for at, fd in enumerate(made[:-1]):
        os.write(fd, b"%d" % at)
        assert files.stat(INO + at, 0).st_ino == os.fstat(fd).st_ino
        assert files.stat(INO + at, 0).st_mode & 0o777 == 0o600
    assert files.stat(INO + 4096, 0).st_nlink == 1
    with pytest.raises(FileExistsError):
        files.create(INO, 0)
    assert sorted(files.scan())[:2] == [(INO, 0), (INO + 1, 0)]
    assert not list(files.strangers())
    for fd in made:
        os.close(fd)
    files.close()
    assert nameless(tmp_path) == 0


def test_where_a_create_takes_no_search_no_data_files_are_made_ahead(
    files: DataFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inode_search, "is_long_after_removals", lambda _directory: False)
    files.keep_spares()
    made = [files.create(INO + n, 0) for n in range(3)]
    assert not [each for each in threading.enumerate() if each.name == "kvfs-spares"]
    assert nameless(tmp_path) == 0
    assert [files.stat(INO + n, 0).st_ino for n in range(3)] == [os.fstat(fd).st_ino for fd in made]
    for fd in made:
        os.close(fd)


def test_without_the_right_to_name_them_data_files_are_made_as_ever(tmp_path: Path) -> None:
    """Drops CAP_DAC_READ_SEARCH in a process of its own, where it may."""
    code = (
        "import os, sys; from pathlib import Path; from kvfs.datastore.files import DataFiles\n"
        "os.setegid(65534); os.seteuid(65534)\n"
        "from kvfs.datastore.kernel import inode_search\n"
        "inode_search.is_long_after_removals = lambda _directory: True\n"
        "files = DataFiles(Path(sys.argv[1])); files.keep_spares()\n"
        "made = [files.create(n, 0) for n in range(200)]\n"
        "assert all(files.stat(n, 0).st_ino == os.fstat(fd).st_ino for n, fd in enumerate(made))\n"
        "files.close()"
    )
    if os.geteuid() == 0:
        os.chown(tmp_path, 65534, 65534)
        for above in tmp_path.parents[:3]:  # the third where several processes share the tests
            if above.stat().st_uid == 0 and above.name.startswith(("pytest-", "popen-")):
                os.chmod(above, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


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


def test_a_temporary_file_leaves_nothing(files: DataFiles) -> None:
    fd = files.tmpfile()
    assert os.write(fd, b"block") == 5
    assert os.listdir(files.root) == []
    os.close(fd)


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
    assert found is not None
    assert found.path == b""
    assert found.ino == INO
    os.close(fd)


def test_what_arrives_is_no_data_file_until_it_is_whole(files: DataFiles) -> None:
    fd = files.begin_arriving(INO, 3, 10)
    os.pwrite(fd, b"arriv", 0)
    with pytest.raises(FileNotFoundError):
        files.open(INO, 3, os.O_RDONLY)
    assert not list(files.scan())
    assert not list(files.strangers())
    reader = files.open_arriving(INO, 3)
    os.pwrite(fd, b"ed 10", 5)
    files.arrived(INO, 3)
    with pytest.raises(FileNotFoundError):
        files.open_arriving(INO, 3)
    assert list(files.scan()) == [(INO, 3)]
    assert os.pread(reader, 20, 0) == b"arrived 10"
    os.close(reader)
    os.close(fd)


def test_what_does_not_arrive_goes(files: DataFiles) -> None:
    os.close(files.begin_arriving(INO, 0, 5))
    fd = files.begin_arriving(INO, 0, 8)  # begun anew
    assert os.fstat(fd).st_size == 8
    files.drop_arriving(INO, 0)
    files.drop_arriving(INO, 0)
    os.close(fd)
    os.close(files.begin_arriving(INO, 1, 5))
    files.clear_arriving(lambda _: True)
    with pytest.raises(FileNotFoundError):
        files.open_arriving(INO, 1)
    os.close(files.begin_arriving(INO, 1, 5))


def test_drafts_that_programs_have_open_are_kept(files: DataFiles) -> None:
    for ino in (INO, INO + 1):
        os.close(files.begin_draft(ino, 1))
    Path(files.root, "arriving", "no number.draft").touch()
    files.clear_arriving(lambda ino: ino == INO)
    os.close(files.open_draft(INO, 1))
    with pytest.raises(FileNotFoundError):
        files.open_draft(INO + 1, 1)


def test_a_new_version_of_the_same_data_file(files: DataFiles) -> None:
    fd = files.create(INO, 0)
    os.write(fd, b"new content")
    files.add_version(INO, 0, 1)
    with pytest.raises(FileExistsError):
        files.add_version(INO, 0, 1)
    files.unlink(INO, 0)
    new = files.open(INO, 1, os.O_RDONLY)
    assert os.path.sameopenfile(fd, new)
    os.close(fd)
    os.close(new)


@pytest.mark.parametrize("kind", ["local", "asks a server", "without statx"])
def test_many_files_are_opened_by_whatever_the_system_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    magic = 0x6969 if kind == "asks a server" else filesystem_magic.EXT4  # NFS
    monkeypatch.setattr(filesystem_magic, "magic_of", lambda _: magic)
    if kind == "without statx":
        monkeypatch.setattr(file_sequence, "_find_statx", lambda: None)
    with contextlib.closing(DataFiles(tmp_path)) as files:
        fd = files.create(INO, 0)
        os.write(fd, b"block")
        os.close(fd)
        os.mkfifo(files.path(INO + 1, 0))
        (sequence,) = files.sequences()
        before = len(os.listdir("/proc/self/fd"))
        fd, size = sequence.open(*name_of(INO, 0))
        assert os.pread(fd, 10, 0) == b"block"
        assert size == 5
        sequence.close(fd)
        with pytest.raises(OSError, match="no regular file"):
            sequence.open(*name_of(INO + 1, 0))
        sequence.end()
        assert len(os.listdir("/proc/self/fd")) == before


def test_after_the_end_nothing_is_read_from_another_store(tmp_path: Path) -> None:
    """A number of a closed descriptor is that of another file soon."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one = DataFiles(tmp_path / "one")
    with contextlib.closing(DataFiles(tmp_path / "other")) as other:
        os.close(other.create(INO, 0))
        (sequence,) = one.sequences()
        number = one._directory
        one.close()
        os.dup2(other._directory, number)
        try:
            with pytest.raises(OSError, match="Bad file descriptor"):
                sequence.open(*name_of(INO, 0))
        finally:
            os.close(number)
