"""What the POSIX tests share: errno expectations, other users, calls that Python's os lacks."""

import contextlib
import ctypes
import errno
import faulthandler
import os
import select
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Two ordinary users and their groups. Not 65534, for whom some filesystems keep reserves.
ALICE, BOB = 61001, 61002
STAFF = 61010

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100
AT_SYMLINK_FOLLOW = 0x400
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4
FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_COLLAPSE, FALLOC_ZERO = 1, 2, 8, 16
CLOCK_REALTIME_COARSE = 5  # the clock that native filesystems stamp with
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


@contextlib.contextmanager
def refused(*codes: int) -> Iterator[None]:
    """The body must end with an OSError of one of these errno."""
    names = "/".join(errno.errorcode[c] for c in codes)
    try:
        yield
    except OSError as error:
        got = errno.errorcode.get(error.errno or 0, str(error.errno))
        assert error.errno in codes, f"expected {names}, got {got}"
    else:
        pytest.fail(f"expected {names}, got success")


@contextlib.contextmanager
def as_user(uid: int, gid: int | None = None, groups: tuple[int, ...] = ()) -> Iterator[None]:
    """Run the body with another user's identity, without the superuser's capabilities."""
    old_groups = os.getgroups()
    os.setgroups(list(groups))
    os.setegid(uid if gid is None else gid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(old_groups)


@contextlib.contextmanager
def signals(every_s: float, *, restart: bool) -> Iterator[None]:
    """The process has a handler for a signal that comes so often, with SA_RESTART or without. Of
    Python's own calls few would show it: they begin anew."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, not restart)
    signal.setitimer(signal.ITIMER_REAL, every_s, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(result: int, what: object = "") -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(what))
    return result


def renameat2(old: Path, new: Path, flags: int) -> None:
    check(libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags), old)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2) itself: glibc's posix_fallocate writes zeros where the filesystem cannot."""
    check(libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def link_descriptor(fd: int, new: Path) -> None:
    """Give an open file a name: what O_TMPFILE is for."""
    old = f"/proc/self/fd/{fd}".encode()
    check(libc.linkat(AT_FDCWD, old, AT_FDCWD, os.fsencode(new), AT_SYMLINK_FOLLOW), new)


class Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def utimensat(path: Path, atime: tuple[int, int], mtime: tuple[int, int], flags: int = 0) -> None:
    """utimensat(2) itself, so that UTIME_NOW and UTIME_OMIT can be passed."""
    times = (Timespec * 2)(Timespec(*atime), Timespec(*mtime))
    check(libc.utimensat(AT_FDCWD, os.fsencode(path), times, flags), path)


@contextlib.contextmanager
def mapping_alone(path: Path, content: bytes) -> Iterator[memoryview]:
    """A shared mapping of a file that was given this content through it, and whose descriptor is
    closed. Python's own mappings keep one."""
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(len(content))
    with descriptor(path, os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, len(content))
        start = libc.mmap(None, size, 3, 1, fd, ctypes.c_long(0))
        assert start != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        view = memoryview((ctypes.c_char * len(content)).from_address(start)).cast("B")
        view[: len(content)] = content
    try:
        yield view
    finally:
        check(libc.munmap(ctypes.c_void_p(start), size), path)


HANDLE_BYTES = 128


class FileHandle(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("bytes", ctypes.c_ubyte * HANDLE_BYTES),
    )


def handle_of(path: Path) -> bytes:
    """name_to_handle_at(2): a handle that outlives the path, as an NFS server hands out."""
    handle = FileHandle(size=HANDLE_BYTES)
    mount_id = ctypes.c_int()
    check(
        libc.name_to_handle_at(
            AT_FDCWD, os.fsencode(path), ctypes.byref(handle), ctypes.byref(mount_id), 0
        ),
        path,
    )
    return bytes(handle)


def open_handle(mount: Path, handle: bytes, flags: int) -> int:
    """open_by_handle_at(2) on the filesystem that `mount` is part of."""
    directory = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        copy = FileHandle.from_buffer_copy(handle)
        return check(libc.open_by_handle_at(directory, ctypes.byref(copy), flags | os.O_CLOEXEC))
    finally:
        os.close(directory)


def touch(path: Path, mode: int = 0o644, data: bytes = b"") -> Path:
    """A regular file of exactly this mode, whatever the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if data:
            os.write(fd, data)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)
    return path


def folder(path: Path, mode: int = 0o755, uid: int = -1, gid: int = -1) -> Path:
    path.mkdir()
    if (uid, gid) != (-1, -1):
        os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def make_of(kind: str, path: Path) -> Path:
    """One file of each type; `device` needs root."""
    makers: dict[str, Callable[[], Any]] = {
        "regular": lambda: touch(path),
        "directory": lambda: path.mkdir(),
        "fifo": lambda: os.mkfifo(path),
        "socket": lambda: os.mknod(path, stat.S_IFSOCK | 0o644),
        "symlink": lambda: path.symlink_to("nowhere"),
        "device": lambda: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)),
    }
    makers[kind]()
    return path


KINDS = ("regular", "directory", "fifo", "socket", "symlink", "device")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def opened(path: Path, flags: int, mode: int = 0o644) -> None:
    """Open and close."""
    os.close(os.open(path, flags, mode))


@contextlib.contextmanager
def descriptor(path: Path, flags: int = os.O_RDWR, mode: int = 0o644) -> Iterator[int]:
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def let_clock_pass(*paths: Path) -> None:
    """Wait until the filesystem's clock is past every timestamp of these files: a few ms."""
    last = max(max(s.st_ctime_ns, s.st_mtime_ns, s.st_atime_ns) for s in (p.lstat() for p in paths))
    for _ in range(10_000):
        if time.clock_gettime_ns(CLOCK_REALTIME_COARSE) > last:
            return
        time.sleep(0.001)
    pytest.fail("a timestamp lies in the future")


def fatal_signal_of(call: Callable[[], object]) -> int:
    """The signal that the call dies of in a child process; 0 when it returns."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        call()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


STATX_MODE, STATX_BTIME = 0x2, 0x800


def statx(path: Path, mask: int) -> bytes:
    """statx(2) itself, which says what is asked for: the kernel may know the rest anew."""
    found = ctypes.create_string_buffer(256)
    at = ctypes.c_int(AT_FDCWD)
    check(libc.statx(at, os.fsencode(path), 0, ctypes.c_uint(mask), found), path)
    return found.raw


def birth_of(path: Path) -> float | None:
    """Seconds since the epoch; None where the filesystem does not say."""
    found = statx(path, STATX_BTIME)
    if not int.from_bytes(found[:4], "little") & STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("<qI", found, 80)
    return float(seconds) + nanoseconds / 1e9


def mode_alone(path: Path) -> int:
    """The mode as the kernel has it for who starts the program: nothing else is asked for."""
    return stat.S_IMODE(int.from_bytes(statx(path, STATX_MODE)[28:30], "little"))


IN_ATTRIB, IN_DELETE_SELF, IN_IGNORED = 0x4, 0x400, 0x8000
_IN_ALL = 0xFFF
_EVENT = struct.Struct("iIII")
_PATIENCE_S = 30


class Watch:
    """inotify(7) of one file or directory."""

    def __init__(self, path: Path) -> None:
        self._fd = check(libc.inotify_init1(os.O_CLOEXEC))
        check(libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_ALL), path)

    def next(self) -> int:
        """What happened to it next."""
        ready, _, _ = select.select([self._fd], [], [], _PATIENCE_S)
        assert ready, "nothing happened"
        _, kinds, _, _ = _EVENT.unpack(os.read(self._fd, _EVENT.size))
        return int(kinds)

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def watched(path: Path) -> Iterator[Watch]:
    watch = Watch(path)
    try:
        yield watch
    finally:
        watch.close()


def its_watch_ends(path: Path, change: Callable[[], object]) -> None:
    """Who watches what is at `path` is told that it went by the change, and that its watch ends."""
    path.stat()
    with watched(path) as watch:
        change()
        assert [watch.next(), watch.next()] == [IN_DELETE_SELF, IN_IGNORED]
