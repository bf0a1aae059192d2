"""Coroutines begun outside a task: done in one step, or gone aside and run on as a task."""

import functools
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.lowlevel
import trio.testing

from kvfs.base import detach


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        trio.run(test)

    return run


async def _waits(event: trio.Event, said: list[str]) -> str:
    said.append("began")
    await detach.aside()
    try:
        await event.wait()
    except trio.Cancelled:
        said.append("cancelled")
        raise
    said.append("waited")
    await trio.lowlevel.checkpoint()
    return "done"


async def _answers(value: int) -> int:
    await detach.aside()
    return value


@in_a_loop
async def test_what_does_not_wait_is_done_in_one_step() -> None:
    async def outer() -> int:
        return 7

    assert detach.begin(outer()) == 7
    assert detach.finish(outer()) == 7


@in_a_loop
async def test_what_waits_goes_on_in_a_task() -> None:
    event, said = trio.Event(), list[str]()
    rest = detach.begin(_waits(event, said))
    assert isinstance(rest, detach.Unfinished)
    assert said == ["began"]
    results = []

    async def run() -> None:
        results.append(await rest)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
    assert said == ["began", "waited"]
    assert results == ["done"]


@in_a_loop
async def test_it_is_cancelled_as_any_task() -> None:
    said = list[str]()
    rest = detach.begin(_waits(trio.Event(), said))
    assert isinstance(rest, detach.Unfinished)
    with trio.move_on_after(0) as scope:
        await rest
    assert scope.cancelled_caught
    assert said == ["began", "cancelled"]


@in_a_loop
async def test_in_a_task_it_goes_nowhere() -> None:
    assert await _answers(3) == 3


@in_a_loop
async def test_errors_pass_through_both_halves() -> None:
    async def fails(after: bool) -> None:
        if after:
            await detach.aside()
        raise ValueError(after)

    with pytest.raises(ValueError, match="False"):
        detach.begin(fails(False))
    rest = detach.begin(fails(True))
    assert isinstance(rest, detach.Unfinished)
    with pytest.raises(ValueError, match="True"):
        await rest


@in_a_loop
async def test_what_is_given_up_runs_no_further() -> None:
    said = list[str]()
    assert detach.finish(_waits(trio.Event(), said)) is None
    assert said == ["began"]


@in_a_loop
async def test_to_wait_without_going_aside_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="must not wait"):
        detach.begin(trio.lowlevel.checkpoint())
