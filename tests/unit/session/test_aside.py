"""Work aside: who is interrupted as it runs loses nothing of what it makes."""

import functools
import signal
import threading
from collections.abc import Iterator

import pytest

from kvfs.base.errors import NoSpace
from kvfs.session.uninterruptible import uninterrupted
from tests.cluster.waiting import wait_until


def test_what_the_work_returns_or_raises_comes_back() -> None:
    discarded: list[int] = []
    assert uninterrupted(lambda: 7, discarded.append) == 7

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        uninterrupted(fail, discarded.append)
    assert discarded == []


def interrupt(times: int, came: list[int]) -> None:
    """The main thread, each time once it had the one before."""
    for _ in range(times):
        before = len(came)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        wait_until(functools.partial(_has_more, came, before), "the interrupt came")


def _has_more(came: list[int], than: int) -> bool:
    return len(came) > than


@pytest.fixture
def came() -> Iterator[list[int]]:
    found: list[int] = []

    def raised(number: int, _frame: object) -> None:
        found.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raised)
    yield found
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_for_the_work_and_discards_what_it_made(
    came: list[int], times: int
) -> None:
    discarded: list[int] = []

    def work() -> int:
        interrupt(times, came)
        return 7

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, discarded.append)
    assert discarded == [7]


def test_work_that_hangs_is_left_by_who_insists_and_discards_later(came: list[int]) -> None:
    discarded: list[int] = []
    go = threading.Event()

    def work() -> int:
        interrupt(3, came)
        go.wait(60)
        return 7

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, discarded.append)
    assert discarded == []
    go.set()
    wait_until(lambda: discarded == [7], "it was discarded")


@pytest.fixture
def no_threads() -> Iterator[None]:
    before = threading.stack_size(1 << 47)  # more than a process may address
    yield
    threading.stack_size(before)


@pytest.mark.usefixtures("no_threads")
def test_no_thread_is_no_space() -> None:
    with pytest.raises(NoSpace, match="no thread"):
        uninterrupted(lambda: 7, print)
