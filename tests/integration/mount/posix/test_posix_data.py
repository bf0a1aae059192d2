"""Reading and writing: open flags, holes, allocation, copies, direct I/O, unlinked files."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import sqlite3
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import (
    ALICE,
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO,
    as_user,
    check,
    descriptor,
    fallocate,
    folder,
    handle_of,
    libc,
    link_descriptor,
    needs_root,
    open_handle,
    refused,
    signals,
    touch,
)

PAGE = 4096
MIB = 1 << 20
TIB = 1 << 40


def aligned(size: int, fill: bytes = b"\0") -> mmap.mmap:
    """A page-aligned buffer, as direct I/O needs it."""
    buffer = mmap.mmap(-1, size)
    buffer[:] = fill * (size // len(fill))
    return buffer


def pattern(size: int, salt: int = 0) -> bytes:
    return bytes((n * 7 + n // 251 + salt) & 0xFF for n in range(min(size, 65536))) * (
        size // min(size, 65536)
    )


# --- open ---


def test_open_flags(here: Path) -> None:
    path = here / "f"
    with refused(errno.ENOENT):
        os.open(path, os.O_RDWR)
    with descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.write(fd, b"hello")
    with refused(errno.EEXIST):
        os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with descriptor(path, os.O_RDONLY) as fd, refused(errno.EBADF):
        os.write(fd, b"x")
    with descriptor(path, os.O_WRONLY) as fd, refused(errno.EBADF):
        os.read(fd, 1)
    with descriptor(path, os.O_RDWR | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
    with refused(errno.ENOTDIR):
        os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
        with refused(errno.EISDIR):
            os.open(here, flags)


def test_fifos_and_sockets_open_as_such(here: Path) -> None:
    os.mkfifo(here / "fifo")
    with refused(errno.ENXIO):
        os.open(here / "fifo", os.O_WRONLY | os.O_NONBLOCK)
    with (
        descriptor(here / "fifo", os.O_RDONLY | os.O_NONBLOCK) as reader,
        descriptor(here / "fifo", os.O_WRONLY | os.O_NONBLOCK) as writer,
    ):
        os.write(writer, b"through the pipe")
        assert os.read(reader, 100) == b"through the pipe"
    os.mknod(here / "socket", stat.S_IFSOCK | 0o644)
    with refused(errno.ENXIO):
        os.open(here / "socket", os.O_RDONLY)


def test_sockets_can_be_bound_and_reached(here: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(here / "s"))
        server.listen()
        client.connect(str(here / "s"))
        peer, _ = server.accept()
        with peer:
            client.send(b"hello")
            assert peer.recv(10) == b"hello"


def test_append(here: Path) -> None:
    path = touch(here / "f", 0o644, b"start")
    with descriptor(path, os.O_WRONLY | os.O_APPEND) as one, descriptor(path) as two:
        os.write(one, b"-one")
        os.pwrite(two, b"-two", os.fstat(two).st_size)
        os.write(one, b"-three")
        os.lseek(one, 0, os.SEEK_SET)
        os.write(one, b"-four")
    assert path.read_bytes() == b"start-one-two-three-four"


def test_append_from_many_processes_loses_nothing(here: Path) -> None:
    path = touch(here / "log")
    children = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            with descriptor(path, os.O_WRONLY | os.O_APPEND) as fd:
                for n in range(100):
                    os.write(fd, b"%d %03d %s\n" % (worker, n, b"x" * 50))
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    lines = path.read_bytes().splitlines()
    assert len(lines) == 400
    assert len(set(lines)) == 400
    for worker in range(4):
        assert [x.split()[1] for x in lines if x[0] == ord("0") + worker] == [
            b"%03d" % n for n in range(100)
        ]


def test_append_can_be_turned_on(here: Path) -> None:
    path = touch(here / "f", 0o644, b"0123456789")
    with descriptor(path) as fd:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        os.write(fd, b"ab")
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        os.pwrite(fd, b"cd", 0)
    assert path.read_bytes() == b"cd23456789ab"


@needs_root
def test_noatime_is_for_owners(here: Path) -> None:
    path = touch(here / "f", 0o644, b"x")
    os.utime(path, ns=(1, 10**18))
    with descriptor(path, os.O_RDONLY | os.O_NOATIME) as fd:
        assert os.read(fd, 1) == b"x"
    assert path.stat().st_atime_ns == 1
    with as_user(ALICE), refused(errno.EPERM):
        os.open(path, os.O_RDONLY | os.O_NOATIME)


def test_tmpfile(here: Path) -> None:
    try:
        fd = os.open(here, os.O_TMPFILE | os.O_RDWR, 0o640)
    except OSError as error:
        assert error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT)
        pytest.skip(f"no O_TMPFILE here: {error.strerror}")
    try:
        os.write(fd, b"nameless")
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(here) == []
        link_descriptor(fd, here / "named")
        assert os.fstat(fd).st_nlink == 1
    finally:
        os.close(fd)
    assert (here / "named").read_bytes() == b"nameless"
    assert (here / "named").stat().st_mode & 0o777 == 0o640


# --- truncation and holes ---


def test_truncate_and_extend(here: Path) -> None:
    path = touch(here / "f", 0o644, b"x" * 10_000)
    os.truncate(path, 5_000)
    assert path.read_bytes() == b"x" * 5_000
    os.truncate(path, 9_000)
    assert path.read_bytes() == b"x" * 5_000 + b"\0" * 4_000
    with descriptor(path) as fd:
        os.ftruncate(fd, 4_095)
        os.ftruncate(fd, 4_097)
        assert os.pread(fd, 10_000, 4_000) == b"x" * 95 + b"\0" * 2
    with descriptor(path, os.O_RDONLY) as fd, refused(errno.EINVAL, errno.EBADF):
        os.ftruncate(fd, 1)
    for negative in (-1, -(2**40)):
        with refused(errno.EINVAL):
            os.truncate(path, negative)
    with refused(errno.EISDIR):
        os.truncate(here, 0)


def test_a_hole_reads_as_zeros(here: Path) -> None:
    path = here / "f"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"end", 10 * MIB)
        assert os.fstat(fd).st_size == 10 * MIB + 3
        assert os.pread(fd, MIB, 5 * MIB) == bytes(MIB)
        assert os.pread(fd, 10, 10 * MIB - 2) == b"\0\0end"
        assert os.fstat(fd).st_blocks * 512 < MIB
    assert path.stat().st_blocks * 512 < MIB


def test_a_sparse_file_of_a_tebibyte(here: Path) -> None:
    path = here / "huge"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, TIB)
        assert os.fstat(fd).st_size == TIB
        assert os.fstat(fd).st_blocks == 0
        block = pattern(65536)
        for at in (0, TIB // 3 // PAGE * PAGE, TIB - 65536):
            assert os.pwrite(fd, block, at) == 65536
            assert os.pread(fd, 65536, at) == block
        os.fsync(fd)
        used = os.fstat(fd).st_blocks * 512
        assert 3 * 65536 <= used < 2 * MIB
    found = path.stat()
    assert (found.st_size, found.st_blocks * 512) == (TIB, used)
    with descriptor(path, os.O_RDONLY) as fd:
        assert os.pread(fd, 65536, TIB - 65536) == block
        assert os.pread(fd, 10, TIB // 2) == bytes(10)
    os.truncate(path, 0)
    assert path.stat().st_blocks == 0


def test_blocks_are_counted_honestly(here: Path) -> None:
    path = here / "f"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, pattern(MIB))
        os.fsync(fd)
        assert MIB <= os.fstat(fd).st_blocks * 512 <= MIB + 65536
    assert MIB <= path.stat().st_blocks * 512 <= MIB + 65536
    assert path.stat().st_blksize == PAGE
    os.truncate(path, MIB // 2)
    assert path.stat().st_blocks * 512 <= MIB // 2 + 65536


def test_seek_data_and_hole(here: Path, place: Place) -> None:
    path = here / "f"
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, 8 * MIB)
        os.pwrite(fd, pattern(65536), MIB)
        os.pwrite(fd, pattern(65536), 4 * MIB)
        os.fsync(fd)
        if place.is_bare:  # without LSEEK the kernel sees one extent
            assert os.lseek(fd, 5, os.SEEK_DATA) == 5
            assert os.lseek(fd, 5, os.SEEK_HOLE) == 8 * MIB
        else:
            assert os.lseek(fd, 0, os.SEEK_DATA) == MIB
            assert os.lseek(fd, MIB + 5, os.SEEK_DATA) == MIB + 5
            assert os.lseek(fd, 0, os.SEEK_HOLE) == 0
            assert os.lseek(fd, MIB, os.SEEK_HOLE) == MIB + 65536
            assert os.lseek(fd, 2 * MIB, os.SEEK_DATA) == 4 * MIB
            assert os.lseek(fd, 4 * MIB, os.SEEK_HOLE) == 4 * MIB + 65536
            with refused(errno.ENXIO):
                os.lseek(fd, 5 * MIB, os.SEEK_DATA)
        with refused(errno.ENXIO):
            os.lseek(fd, 8 * MIB, os.SEEK_HOLE)
        assert os.lseek(fd, 0, os.SEEK_END) == 8 * MIB
        with refused(errno.EINVAL):
            os.lseek(fd, -1, os.SEEK_SET)


def can_allocate(fd: int, place: Place) -> bool:
    """libfuse alone has no fallocate: there it must say so, and not pretend."""
    if not place.is_bare:
        return True
    with refused(errno.EOPNOTSUPP):
        fallocate(fd, 0, 0, PAGE)
    return False


def test_fallocate(here: Path, place: Place) -> None:
    with descriptor(here / "f", os.O_RDWR | os.O_CREAT) as fd:
        if not can_allocate(fd, place):
            return
        fallocate(fd, 0, 0, MIB)
        assert (os.fstat(fd).st_size, os.fstat(fd).st_blocks * 512) == (MIB, MIB)
        fallocate(fd, FALLOC_KEEP_SIZE, MIB, MIB)
        assert os.fstat(fd).st_size == MIB
        assert os.fstat(fd).st_blocks * 512 == 2 * MIB
        assert os.pread(fd, MIB, 0) == bytes(MIB)
        os.pwrite(fd, b"x" * MIB, 0)
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, PAGE, 10 * PAGE)
        assert os.pread(fd, 12 * PAGE, 0) == b"x" * PAGE + bytes(10 * PAGE) + b"x" * PAGE
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 100, 10)
        assert os.pread(fd, 12, 99) == b"x" + bytes(10) + b"x"
        fallocate(fd, FALLOC_ZERO, 20 * PAGE, PAGE)
        assert os.pread(fd, PAGE + 1, 20 * PAGE) == bytes(PAGE) + b"x"
        assert os.fstat(fd).st_size == MIB
        for offset, length in ((-1, 1), (0, 0), (0, -1)):
            with refused(errno.EINVAL):
                fallocate(fd, 0, offset, length)
    assert (here / "f").stat().st_size == MIB
    with descriptor(here / "f", os.O_RDONLY) as fd, refused(errno.EBADF):
        fallocate(fd, 0, 0, MIB)


def test_posix_fallocate_always_works(here: Path) -> None:
    """Where the filesystem has no fallocate, the C library writes: the size is right either way."""
    with descriptor(here / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.fstat(fd).st_blocks * 512 >= 100_000
        os.posix_fallocate(fd, 10, 20)
        assert os.fstat(fd).st_size == 100_000


# --- copies ---


def test_copy_file_range(here: Path) -> None:
    data = pattern(3 * MIB)
    touch(here / "a", 0o644, data)
    with (
        descriptor(here / "a", os.O_RDONLY) as a,
        descriptor(here / "b", os.O_RDWR | os.O_CREAT) as b,
    ):
        done = 0
        while done < len(data):
            step = os.copy_file_range(a, b, len(data) - done, done, done)
            assert step > 0
            done += step
        assert os.copy_file_range(a, b, 100, len(data), len(data)) == 0
        assert os.copy_file_range(a, b, 10, 5, len(data) + 5) == 10
        assert os.fstat(b).st_size == len(data) + 15
    assert (here / "b").read_bytes() == data + bytes(5) + data[5:15]


def test_copy_file_range_within_a_file(here: Path) -> None:
    path = touch(here / "f", 0o644, pattern(65536))
    with descriptor(path) as fd:
        assert os.copy_file_range(fd, fd, 100, 0, 65536) == 100
        assert os.pread(fd, 100, 65536) == pattern(65536)[:100]
        with refused(errno.EINVAL):
            os.copy_file_range(fd, fd, 200, 0, 100)


def test_sendfile_and_splice(here: Path) -> None:
    data = pattern(2 * MIB)
    touch(here / "a", 0o644, data)
    with (
        descriptor(here / "a", os.O_RDONLY) as a,
        descriptor(here / "b", os.O_RDWR | os.O_CREAT) as b,
    ):
        done = 0
        while done < len(data):
            done += os.sendfile(b, a, done, len(data) - done)
    assert (here / "b").read_bytes() == data
    read_end, write_end = os.pipe()
    try:
        with (
            descriptor(here / "a", os.O_RDONLY) as a,
            descriptor(here / "c", os.O_RDWR | os.O_CREAT) as c,
        ):
            done = 0
            while done < len(data):
                step = os.splice(a, write_end, 65536, offset_src=done)
                left = step
                while left:
                    left -= os.splice(read_end, c, left, offset_dst=done + step - left)
                done += step
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (here / "c").read_bytes() == data


# --- many ways to read and write ---


def test_vectors(here: Path) -> None:
    with descriptor(here / "f", os.O_RDWR | os.O_CREAT) as fd:
        assert os.writev(fd, [b"abc", b"", b"defg"]) == 7
        assert os.pwritev(fd, [b"X", b"YZ"], 2) == 3
        parts = [bytearray(3), bytearray(10)]
        assert os.preadv(fd, parts, 0) == 7
        assert bytes(parts[0]) + bytes(parts[1]) == b"abXYZfg" + bytes(6)


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_a_whole_block_in_one_call(here: Path, direct: bool) -> None:
    size = 64 * MIB + PAGE
    block = aligned(size, pattern(PAGE, 3))
    flags = os.O_DIRECT if direct else 0
    with descriptor(here / "block", os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags) as fd:
        assert os.write(fd, block) == size
    back = aligned(size)
    with descriptor(here / "block", os.O_RDONLY | flags) as fd:
        assert os.readv(fd, [back]) == size
        assert os.readv(fd, [back]) == 0
    assert back[:] == block[:]
    block.close()
    back.close()


def test_direct_io_wants_alignment(here: Path) -> None:
    block = aligned(2 * PAGE, pattern(PAGE))
    with descriptor(here / "f", os.O_CREAT | os.O_RDWR | os.O_DIRECT) as fd:
        assert os.pwrite(fd, block, 0) == 2 * PAGE
        assert os.pwrite(fd, block, 2 * PAGE) == 2 * PAGE
        back = aligned(8 * PAGE)
        assert os.preadv(fd, [back], PAGE) == 3 * PAGE
        assert back[: 2 * PAGE] == block[:]
    os.truncate(here / "f", 3 * PAGE + 100)
    with descriptor(here / "f", os.O_RDONLY | os.O_DIRECT) as fd:
        assert os.preadv(fd, [back], 2 * PAGE) == PAGE + 100
        assert os.preadv(fd, [back], 4 * PAGE) == 0


def test_direct_io_is_toggled_on_an_open_file(here: Path) -> None:
    block = aligned(16 * PAGE, pattern(PAGE, 9))
    with descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.pwrite(fd, b"buffered" * 512, 0)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        back = aligned(16 * PAGE)
        assert os.preadv(fd, [back], 0) == PAGE
        assert back[:PAGE] == b"buffered" * 512
        assert os.pwrite(fd, block, PAGE) == 16 * PAGE
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
        assert os.pread(fd, 17 * PAGE, 0) == b"buffered" * 512 + block[:]
        os.pwrite(fd, b"!", 5)
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        assert os.preadv(fd, [back], 0) == 16 * PAGE
        assert back[:8] == b"buffe!ed"


def test_direct_and_buffered_see_each_other(here: Path) -> None:
    path = here / "f"
    block = aligned(4 * PAGE, pattern(PAGE, 1))
    with (
        descriptor(path, os.O_CREAT | os.O_RDWR) as plain,
        descriptor(path, os.O_RDWR | os.O_DIRECT) as direct,
    ):
        for turn in range(8):
            os.pwrite(plain, bytes([turn]) * (4 * PAGE), 0)
            assert os.preadv(direct, [block], 0) == 4 * PAGE
            assert block[:] == bytes([turn]) * (4 * PAGE)
            block[:] = bytes([turn + 100]) * (4 * PAGE)
            assert os.pwrite(direct, block, 0) == 4 * PAGE
            assert os.pread(plain, 4 * PAGE, 0) == block[:]


def test_reading_at_the_end(here: Path) -> None:
    path = touch(here / "f", 0o644, b"12345")
    with descriptor(path) as fd:
        assert os.pread(fd, 10, 3) == b"45"
        assert os.pread(fd, 10, 5) == b""
        assert os.pread(fd, 10, 10**15) == b""
        os.pwrite(fd, b"6", 5)
        assert os.pread(fd, 10, 3) == b"456"
        with refused(errno.EINVAL):
            os.pread(fd, 1, -1)
        with refused(errno.EFBIG, errno.EINVAL):
            os.pwrite(fd, b"x", 2**63 - 1)
        assert os.fstat(fd).st_size == 6


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "sync_file_range", "syncfs"])
def test_syncing(here: Path, call: str) -> None:
    with (
        descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd,
        descriptor(here, os.O_RDONLY) as directory,
    ):
        os.write(fd, b"data")
        if call == "sync_file_range":
            check(libc.sync_file_range(fd, 0, 4096, 7))
        elif call == "syncfs":
            check(libc.syncfs(fd))
        else:
            getattr(os, call)(fd)
            getattr(os, call)(directory)
    assert (here / "f").read_bytes() == b"data"


@pytest.mark.parametrize("restart", [True, False])
def test_no_signal_ends_what_goes_to_the_disk(here: Path, place: Place, *, restart: bool) -> None:
    length = ctypes.c_size_t(MIB)
    with (
        descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd,
        descriptor(here / "copy", os.O_CREAT | os.O_RDWR) as copy,
        descriptor(here, os.O_RDONLY) as directory,
    ):
        os.write(fd, bytes(MIB))
        with mmap.mmap(fd, MIB) as view:
            start = ctypes.addressof(ctypes.c_char.from_buffer(view))
            calls: dict[str, Callable[[], int]] = {
                "fsync": lambda: libc.fsync(fd),
                "fdatasync": lambda: libc.fdatasync(fd),
                "fsync of a directory": lambda: libc.fsync(directory),
                "copy_file_range": lambda: libc.copy_file_range(
                    fd, ctypes.byref(ctypes.c_long(0)), copy, None, length, 0
                ),
                "msync": lambda: libc.msync(ctypes.c_void_p(start), length, 4),
                "fallocate": lambda: libc.fallocate(
                    copy, 0, ctypes.c_long(0), ctypes.c_long(8 * MIB)
                ),
                "ftruncate": lambda: libc.ftruncate(copy, ctypes.c_long(0)),
            }
            if place.is_bare:
                # The kernel copies by a pipe itself, which any signal ends, on ext4 too.
                del calls["fallocate"], calls["copy_file_range"]
            with signals(0.002, restart=restart):
                for turn in range(15):
                    touch(here / f"n{turn}")
                    view[turn] = turn
                    os.pwrite(fd, b"x" * PAGE, turn * PAGE)
                    for name, call in calls.items():
                        check(call(), name)


@pytest.mark.parametrize("restart", [True, False])
def test_sqlite_beside_a_timer(here: Path, *, restart: bool) -> None:
    with contextlib.closing(sqlite3.connect(here / "db")) as database:
        database.execute("create table t (n integer)")
        with signals(0.002, restart=restart):
            for number in range(15):
                with database:
                    database.execute("insert into t values (?)", (number,))
        assert database.execute("select sum(n) from t").fetchone() == (105,)


def test_a_child_that_ends_does_not_end_an_fsync(here: Path) -> None:
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        with descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd:
            for turn in range(15):
                os.pwrite(fd, bytes(MIB), turn * MIB)
                with subprocess.Popen(["true"]):
                    check(libc.fsync(fd), "fsync")
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_advice_is_harmless(here: Path) -> None:
    path = touch(here / "f", 0o644, pattern(4 * MIB))
    with descriptor(path) as fd:
        for advice in range(6):
            os.posix_fadvise(fd, 0, 0, advice)
        check(libc.readahead(fd, 0, 4 * MIB))
        assert os.pread(fd, 4 * MIB, 0) == pattern(4 * MIB)


# --- open-unlinked files ---


def test_an_unlinked_file_lives_while_it_is_open(here: Path) -> None:
    path = touch(here / "f", 0o600, b"before")
    with descriptor(path) as fd:
        number = os.fstat(fd).st_ino
        path.unlink()
        assert os.listdir(here) == []
        found = os.fstat(fd)
        assert (found.st_nlink, found.st_size, found.st_ino) == (0, 6, number)
        assert os.write(fd, b"after! and more") == 15
        os.ftruncate(fd, 10)
        assert os.fstat(fd).st_size == 10
        os.fchmod(fd, 0o640)
        os.utime(fd, ns=(5, 6))
        found = os.fstat(fd)
        assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o640, 6)
        assert os.pread(fd, 100, 0) == b"after! and"
        os.fsync(fd)
        with descriptor(Path(f"/proc/self/fd/{fd}"), os.O_RDONLY) as again:
            assert os.read(again, 100) == b"after! and"
        path.write_bytes(b"another file of this name")
        assert os.pread(fd, 5, 0) == b"after"
        assert path.stat().st_ino != number
        os.setxattr(fd, "user.k", b"v")
        assert os.getxattr(fd, "user.k") == b"v"


@needs_root
def test_a_handle_of_an_unlinked_file_is_stale(here: Path) -> None:
    for turn in range(20):
        path = touch(here / f"f{turn}", 0o644, b"x")
        handle = handle_of(path)
        path.unlink()
        with refused(errno.ESTALE):
            open_handle(here, handle, os.O_RDONLY)
        handle = handle_of(touch(path, 0o644, b"x"))
        with descriptor(path, os.O_RDONLY):
            path.unlink()
        with refused(errno.ESTALE):
            open_handle(here, handle, os.O_RDONLY)


def test_an_unlinked_file_gives_its_space_back(here: Path) -> None:
    def used() -> int:
        found = os.statvfs(here)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    before = used()
    with descriptor(here / "f", os.O_CREAT | os.O_RDWR) as fd:
        os.write(fd, pattern(32 * MIB))
        os.fsync(fd)
        (here / "f").unlink()
        assert os.pread(fd, 10, 0) == pattern(65536)[:10]
    os.sync()
    for _ in range(300):  # the last close reaches the filesystem after close(2) has returned
        if used() < before + 24 * MIB:
            return
        time.sleep(0.1)
    pytest.fail("the space never came back")


def test_a_removed_directory_that_is_open(here: Path) -> None:
    target = folder(here / "d")
    with descriptor(target, os.O_RDONLY | os.O_DIRECTORY) as fd:
        target.rmdir()
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(fd) == []
        for make in (
            lambda: os.mkdir("x", dir_fd=fd),
            lambda: os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=fd),
            lambda: os.symlink("t", "x", dir_fd=fd),
        ):
            with refused(errno.ENOENT, errno.ESTALE):
                make()


# --- statvfs ---


def test_statvfs(here: Path) -> None:
    found = os.statvfs(here)
    assert found.f_bsize == PAGE
    assert found.f_frsize == PAGE
    assert found.f_namemax == 255
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    assert 0 < found.f_ffree <= found.f_files
    with descriptor(touch(here / "f"), os.O_RDONLY) as fd:
        assert os.fstatvfs(fd).f_bsize == PAGE


# --- one file, many descriptors ---


def test_one_file_open_in_many_ways_at_once(here: Path, seed: int) -> None:
    """Whatever is open already, the next open works and sees the same bytes: modes never mix."""
    path = touch(here / "f", 0o644, bytes(4 * PAGE))
    chance = random.Random(seed)
    expected = bytearray(4 * PAGE)
    fds: list[tuple[int, int]] = []
    kinds = [
        (os.O_RDONLY, 1),
        (os.O_WRONLY, 2),
        (os.O_RDWR, 3),
        (os.O_RDONLY | os.O_DIRECT, 5),
        (os.O_RDWR | os.O_DIRECT, 7),
        (os.O_RDWR | os.O_SYNC, 3),
    ]
    block = aligned(PAGE)
    for n in range(600):
        if len(fds) < 12 and chance.random() < 0.6:
            flags, can = chance.choice(kinds)
            fds.append((os.open(path, flags), can))
        elif fds:
            os.close(fds.pop(chance.randrange(len(fds)))[0])
        path.chmod(chance.choice((0o644, 0o4755, 0o2755)))
        if chance.random() < 0.05:
            (here / "link").unlink(missing_ok=True)
            os.link(path, here / "link")
        at = chance.randrange(4) * PAGE
        for fd, can in fds:
            if can & 2:
                block[:] = bytes([n % 251 + 1]) * PAGE
                assert os.pwritev(fd, [block], at) == PAGE
                expected[at : at + PAGE] = block[:]
            if can & 1:
                assert os.preadv(fd, [block], at) == PAGE
                assert block[:] == expected[at : at + PAGE]
            if can == 3 and chance.random() < 0.2:
                with mmap.mmap(fd, 4 * PAGE) as view:
                    assert view[:] == expected
                    view[at] = expected[at] = n % 256
    for fd, _ in fds:
        os.close(fd)
    assert path.read_bytes() == expected
