"""Coroutines begun outside a task: done in one step, or gone aside and run on as a task."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

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


async def _reads(fd: int) -> bytes:
    await detach.until_readable(fd, 7.0)
    return os.read(fd, 1)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    ours, theirs = os.pipe()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


@in_a_loop
async def test_what_waits_for_a_descriptor_says_for_which_and_goes_on() -> None:
    with _pipe() as (ours, theirs):
        rest = detach.begin(_reads(ours))
        assert isinstance(rest, detach.Unfinished)
        assert (rest.fd, rest.deadline) == (ours, 7.0)
        os.write(theirs, b"a")
        assert rest.go_on() == b"a"
        rest = detach.begin(_reads(ours))
        assert isinstance(rest, detach.Unfinished)
        with pytest.raises(trio.ClosedResourceError):
            rest.go_on(trio.ClosedResourceError())


@in_a_loop
async def test_a_step_may_block_for_what_comes_at_once_while_there_is_nothing_else_to_do() -> None:
    due, soon = set[int](), time.monotonic() + 60.0
    with _pipe() as (ours, theirs), _pipe() as (others, waker), detach.blocking(others, due, soon):
        os.write(theirs, b"a")
        assert detach.begin(_reads(ours)) == b"a"
        writer = threading.Timer(0, os.write, (theirs, b"b"))
        writer.start()
        assert detach.begin(_reads(ours)) == b"b"
        writer.join()
        os.write(theirs, b"c")
        due.add(7)
        assert isinstance(detach.begin(_reads(ours)), detach.Unfinished)
        due.clear()
        os.write(waker, b"x")
        assert detach.begin(_reads(ours)) == b"c", "both are there: no wait is needed"
        assert isinstance(detach.begin(_reads(ours)), detach.Unfinished)
    with _pipe() as (ours, theirs), _pipe() as (others, _), detach.blocking(others, due, 0.0):
        assert isinstance(detach.begin(_reads(ours)), detach.Unfinished), "the time is over"
    with _pipe() as (ours, theirs):
        os.write(theirs, b"a")
        assert isinstance(detach.begin(_reads(ours)), detach.Unfinished)


@in_a_loop
async def test_in_a_task_it_waits_for_the_descriptor_as_trio_does() -> None:
    async def late(fd: int) -> None:
        await trio.testing.wait_all_tasks_blocked()
        os.write(fd, b"a")

    with _pipe() as (ours, theirs):
        rest = detach.begin(_reads(ours))
        assert isinstance(rest, detach.Unfinished)
        for waiting in (rest, _reads(ours)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(late, theirs)
                assert await waiting == b"a"
        rest = detach.begin(_reads(ours))
        assert isinstance(rest, detach.Unfinished)
        with trio.move_on_after(0) as scope:
            await rest
        assert scope.cancelled_caught
