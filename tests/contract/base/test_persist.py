"""Background tasks outlive what passes, say it without filling the log, and end with a bug."""

import errno

import pytest
import trio
import trio.testing

from kvfs.base.errors import NoSpace
from kvfs.base.retry import PAUSE_S, Persistence


class Failing:
    """A step that raises what it is given, one after the other, and then goes well."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.went_well = 0

    async def __call__(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._errors:
            raise self._errors.pop(0)
        self.went_well += 1


def attempts(step: Failing, count: int) -> tuple[list[str], float]:
    """So many attempts; what was said, and the seconds that they took."""
    said: list[str] = []

    async def main() -> float:
        persistence = Persistence(said.append, "later")
        began = trio.current_time()
        for _ in range(count):
            await persistence.attempt(step)
        return trio.current_time() - began

    took_s = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return said, took_s


def test_after_a_failure_there_is_a_pause_and_another_attempt() -> None:
    step = Failing(NoSpace("full"), OSError(errno.EIO, "Input/output error"))
    said, took_s = attempts(step, 3)
    assert step.went_well == 1
    assert said == ["later: full", "later: [Errno 5] Input/output error"]
    assert took_s == pytest.approx(2 * PAUSE_S)


def test_a_failure_that_lasts_is_said_now_and_then() -> None:
    files = [OSError(errno.EIO, "Input/output error", f"file {number}") for number in range(3600)]
    said, _ = attempts(Failing(*files), 3600)
    assert 1 < len(said) < 10


def test_a_bug_surfaces() -> None:
    with pytest.raises(ZeroDivisionError):
        attempts(Failing(ZeroDivisionError()), 1)
