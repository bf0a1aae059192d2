"""Work that the client shares among threads ends with the call, however that ends."""

import hashlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.session import parallel


class Interrupted:
    """A pool whose caller is interrupted once the helper is at work, before it is told of it."""

    def __init__(self, begun: threading.Event) -> None:
        self._begun = begun
        self.called: list[Callable[[], None]] = []
        self.threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> None:
        self.called.append(job)
        self.threads.append(threading.Thread(target=job))
        self.threads[-1].start()
        assert self._begun.wait(60)
        raise KeyboardInterrupt


def share(pool: Any, items: list[int], job: Callable[[int], None]) -> None:
    session: Any = SimpleNamespace(pool=pool)
    sizes = [1] * len(items)
    parallel.each(session, items, job, sizes=sizes, alone_below=0, step=parallel.nothing)


def test_an_interrupt_waits_for_a_helper_that_nobody_knew_of() -> None:
    begun = threading.Event()
    pool = Interrupted(begun)
    written: list[int] = []

    def job(item: int) -> None:
        begun.set()
        for _ in range(50):  # so that who does not wait is seen
            hashlib.sha256(bytes(1 << 20))
        written.append(item)

    with pytest.raises(KeyboardInterrupt):
        share(pool, [1, 2, 3], job)
    before = list(written)
    for thread in pool.threads:
        thread.join()
    assert written == before == [1]


def test_who_comes_to_help_when_it_is_over_does_nothing() -> None:
    late: list[Callable[[], None]] = []
    pool = SimpleNamespace(submit=late.append)
    done: list[int] = []

    def job(item: int) -> None:
        done.append(item)
        raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        share(pool, [1, 2, 3], job)
    assert late
    for helper in late:
        helper()
    assert done == [1]


def test_all_is_done_once_by_whoever_comes() -> None:
    pool = SimpleNamespace(submit=lambda job: job())
    done: list[int] = []
    share(pool, [1, 2, 3], done.append)
    assert done == [1, 2, 3]
