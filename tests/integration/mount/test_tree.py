"""Random operations on names, made on the mount and on a native directory alike.

Every call must end the same way on both (the same errno, the same answer), and now and then, and at
the end, both trees must look the same. This finds what a stale entry or attribute in the kernel's
caches would hide from a test that asks once.
"""

import contextlib
import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.posix import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2

OPERATIONS = int(os.environ.get("KVFS_TEST_OPERATIONS", "3000"))
NAMES = ("a", "b", "c", "dd", "e" * 60)
PERIOD = 250


class Twins:
    """The same calls on two trees, which must answer alike."""

    def __init__(self, tops: tuple[Path, Path], seed: int) -> None:
        self.tops = tops
        self.random = random.Random(seed)
        self.open: list[tuple[int, int]] = []
        self.history: list[str] = []

    def path(self) -> str:
        depth = self.random.choice((1, 1, 2, 2, 3))
        return "/".join(self.random.choice(NAMES) for _ in range(depth))

    def both(self, what: str, call: Callable[[Path], object], *relative: str) -> None:
        answers = []
        for top in self.tops:
            try:
                answers.append(repr(call(top)))
            except OSError as error:
                answers.append(errno.errorcode[error.errno or 0])
        self.history.append(f"{what} {' '.join(relative)}: {answers[0]}")
        # Both codes stand for a directory that is not empty.
        answers = [a.replace("EEXIST", "ENOTEMPTY") if "re" in what else a for a in answers]
        assert answers[0] == answers[1], "\n".join(self.history[-30:])

    def step(self) -> None:
        one, two = self.path(), self.path()
        number = self.random.randrange(1 << 16)
        calls: list[tuple[str, Callable[[Path], object], int]] = [
            ("create", lambda t: self.write(t / one, os.O_TRUNC, number), 6),
            ("make exclusively", lambda t: os.close(os.open(t / one, os.O_CREAT | os.O_EXCL)), 2),
            ("append", lambda t: self.write(t / one, os.O_APPEND, number), 3),
            ("read", lambda t: self.read(t / one), 4),
            ("mkdir", lambda t: os.mkdir(t / one), 8),
            ("rmdir (remove)", lambda t: os.rmdir(t / one), 3),
            ("unlink", lambda t: os.unlink(t / one), 4),
            ("symlink", lambda t: os.symlink(two, t / one), 2),
            ("readlink", lambda t: os.readlink(t / one), 1),
            ("mkfifo", lambda t: os.mkfifo(t / one), 1),
            ("link", lambda t: os.link(t / one, t / two, follow_symlinks=False), 4),
            ("rename", lambda t: os.rename(t / one, t / two), 8),
            ("rename noreplace", lambda t: renameat2(t / one, t / two, RENAME_NOREPLACE), 2),
            ("rename exchange", lambda t: renameat2(t / one, t / two, RENAME_EXCHANGE), 3),
            ("truncate", lambda t: os.truncate(t / one, number % 9000), 2),
            ("chmod", lambda t: os.chmod(t / one, 0o700 | number % 64), 2),
            ("utime", lambda t: os.utime(t / one, ns=(number, number + 1)), 2),
            ("setxattr", lambda t: os.setxattr(t / one, "user.k", b"%d" % number), 2),
            ("stat", lambda t: summary(t / one), 8),
            ("list", lambda t: sorted(os.listdir(t / one)), 4),
        ]
        names, weights = [c[:2] for c in calls], [c[2] for c in calls]
        what, call = self.random.choices(names, weights)[0]
        self.both(what, call, one, two)
        if self.random.random() < 0.02:
            self.hold(one)

    @staticmethod
    def write(path: Path, flags: int, number: int) -> int:
        # O_NONBLOCK: the name may be a fifo's.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | flags, 0o644)
        try:
            return os.write(fd, b"+%d" % number)
        finally:
            os.close(fd)

    @staticmethod
    def read(path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return os.read(fd, 1 << 20)
        finally:
            os.close(fd)

    def hold(self, name: str) -> None:
        """Keep a file open over later operations; let go of the oldest."""
        with contextlib.suppress(OSError):
            fds = tuple(os.open(t / name, os.O_RDWR | os.O_NONBLOCK) for t in self.tops)
            self.open.append((fds[0], fds[1]))
        if len(self.open) > 5:
            self.let_go()

    def let_go(self) -> None:
        pair = self.open.pop(0)
        found = [(s.st_size, s.st_nlink, s.st_mode) for s in map(os.fstat, pair)]
        assert found[0] == found[1], "\n".join(self.history[-30:])
        for fd in pair:
            os.close(fd)

    def compare(self) -> None:
        trees = [dict(walk(top, top)) for top in self.tops]
        assert trees[0] == trees[1], "\n".join(self.history[-30:])


def summary(path: Path) -> tuple[object, ...]:
    found = path.lstat()
    size = found.st_size if not stat.S_ISDIR(found.st_mode) else 0
    return oct(found.st_mode), found.st_nlink, size


def walk(top: Path, directory: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
    for name in sorted(os.listdir(directory)):
        path = directory / name
        found = path.lstat()
        more: object = ""
        if stat.S_ISREG(found.st_mode):
            attribute = os.getxattr(path, "user.k") if os.listxattr(path) else b""
            more = (path.read_bytes(), attribute)
        elif stat.S_ISLNK(found.st_mode):
            more = os.readlink(path)
        yield str(path.relative_to(top)), (*summary(path), more)
        if stat.S_ISDIR(found.st_mode):
            yield from walk(top, path)


@pytest.mark.parametrize("seed", range(2), indirect=True)
def test_a_native_directory_does_the_same(here: Path, tmp_path: Path, seed: int) -> None:
    twins = Twins((here, tmp_path), seed)
    for n in range(OPERATIONS):
        twins.step()
        if n % PERIOD == 0:
            twins.compare()
    while twins.open:
        twins.let_go()
    twins.compare()
