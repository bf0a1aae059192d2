"""What is told soon: together, by a thread, and never of much at once."""

import os
import queue
from collections.abc import Sequence

import pytest

from kvfs.vfs.deferred_notify import LIMIT, LIMIT_BYTES, DeferredNotify

DEADLINE_S = 30


class Told:
    """What was told, in the order of its telling."""

    def __init__(self) -> None:
        self.batches: queue.Queue[list[int]] = queue.Queue()
        self.failures: list[Exception] = []

    def tell(self, items: Sequence[int]) -> None:
        self.batches.put(list(items))
        if self.failures:
            raise self.failures.pop()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def soon(told: Told) -> DeferredNotify[int]:
    return DeferredNotify(told.tell)


def test_what_was_added_is_told_by_a_thread(told: Told, soon: DeferredNotify[int]) -> None:
    for number in range(20):
        assert soon.add([number], 1) == []
    got: list[int] = []
    while len(got) < 20:
        got += told.batches.get(timeout=DEADLINE_S)
    assert got == [*range(20)]
    assert soon.add([20], 1) == []
    assert told.batches.get(timeout=DEADLINE_S) == [20]
    soon.close()


def test_much_is_left_to_the_caller_with_all_before_it(
    told: Told, soon: DeferredNotify[int]
) -> None:
    got: list[int] = []
    for number in range(LIMIT + 1):
        got += soon.add([number], 0)
    soon.close()
    while not told.batches.empty():
        got += told.batches.get()
    assert sorted(got) == [*range(LIMIT + 1)]
    assert soon.add([1], LIMIT_BYTES + 1) == [1]


def test_flush_and_close_tell_what_is_left(told: Told, soon: DeferredNotify[int]) -> None:
    soon.add([1, 2], 0)
    soon.flush()
    assert told.batches.get_nowait() == [1, 2]
    soon.flush()
    soon.add([3], 0)
    soon.close()
    soon.close()
    assert told.batches.get_nowait() == [3]
    assert told.batches.empty()


def test_a_failure_stops_nothing(
    told: Told, soon: DeferredNotify[int], caplog: pytest.LogCaptureFixture
) -> None:
    told.failures.append(OSError("it does not answer"))
    soon.add([1], 0)
    assert told.batches.get(timeout=DEADLINE_S) == [1]
    soon.add([2], 0)
    assert told.batches.get(timeout=DEADLINE_S) == [2]
    soon.close()
    assert "it does not answer" in caplog.text
    told.failures.append(OSError("again"))
    soon.add([3], 0)
    with pytest.raises(OSError, match="again"):
        soon.flush()


def test_after_a_fork_the_child_tells_its_own_alone(told: Told, soon: DeferredNotify[int]) -> None:
    soon.add([1], 0)
    child = os.fork()
    if not child:
        try:
            soon.flush()
            nothing = told.batches.empty()
            soon.add([2], 0)
            soon.close()
            os._exit(0 if nothing and told.batches.get_nowait() == [2] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    soon.close()
    assert told.batches.get(timeout=DEADLINE_S) == [1]
