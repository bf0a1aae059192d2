"""The processes of `kvfs model load`: each runs `model_rank`, and reports its progress."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final

from cli.presentation import exits

_CHUNK_BYTES: Final = 65536
_STEP_S: Final = 0.5


class RankFailed(Exception):
    """A rank reported an error, or ended without a word."""

    def __init__(self, number: int, text: str, code: int) -> None:
        super().__init__(text)
        self.number = number
        self.code = code


class Rank:
    """One process, and its reports so far."""

    def __init__(self, number: int, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self.number = number
        self.start_s: float | None = None
        """Seconds until Python ran and torch was imported; None: not yet."""
        self.read_bytes = 0
        self.of_bytes: int | None = None
        """Bytes that it will read; None: its files are not open yet."""
        self.result: dict[str, Any] | None = None
        self._process = process
        self._errors = errors
        self._begun = b""
        self._made = time.monotonic()

    def fileno(self) -> int:
        """Returns the descriptor of the process's output."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def begin(self) -> None:
        """Makes it load from here on."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has ended is seen next
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def hear(self) -> bool:
        """Takes in its reports; False: there are no more. Raises RankFailed."""
        told = os.read(self.fileno(), _CHUNK_BYTES)
        *lines, self._begun = (self._begun + told).split(b"\n")
        for line in lines:
            self._heard(json.loads(line))
        if not told and self.result is None:
            raise RankFailed(self.number, f"its process {self._end()}", exits.BUG)
        return bool(told)

    def _heard(self, told: Mapping[str, Any]) -> None:
        if "failed" in told:
            raise RankFailed(self.number, told["failed"], told["code"])
        if self.start_s is None:
            self.start_s = time.monotonic() - self._made
        self.read_bytes = told.get("read", self.read_bytes)
        self.of_bytes = told.get("of", self.of_bytes)
        self.result = told.get("result", self.result)

    def _end(self) -> str:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"was ended by {name}" + (": out of memory?" if -code == signal.SIGKILL else "")
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return f"ended with {code}" + (f": {said.splitlines()[-1]}" if said else "")


@contextlib.contextmanager
def running(wanted: Sequence[Mapping[str, Any]]) -> Iterator[list[Rank]]:
    """Runs a process for each of the tasks for `model_rank`, until the block ends."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for each in wanted:
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cli.commands.models.model_rank", json.dumps(each)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(Rank(each["rank"], process, errors))
        yield ranks


def wait(
    ranks: Sequence[Rank],
    is_so: Callable[[Rank], bool],
    step: Callable[[], None] | None = None,
) -> None:
    """Returns when `is_so` holds for all ranks; `step` is called now and then, even while none
    reports. The wait ends when ranks end or report, and by an interrupt. Raises RankFailed."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if not is_so(rank):
                selector.register(rank, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select(_STEP_S):
                rank = key.data
                if not rank.hear() or is_so(rank):
                    selector.unregister(rank)
            if step is not None:
                step()
