"""Counts the calls of a daemon's main thread while a benchmark asks it to.

The daemon runs as it always does, but that a `sitecustomize` which the benchmark puts on its path
installs this program: SIGUSR2 begins a count, and the next one ends it and writes it down. It needs
nothing of the project, so that any version of it can be counted.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

_DIRECTORY: Final = "BENCH_CALLS"
_COMMIT: Final = "EmbeddedEngine.commit"
_REQUESTS: Final = ("FastPath._guarded_dispatch", "FastPath._dispatch", "FastPath._release_of")
_RELEASE: Final = "FastPath._defer"
"""What a request for which nobody waits comes to first; the rest of it follows another, or none."""
_HANDLERS: Final = ("Handlers.", "PlainAnswers.", "PlainChanges.", "ClusterAnswers.")
_POLL_S: Final = 0.002
_WAIT_S: Final = 20.0


def environment(directory: Path) -> dict[str, str]:
    """What a program's environment needs beside its own for its calls to be counted; the directory
    takes what is counted."""
    directory.mkdir(parents=True, exist_ok=True)
    program = f"import runpy; runpy.run_path({__file__!r})['install']()\n"
    (directory / "sitecustomize.py").write_text(program)
    return {_DIRECTORY: str(directory)}


def begin(directory: Path, pid: int) -> None:
    """Raises TimeoutError."""
    os.kill(pid, signal.SIGUSR2)
    _appears(directory / f"{pid}.begun").unlink()


def end(directory: Path, pid: int) -> "Counted":
    """What was called since. Raises TimeoutError."""
    os.kill(pid, signal.SIGUSR2)
    file = _appears(directory / f"{pid}.json")
    counted = {name: Counter(functions) for name, functions in json.loads(file.read_text()).items()}
    file.unlink()
    return counted


Counted = dict[str, Counter[str]]
"""By request (the name of its handler; empty: outside of all), how often which function was called
for it, by its qualified name."""


def calls(counted: Counted, requests: Iterable[str]) -> int:
    """Of the functions that serve these requests."""
    return sum(counted.get(name, Counter()).total() for name in requests)


def commits(counted: Counted) -> int:
    """Of write transactions."""
    return sum(functions[_COMMIT] for functions in counted.values())


def _appears(file: Path) -> Path:
    until = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"the daemon did not write {file.name}")
        time.sleep(_POLL_S)
    return file


# ---- in the daemon


def install() -> None:
    """Count at each second SIGUSR2 until the next."""
    directory = Path(os.environ[_DIRECTORY])
    counted: Counted = {}
    counting = _Counting(counted)

    def toggle(*_: object) -> None:
        if sys.getprofile() is None:
            counting.end()
            counted.clear()
            (directory / f"{os.getpid()}.begun").touch()
            sys.setprofile(counting)
        else:
            counting.when_idle(write)

    def write() -> None:
        sys.setprofile(None)
        counting.end()
        made = directory / f"{os.getpid()}.new"
        made.write_text(json.dumps(counted))
        made.rename(made.with_suffix(".json"))

    signal.signal(signal.SIGUSR2, toggle)


class _Counting:
    """Takes the calls between the beginning and the end of a request for it."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted
        self._request: FrameType | None = None
        self._name = ""
        self._calls: Counter[str] = Counter()
        self._is_busy = False
        self._left: Callable[[], None] | None = None

    def when_idle(self, work: Callable[[], None]) -> None:
        """A signal may come while a call is counted: what it asks for is done after that."""
        if self._is_busy:
            self._left = work
        else:
            work()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self._is_busy = True
        self._count(frame, event)
        self._is_busy = False
        if self._left is not None:
            left, self._left = self._left, None
            left()

    def _count(self, frame: FrameType, event: str) -> None:
        if event == "call":
            name = frame.f_code.co_qualname
            if self._request is None and name in _REQUESTS:
                self.end()
                self._request = frame
            self._calls[name] += 1
            if name == _RELEASE:
                self._name = "release"
            elif self._request is not None and not self._name and name.startswith(_HANDLERS):
                method = name.rpartition(".")[2]
                if method != "may_wait" and not method.startswith("_"):
                    self._name = method
        elif event == "return" and frame is self._request:
            self.end()

    def end(self) -> None:
        """What is called from here on belongs to nothing yet."""
        self._counted.setdefault(self._name, Counter()).update(self._calls)
        self._request, self._name = None, ""
        self._calls.clear()
