"""The engine without a mirror behind the faces of a node's engine, for tests that have one
server and no mirrors."""

from collections.abc import Callable
from typing import TypeVar

import trio

from kvfs.meta.engine import Transaction
from kvfs.meta.replica.direct_engine import DirectEngine

T = TypeVar("T")


class Direct(DirectEngine):
    """Also for tasks of an event loop."""

    immediate = False
    reads_immediate = False

    def shard(self, namespace_id: int) -> int:  # noqa: ARG002
        return 0

    def is_local(self, namespace_id: int) -> bool:  # noqa: ARG002
        return False

    async def read(self, fn: Callable[[Transaction], T]) -> T:
        return await trio.to_thread.run_sync(self.read_now, fn)

    async def transact(
        self, fn: Callable[[Transaction], T], *, private: int = 0, behind: bool = False
    ) -> T:
        assert not private, "a mirror's alone"
        assert not behind, "a mirror's alone"
        return await trio.to_thread.run_sync(self.transact_now, fn)
