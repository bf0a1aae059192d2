"""Engines for code that blocks: of a thread, or of a process without an event loop."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

from kvfs.meta.engine import Engine, Transaction

T = TypeVar("T")


class BlockingEngine(Protocol):
    """Like `Engine`; each method returns when it is done."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """See `Engine.read`."""

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """See `Engine.transact`."""

    def sync_now(self) -> None:
        """See `Engine.sync`."""


class FromThread:
    """An engine of an event loop, for the threads which that loop started."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        return trio.from_thread.run(self._engine.read, fn)

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        return trio.from_thread.run(self._engine.transact, fn)

    def sync_now(self) -> None:
        trio.from_thread.run(self._engine.sync)
