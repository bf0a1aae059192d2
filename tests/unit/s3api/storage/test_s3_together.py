"""What is done for many requests at once: batches, errors, those who give up."""

import threading
from collections.abc import Callable, Sequence

import trio

from s3api.storage.batches import Together, in_a_thread


def _run(step: Callable[[Sequence[int]], Sequence[int | Exception]], *items: int) -> list[object]:
    """What each of them got."""
    got: dict[int, object] = {}

    async def ask(together: Together[int, int], item: int) -> None:
        try:
            got[item] = await together.do(item)
        except ValueError as error:
            got[item] = str(error)

    async def main() -> None:
        together = Together(in_a_thread(step))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(together.run)
            async with trio.open_nursery() as asking:
                for item in items:
                    asking.start_soon(ask, together, item)
            nursery.cancel_scope.cancel()

    trio.run(main)
    return [got[item] for item in items]


def test_those_who_come_meanwhile_go_together() -> None:
    sizes: list[int] = []

    def step(batch: Sequence[int]) -> list[int | Exception]:
        sizes.append(len(batch))
        return [item * 2 for item in batch]

    assert _run(step, *range(20)) == [item * 2 for item in range(20)]
    assert sum(sizes) == 20
    assert len(sizes) <= 2


def test_each_gets_its_own_error() -> None:
    assert _run(lambda batch: [ValueError(f"no {n}") if n % 2 else n for n in batch], 1, 2, 3) == [
        "no 1",
        2,
        "no 3",
    ]


def test_what_the_step_raises_is_raised_to_all() -> None:
    def step(_: Sequence[int]) -> list[int | Exception]:
        raise ValueError("broken")

    assert _run(step, 1, 2) == ["broken", "broken"]


def test_who_gives_up_leaves_the_others() -> None:
    going_on = threading.Event()
    done: list[int] = []

    def step(batch: Sequence[int]) -> list[int | Exception]:
        assert going_on.wait(60)
        done.extend(batch)
        return list(batch)

    async def main() -> None:
        together = Together(in_a_thread(step))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(together.run)
            with trio.move_on_after(0.05):
                await together.do(1)
            going_on.set()
            assert await together.do(2) == 2
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert done == [1, 2]


def test_the_end_waits_for_what_is_under_way() -> None:
    done: list[int] = []
    begun = trio.Event()

    def step(batch: Sequence[int]) -> list[int | Exception]:
        trio.from_thread.run_sync(begun.set)
        done.extend(batch)
        return list(batch)

    async def main() -> None:
        together = Together(in_a_thread(step))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(together.run)
            nursery.start_soon(together.do, 7)
            await begun.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert done == [7]
