"""How often the used space is sampled."""

from collections.abc import Callable
from typing import TypeVar, cast

import trio
import trio.testing

from kvfs.meta.engine import Engine
from kvfs.vfs.admission import Admission
from kvfs.vfs.space_accounting import Accounting, Census, NamespaceSpace, Space

T = TypeVar("T")
_NAMESPACE = 1
_LARGE = 1 << 40


class _Engine:
    """Runs functions on nothing."""

    async def read(self, fn: Callable[[None], T]) -> T:
        return fn(None)


class _Accounting:
    """Of a store in which nothing grows."""

    def __init__(self) -> None:
        self.taken = 0

    def census(self, _: object) -> Census:
        self.taken += 1
        space = Space(_LARGE, 0)
        holding = NamespaceSpace(b"cache", "cache", False, space, inodes=0, writers=0, coming=0)
        return Census(space, {_NAMESPACE: holding})


async def _sampled(admission: Admission) -> None:
    while True:
        await admission.sample()
        admission.round_ended(set())
        await admission.pause()


def test_makers_of_empty_files_cost_few_samples() -> None:
    accounting = _Accounting()

    async def main() -> int:
        admission = Admission(cast(Engine, _Engine()), cast(Accounting, accounting))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_sampled, admission)
            await trio.sleep(60)
            at_rest = accounting.taken
            for _ in range(2_000):
                assert not admission.pressed(_NAMESPACE)
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        return accounting.taken - at_rest

    taken = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 1 <= taken <= 40
