"""How long the mount's loop looks at its device alone: no longer than nobody else has anything to
do. Time stands still here, so that the moment for which it looks never ends by itself."""

import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
import trio.testing

from gateway.fuse.channel import poll_strategy
from gateway.fuse.channel.poll_strategy import Attention, Rest

LOOKS = 3
ROUNDS = 20


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poll_strategy, "_clock", lambda: 1_000_000_000)


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        trio.run(test)

    return run


class Pair:
    """What is sent can be read at the other end, of which a task is told."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    async def receive(self) -> None:
        await trio.lowlevel.wait_readable(self.ours)
        self.ours.recv(1)

    def send(self) -> None:
        self.theirs.send(b"x")

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@contextmanager
def pairs() -> Iterator[tuple[Pair, Pair]]:
    """A device, and another end that something comes by."""
    both = Pair(), Pair()
    try:
        yield both
    finally:
        for pair in both:
            pair.close()


@asynccontextmanager
async def loop_of(device: Pair) -> AsyncIterator[Attention]:
    """Of a mount that was asked something before."""
    device.send()
    await device.receive()
    with Attention(device.ours.fileno()) as looking:
        yield looking


async def served(device: Pair, looking: Attention) -> None:
    """A request came after the loop had slept, and was answered."""
    device.send()
    await device.receive()
    looking.woken()
    looking.rest(1, block=False)


def looks(looking: Attention) -> int:
    """How often it looks at the device, where nothing comes, before it sleeps; at most LOOKS."""
    rests = (looking.rest(0, block=True) for _ in range(LOOKS))
    return next((n for n, rest in enumerate(rests) if rest is not Rest.LOOK), LOOKS)


@in_a_loop
async def test_where_nobody_else_has_anything_to_do_it_looks_on() -> None:
    with pairs() as (device, other):
        async with loop_of(device) as looking, trio.open_nursery() as nursery:
            nursery.start_soon(other.receive)
            await trio.testing.wait_all_tasks_blocked()
            await served(device, looking)
            assert looks(looking) == LOOKS
            device.send()
            assert looking.rest(0, block=True) is Rest.LOOK  # and sees what comes
            other.send()


@in_a_loop
async def test_what_comes_for_another_task_ends_it() -> None:
    with pairs() as (device, other):
        async with loop_of(device) as looking, trio.open_nursery() as nursery:
            nursery.start_soon(other.receive)
            await trio.testing.wait_all_tasks_blocked()
            await served(device, looking)
            other.send()
            assert looks(looking) == 0


@in_a_loop
async def test_what_a_thread_has_done_ends_it() -> None:
    with pairs() as (device, _):
        async with loop_of(device) as looking:
            done = trio.Event()
            await served(device, looking)
            trio.lowlevel.current_trio_token().run_sync_soon(done.set)
            assert looks(looking) == 0
            await done.wait()


@in_a_loop
async def test_it_does_not_begin_before_a_task_that_a_request_woke() -> None:
    with pairs() as (device, _):
        async with loop_of(device) as looking, trio.open_nursery() as nursery:
            event = trio.Event()
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            await served(device, looking)
            event.set()
            assert looks(looking) == 0


@in_a_loop
async def test_it_does_not_begin_before_a_task_that_was_woken_at_the_same_time() -> None:
    """Which of the two goes first is left to chance."""
    with pairs() as (device, other):
        for _ in range(ROUNDS):
            answered = trio.Event()

            async def answer(answered: trio.Event = answered) -> None:
                await other.receive()
                answered.set()

            async with loop_of(device) as looking, trio.open_nursery() as nursery:
                nursery.start_soon(answer)
                await trio.testing.wait_all_tasks_blocked()
                other.send()
                await served(device, looking)
                assert answered.is_set() or not looks(looking)
