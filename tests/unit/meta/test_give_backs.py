"""What others ask a node for is given back, whatever becomes of what they asked for before."""

import trio

from kvfs.base.errors import Unavailable
from kvfs.meta.give_backs import GiveBacks


def test_one_that_cannot_be_given_back_keeps_no_other() -> None:
    given: list[int] = []
    is_done = trio.Event()

    async def give_back(namespace_id: int) -> None:
        if namespace_id == 1 and 2 not in given:
            raise Unavailable("its server does not answer")
        given.append(namespace_id)
        if len(given) == 2:
            is_done.set()

    async def run() -> None:
        giving = GiveBacks(give_back, "others wait")
        giving.soon(1)
        giving.soon(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(giving.run)
            with trio.fail_after(60):
                await is_done.wait()
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert given == [2, 1]
