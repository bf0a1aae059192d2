"""Timestamps: which call moves which of them, on the file and its directory; utimensat."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.conftest import Place
from tests.integration.posix import (
    ALICE,
    BOB,
    KINDS,
    UTIME_NOW,
    UTIME_OMIT,
    as_user,
    birth_of,
    descriptor,
    folder,
    let_clock_pass,
    make_of,
    needs_root,
    refused,
    touch,
    utimensat,
)

OLD_NS = 1_000_000_000_123_456_789


def moved(path: Path, call: Callable[[], object]) -> str:
    """Which of the timestamps a, m, c of `path` the call moved forward; none may go back."""
    if not path.is_symlink():
        os.utime(path, ns=(OLD_NS, OLD_NS))
    before = path.lstat()
    let_clock_pass(path)
    call()
    after = path.lstat()
    found = ""
    for letter, old, new in (
        ("a", before.st_atime_ns, after.st_atime_ns),
        ("m", before.st_mtime_ns, after.st_mtime_ns),
        ("c", before.st_ctime_ns, after.st_ctime_ns),
    ):
        assert new >= old, letter
        found += letter if new > old else ""
    return found


def write(path: Path, data: bytes) -> None:
    with descriptor(path, os.O_WRONLY) as fd:
        assert os.write(fd, data) == len(data)


@dataclass(frozen=True)
class Change:
    """A call on `d/f` (5 bytes, also linked as `d/g`) and the timestamps that it moves."""

    call: Callable[[Path], object]
    file: str
    directory: str


CHANGES = {
    "stat": Change(lambda d: os.stat(d / "f"), "", ""),
    "chmod": Change(lambda d: os.chmod(d / "f", 0o600), "c", ""),
    "chmod same": Change(lambda d: os.chmod(d / "f", 0o644), "c", ""),
    "chown": Change(lambda d: os.chown(d / "f", os.geteuid(), -1), "c", ""),
    "write": Change(lambda d: write(d / "f", b"x"), "mc", ""),
    "write nothing": Change(lambda d: write(d / "f", b""), "", ""),
    "truncate": Change(lambda d: os.truncate(d / "f", 2), "mc", ""),
    "truncate same size": Change(lambda d: os.truncate(d / "f", 5), "mc", ""),
    "extend": Change(lambda d: os.truncate(d / "f", 999), "mc", ""),
    "open O_TRUNC": Change(
        lambda d: os.close(os.open(d / "f", os.O_WRONLY | os.O_TRUNC)), "mc", ""
    ),
    "link": Change(lambda d: os.link(d / "f", d / "h"), "c", "mc"),
    "unlink another link": Change(lambda d: os.unlink(d / "g"), "c", "mc"),
    "rename": Change(
        lambda d: (os.rename(d / "f", d / "h"), os.rename(d / "h", d / "f")), "c", "mc"
    ),
    "setxattr": Change(lambda d: os.setxattr(d / "f", "user.k", b"v"), "c", ""),
    "create beside": Change(lambda d: touch(d / "h"), "", "mc"),
    "open existing with O_CREAT": Change(lambda d: os.close(os.open(d / "f", os.O_CREAT)), "", ""),
    "mkdir beside": Change(lambda d: os.mkdir(d / "h"), "", "mc"),
    "symlink beside": Change(lambda d: os.symlink("x", d / "h"), "", "mc"),
    "mkfifo beside": Change(lambda d: os.mkfifo(d / "h"), "", "mc"),
}
NOT_MOVING: dict[str, tuple[int, Callable[[Path], object]]] = {
    "mkdir over it": (errno.EEXIST, lambda d: os.mkdir(d / "f")),
    "link over it": (errno.EEXIST, lambda d: os.link(d / "g", d / "f")),
    "symlink over it": (errno.EEXIST, lambda d: os.symlink("x", d / "f")),
    "rmdir of it": (errno.ENOTDIR, lambda d: os.rmdir(d / "f")),
    "unlink missing": (errno.ENOENT, lambda d: os.unlink(d / "missing")),
    "rename missing": (errno.ENOENT, lambda d: os.rename(d / "missing", d / "f")),
}


@pytest.fixture
def scene(here: Path) -> Path:
    directory = folder(here / "d")
    os.link(touch(directory / "f", 0o644, b"12345"), directory / "g")
    return directory


@pytest.mark.parametrize("name", CHANGES)
def test_what_moves_the_times_of_a_file(scene: Path, name: str) -> None:
    assert moved(scene / "f", lambda: CHANGES[name].call(scene)) == CHANGES[name].file


@pytest.mark.parametrize("name", CHANGES)
def test_what_moves_the_times_of_its_directory(scene: Path, name: str) -> None:
    found = moved(scene, lambda: CHANGES[name].call(scene))
    assert found.replace("a", "") == CHANGES[name].directory


@pytest.mark.parametrize("name", NOT_MOVING)
def test_what_fails_moves_nothing(scene: Path, name: str) -> None:
    code, call = NOT_MOVING[name]

    def fail() -> None:
        with refused(code):
            call(scene)

    assert moved(scene, fail).replace("a", "") == ""
    assert moved(scene / "f", fail) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_file_is_young(here: Path, kind: str) -> None:
    if kind == "device" and os.geteuid():
        pytest.skip("needs root")
    os.utime(here, ns=(OLD_NS, OLD_NS))
    let_clock_pass(here)
    old = here.stat().st_ctime_ns
    made = make_of(kind, here / "x").lstat()
    assert min(made.st_atime_ns, made.st_mtime_ns, made.st_ctime_ns) > old
    assert max(made.st_atime_ns, made.st_mtime_ns, made.st_ctime_ns) <= time.time_ns()
    assert here.stat().st_mtime_ns > OLD_NS


def test_rmdir_and_rename_move_both_directories(here: Path) -> None:
    one, two = folder(here / "one"), folder(here / "two")
    touch(one / "f")
    assert moved(one, lambda: os.rename(one / "f", two / "f")) == "mc"
    assert moved(two, lambda: os.rename(two / "f", one / "f")) == "mc"
    folder(one / "sub")
    assert moved(one, lambda: os.rmdir(one / "sub")) == "mc"


def test_removing_an_xattr_moves_ctime(scene: Path) -> None:
    os.setxattr(scene / "f", "user.k", b"v")
    assert moved(scene / "f", lambda: os.removexattr(scene / "f", "user.k")) == "c"


@pytest.mark.parametrize("kind", KINDS)
def test_each_file_knows_when_it_was_made(here: Path, place: Place, kind: str) -> None:
    if kind == "device" and os.geteuid():
        return
    path = make_of(kind, here / "f")
    if kind == "symlink":
        return  # followed by statx
    made = birth_of(path)
    if place.is_bare:
        assert made is None
        return
    assert made == pytest.approx(path.stat().st_ctime, abs=0.1)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    let_clock_pass(path)
    path.chmod(0o700)
    path.rename(here / "g")
    assert birth_of(here / "g") == made


def test_writes_show_through_every_descriptor(here: Path) -> None:
    path = touch(here / "f")
    with descriptor(path) as one, descriptor(path, os.O_RDONLY) as two:
        for size in range(1, 5):
            let_clock_pass(path)
            before = os.fstat(two)
            os.pwrite(one, b"x", size - 1)
            after = os.fstat(two)
            assert after.st_size == size
            assert after.st_mtime_ns > before.st_mtime_ns
            assert after.st_ctime_ns > before.st_ctime_ns
            assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, after.st_mtime_ns)


def test_times_set_while_open_for_writing_stay(here: Path) -> None:
    """What cp -p, tar and rsync do: write, set the times on the open file, close."""
    path = here / "f"
    with descriptor(path, os.O_CREAT | os.O_WRONLY) as fd:
        os.write(fd, b"data")
        os.utime(fd, ns=(OLD_NS, OLD_NS + 1))
    found = path.stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (OLD_NS, OLD_NS + 1)
    with descriptor(path, os.O_RDONLY):
        assert path.stat().st_mtime_ns == OLD_NS + 1
    assert path.stat().st_mtime_ns == OLD_NS + 1


# --- utimensat ---


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "symlink"])
def test_utimensat_is_exact(here: Path, kind: str) -> None:
    if kind == "device" and os.geteuid():
        pytest.skip("needs root")
    path = make_of(kind, here / "x")
    for seconds in (0, 1, 1_234_567_890, 2**31 - 1, 2**31, 2**32, 2**33):
        for nanoseconds in (0, 1, 999_999_999):
            utimensat(path, (seconds, nanoseconds), (seconds + 1, nanoseconds))
            found = path.stat()
            assert found.st_atime_ns == seconds * 10**9 + nanoseconds
            assert found.st_mtime_ns == (seconds + 1) * 10**9 + nanoseconds


def test_times_before_1970(here: Path) -> None:
    path = touch(here / "f")
    utimensat(path, (-1, 5), (-1_000_000, 999_999_999))
    assert path.stat().st_atime_ns == -(10**9) + 5
    assert path.stat().st_mtime_ns == -1_000_000 * 10**9 + 999_999_999


def test_now_and_omit(here: Path) -> None:
    path = touch(here / "f")
    os.utime(path, ns=(OLD_NS, OLD_NS))
    let_clock_pass(path)
    before = path.stat()
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_OMIT))
    assert path.stat().st_ctime_ns == before.st_ctime_ns
    utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT))  # the touch of an LRU by atime
    found = path.stat()
    assert found.st_atime_ns > before.st_ctime_ns
    assert found.st_mtime_ns == OLD_NS
    utimensat(path, (0, UTIME_OMIT), (0, UTIME_NOW))
    assert path.stat().st_atime_ns == found.st_atime_ns
    assert path.stat().st_mtime_ns > before.st_ctime_ns
    utimensat(path, (7, 7), (0, UTIME_OMIT))
    assert path.stat().st_atime_ns == 7_000_000_007
    utimensat(path, (0, UTIME_OMIT), (8, 8))
    assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (7_000_000_007, 8_000_000_008)


def test_links_have_times_of_their_own(here: Path) -> None:
    path = touch(here / "f")
    os.utime(path, ns=(OLD_NS, OLD_NS))
    (here / "l").symlink_to("f")
    os.utime(here / "l", ns=(1, 2), follow_symlinks=False)
    assert (here / "l").lstat().st_mtime_ns == 2
    assert path.stat().st_mtime_ns == OLD_NS
    os.utime(here / "l", ns=(3, 4))
    assert path.stat().st_mtime_ns == 4
    assert (here / "l").lstat().st_mtime_ns == 2


def test_wrong_nanoseconds_are_refused(here: Path) -> None:
    path = touch(here / "f")
    for wrong in (-1, 10**9):
        with refused(errno.EINVAL):
            utimensat(path, (0, wrong), (0, 0))


@needs_root
def test_who_may_set_times(here: Path) -> None:
    path = touch(here / "f", 0o666)
    os.chown(path, ALICE, ALICE)
    with as_user(ALICE):
        utimensat(path, (1, 0), (2, 0))
    with as_user(BOB):
        utimensat(path, (0, UTIME_NOW), (0, UTIME_NOW))  # who may write may set the present
        with refused(errno.EPERM):
            utimensat(path, (1, 0), (2, 0))
        with refused(errno.EPERM):
            utimensat(path, (0, UTIME_NOW), (0, UTIME_OMIT))
    path.chmod(0o644)
    with as_user(BOB), refused(errno.EACCES):
        utimensat(path, (0, UTIME_NOW), (0, UTIME_NOW))
