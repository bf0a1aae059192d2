"""Memory mappings: coherent with read and write, outliving close, private copies, programs."""

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.posix import descriptor, fatal_signal_of, touch

PAGE = mmap.PAGESIZE
MIB = 1 << 20


def test_a_shared_mapping_and_write_see_each_other(here: Path) -> None:
    path = touch(here / "f", 0o644, bytes(4 * PAGE))
    with descriptor(path) as fd, mmap.mmap(fd, 4 * PAGE) as view:
        for turn in range(50):
            at = turn * 301 % (4 * PAGE - 8)
            os.pwrite(fd, b"w%07d" % turn, at)
            assert view[at : at + 8] == b"w%07d" % turn
            view[at : at + 8] = b"m%07d" % turn
            assert os.pread(fd, 8, at) == b"m%07d" % turn
            with open(path, "rb") as other:
                other.seek(at)
                assert other.read(8) == b"m%07d" % turn


def test_mappings_of_two_processes_are_one(here: Path) -> None:
    path = touch(here / "f", 0o644, bytes(PAGE))
    to_child, to_parent = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        with descriptor(path) as fd, mmap.mmap(fd, PAGE) as view:
            os.read(to_child[0], 1)
            good = view[:5] == b"hello"
            view[:5] = b"world"
            os.write(to_parent[1], b"y" if good else b"n")
            os.read(to_child[0], 1)
        os._exit(0)
    with descriptor(path) as fd, mmap.mmap(fd, PAGE) as view:
        view[:5] = b"hello"
        os.write(to_child[1], b"x")
        assert os.read(to_parent[0], 1) == b"y"
        assert view[:5] == b"world"
        os.write(to_child[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0
    for end in (*to_child, *to_parent):
        os.close(end)
    assert path.read_bytes()[:5] == b"world"


def test_a_private_mapping_keeps_its_changes(here: Path) -> None:
    path = touch(here / "f", 0o644, b"a" * PAGE)
    with descriptor(path, os.O_RDONLY) as fd:
        view = mmap.mmap(fd, PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with view:
        view[:3] = b"zzz"
        assert path.read_bytes() == b"a" * PAGE
        assert view[:4] == b"zzza"


def test_a_mapping_outlives_its_descriptor(here: Path) -> None:
    """Stores made after close reach the file: the backing file must stay open for them."""
    path = here / "f"
    with descriptor(path, os.O_CREAT | os.O_RDWR) as fd:
        os.ftruncate(fd, MIB)
        view = mmap.mmap(fd, MIB)
    with view:
        for at in range(0, MIB, 10 * PAGE):
            view[at : at + 4] = b"late"
        view.flush()
        data = path.read_bytes()
        assert all(data[at : at + 4] == b"late" for at in range(0, MIB, 10 * PAGE))
        view[0:4] = b"LATE"
    assert path.read_bytes()[:4] == b"LATE"


def test_a_mapping_of_an_unlinked_file(here: Path) -> None:
    path = touch(here / "f", 0o644, b"content" + bytes(PAGE))
    with descriptor(path) as fd:
        view = mmap.mmap(fd, PAGE)
    path.unlink()
    path.write_bytes(b"someone else")
    with view:
        assert view[:7] == b"content"
        view[:7] = b"CONTENT"
        view.flush()
        assert view[:7] == b"CONTENT"
    assert path.read_bytes() == b"someone else"


def test_a_mapping_of_a_replaced_file_keeps_the_old_content(here: Path) -> None:
    path = touch(here / "f", 0o644, b"old" + bytes(PAGE))
    with descriptor(path) as fd, mmap.mmap(fd, PAGE) as view:
        (here / "g").write_bytes(b"new")
        os.replace(here / "g", path)
        assert view[:3] == b"old"
        with descriptor(path) as other, mmap.mmap(other, 3, prot=mmap.PROT_READ) as fresh:
            assert fresh[:] == b"new"


def test_msync_moves_the_times_and_survives_reopening(here: Path) -> None:
    path = touch(here / "f", 0o644, bytes(PAGE))
    os.utime(path, ns=(10**18, 10**18))
    with descriptor(path) as fd, mmap.mmap(fd, PAGE) as view:
        view[100:104] = b"sync"
        view.flush()
        os.fsync(fd)
        assert os.fstat(fd).st_mtime_ns > 10**18
    assert path.stat().st_mtime_ns > 10**18
    assert path.read_bytes()[100:104] == b"sync"


def test_growing_under_a_mapping(here: Path) -> None:
    path = touch(here / "f", 0o644, b"x" * 100)
    with descriptor(path) as fd:
        os.ftruncate(fd, 2 * PAGE)
        with mmap.mmap(fd, 2 * PAGE) as view:
            assert view[:100] == b"x" * 100
            assert view[100 : 2 * PAGE] == bytes(2 * PAGE - 100)
            view[PAGE] = 7
            os.ftruncate(fd, PAGE)
            os.ftruncate(fd, 2 * PAGE)
            assert view[PAGE] == 0


def test_beyond_the_end_is_sigbus(here: Path) -> None:
    path = touch(here / "f", 0o644, bytes(3 * PAGE))
    with descriptor(path) as fd, mmap.mmap(fd, 3 * PAGE) as view:
        os.ftruncate(fd, PAGE)
        assert fatal_signal_of(lambda: view[2 * PAGE]) == 7  # SIGBUS


def test_populate_and_advice(here: Path) -> None:
    data = os.urandom(4 * MIB)
    path = touch(here / "f", 0o644, data)
    with descriptor(path, os.O_RDONLY) as fd:
        flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        with mmap.mmap(fd, 4 * MIB, flags=flags, prot=mmap.PROT_READ) as view:
            for advice in (mmap.MADV_SEQUENTIAL, mmap.MADV_WILLNEED, mmap.MADV_DONTNEED):
                view.madvise(advice)
            assert view[:] == data


@pytest.mark.parametrize("order", ["write first", "map first"])
def test_mapping_a_file_made_by_truncation(here: Path, order: str) -> None:
    """The write path of clients without direct storage access: ftruncate, map, fill."""
    size = 3 * MIB + 17
    data = os.urandom(size)
    path = here / "f"
    with descriptor(path, os.O_CREAT | os.O_RDWR) as fd:
        if order == "write first":
            os.write(fd, b"header to be overwritten")
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as view:
            view[:] = data
    assert path.read_bytes() == data
    assert path.stat().st_size == size


def test_a_program_runs_from_here(here: Path) -> None:
    script = touch(here / "script", 0o755, b"#!/bin/sh\necho from $0\n")
    done = subprocess.run([script], capture_output=True, check=True, text=True)
    assert done.stdout == f"from {script}\n"
    program = here / "true"
    program.write_bytes(Path("/bin/true").read_bytes())
    program.chmod(0o755)
    subprocess.run([program], check=True)
