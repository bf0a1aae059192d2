"""A process that writes in place for one worker: a line with a request, a line with its answer.

Each close of a file publishes it, also that of a child process that inherited the descriptor and is
about to run another program. This one has no children, while the process of the workers starts
programs all the time: it would show others halves of what its threads are writing.
"""

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.cluster.histories.values import content, line

_CREATE: Final = os.O_RDWR | os.O_CREAT
_MORE: Final = 5000


class Hand:
    """The process, as its worker sees it; used by one thread. Methods raise OSError."""

    def __init__(self) -> None:
        self._process = _start()

    def open(self, path: Path) -> int:
        """The number of a file, made or cut to nothing."""
        return self._ask("open", str(path))

    def reserve(self, path: Path) -> int:
        """The number of a file that nobody else may make."""
        return self._ask("reserve", str(path))

    def publish(self, number: int, value: int) -> None:
        """Fill a file and close it."""
        self._ask("publish", number, value)

    def append(self, path: Path, value: int) -> None:
        """A line at the end of a file, which is made where it is not there."""
        self._ask("append", str(path), value)

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, *request: str | int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._again()
            raise OSError(errno.EIO, "a store into a mapped file met a full disk")
        code, number = json.loads(answer)
        if code:
            raise OSError(code, os.strerror(code))
        return int(number)

    def _again(self) -> None:
        """Begins anew: storing into a page that the disk has no room for ends a process."""
        self._process.communicate()
        assert self._process.returncode == -signal.SIGBUS
        self._process = _start()


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _open(path: str) -> int:
    return os.open(path, _CREATE | os.O_TRUNC, 0o644)


def _reserve(path: str) -> int:
    return os.open(path, _CREATE | os.O_EXCL, 0o644)


def _publish(fd: int, value: int) -> int:
    """In a way that follows from the value."""
    try:
        _WAYS[value % len(_WAYS)](fd, content(value))
    finally:
        os.close(fd)
    return 0


def _mapped(fd: int, data: bytes) -> None:
    os.ftruncate(fd, len(data))
    with mmap.mmap(fd, len(data)) as mapped:
        mapped[:] = data


def _cut(fd: int, data: bytes) -> None:
    _write(fd, data + bytes(_MORE))
    os.ftruncate(fd, len(data))


def _cut_by_name(fd: int, data: bytes) -> None:
    """No file is named to the mount, but an inode."""
    _write(fd, data + bytes(_MORE))
    os.truncate(f"/proc/self/fd/{fd}", len(data))


def _synced(fd: int, data: bytes) -> None:
    _write(fd, data)
    os.fsync(fd)


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


_WAYS: Final = (_write, _mapped, _cut, _cut_by_name, _synced)


def _append(path: str, value: int) -> int:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line(value))
    finally:
        os.close(fd)
    return 0


def _main() -> None:
    verbs: dict[str, Callable[..., int]] = {
        "open": _open,
        "reserve": _reserve,
        "publish": _publish,
        "append": _append,
    }
    for request in sys.stdin:
        verb, *arguments = json.loads(request)
        answer = [0, 0]
        try:
            answer[1] = verbs[verb](*arguments)
        except OSError as error:
            answer[0] = error.errno or 0
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
