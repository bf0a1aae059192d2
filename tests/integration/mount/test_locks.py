"""POSIX and BSD locks between processes."""

import errno
import fcntl
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.posix import descriptor, refused, touch


def in_child(call: Callable[[], bool]) -> bool:
    """The answer of a call made by another process."""
    pid = os.fork()
    if pid == 0:
        answer = 2
        try:
            answer = 0 if call() else 1
        finally:
            os._exit(answer)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1), "the child failed"
    return code == 0


def can_flock(path: Path, kind: int) -> bool:
    with descriptor(path) as fd:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def can_lockf(path: Path, kind: int, length: int = 0, start: int = 0) -> bool:
    with descriptor(path) as fd:
        try:
            fcntl.lockf(fd, kind | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):
            return False
        return True


@pytest.fixture
def path(here: Path) -> Path:
    return touch(here / "f", 0o644, bytes(1000))


def test_flock_excludes_other_processes(path: Path) -> None:
    with descriptor(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert in_child(lambda: can_flock(path, fcntl.LOCK_SH))
        assert not in_child(lambda: can_flock(path, fcntl.LOCK_EX))
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert not in_child(lambda: can_flock(path, fcntl.LOCK_SH))
        assert not can_flock(path, fcntl.LOCK_SH)  # another open file of this process too
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert in_child(lambda: can_flock(path, fcntl.LOCK_EX))
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert can_flock(path, fcntl.LOCK_EX)


def test_posix_locks_cover_ranges(path: Path) -> None:
    with descriptor(path) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 100, 100)
        fcntl.lockf(fd, fcntl.LOCK_SH, 100, 300)
        assert in_child(lambda: can_lockf(path, fcntl.LOCK_EX, 100, 0))
        assert not in_child(lambda: can_lockf(path, fcntl.LOCK_SH, 10, 195))
        assert in_child(lambda: can_lockf(path, fcntl.LOCK_SH, 100, 300))
        assert not in_child(lambda: can_lockf(path, fcntl.LOCK_EX, 1, 399))
        fcntl.lockf(fd, fcntl.LOCK_UN, 50, 100)
        assert in_child(lambda: can_lockf(path, fcntl.LOCK_EX, 50, 100))
        assert not in_child(lambda: can_lockf(path, fcntl.LOCK_EX, 1, 150))


def test_getlk_names_the_holder(path: Path) -> None:
    with descriptor(path) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX, 7, 40)
        holder = os.getpid()

        def ask() -> bool:
            with descriptor(path) as mine:
                # l_type, l_whence, l_start, l_len, l_pid
                wish = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                found = struct.unpack("hhqqi4x", fcntl.fcntl(mine, fcntl.F_GETLK, wish))
                return found == (fcntl.F_WRLCK, os.SEEK_SET, 40, 7, holder)

        assert in_child(ask)


def test_posix_locks_end_with_any_close(path: Path) -> None:
    with descriptor(path) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        assert not in_child(lambda: can_lockf(path, fcntl.LOCK_EX))
        with descriptor(path):
            pass
        assert in_child(lambda: can_lockf(path, fcntl.LOCK_EX))


def test_locks_end_with_the_process(path: Path) -> None:
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        fd = os.open(path, os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
        os.write(ready_write, b"x")
        os.read(go_read, 1)
        os.kill(os.getpid(), 9)
    os.read(ready_read, 1)
    assert not can_lockf(path, fcntl.LOCK_EX)
    assert not can_flock(path, fcntl.LOCK_EX)
    os.write(go_write, b"x")
    os.waitpid(pid, 0)
    for end in (ready_read, ready_write, go_read, go_write):
        os.close(end)
    assert can_lockf(path, fcntl.LOCK_EX)
    assert can_flock(path, fcntl.LOCK_EX)


def test_waiting_for_a_lock(path: Path) -> None:
    """Four processes count up under a blocking lock; none is lost, none hangs."""
    path.write_bytes(b"0")
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            with descriptor(path) as fd:
                for _ in range(50):
                    fcntl.lockf(fd, fcntl.LOCK_EX)
                    count = int(os.pread(fd, 20, 0)) + 1
                    os.pwrite(fd, b"%d" % count, 0)
                    fcntl.lockf(fd, fcntl.LOCK_UN)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert path.read_bytes() == b"200"


def test_locks_need_the_right_descriptor(path: Path) -> None:
    with descriptor(path, os.O_RDONLY) as fd:
        fcntl.lockf(fd, fcntl.LOCK_SH)
        with refused(errno.EBADF):
            fcntl.lockf(fd, fcntl.LOCK_EX)
        fcntl.flock(fd, fcntl.LOCK_EX)


def test_open_file_description_locks(path: Path) -> None:
    wish = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    set_lock = 37  # F_OFD_SETLK
    with descriptor(path) as one, descriptor(path) as two:
        fcntl.fcntl(one, set_lock, wish)
        with refused(errno.EAGAIN):
            fcntl.fcntl(two, set_lock, wish)
