"""How soon what was committed goes out, and comes in: at once after a rest, gathered under load.

On a clock that jumps: what is compared are its times.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from kvfs.meta.redis.log import LogReply
from kvfs.meta.replica import follower
from kvfs.meta.replica.async_publisher import Behind
from kvfs.meta.replica.follower import Follower
from kvfs.meta.replica.replica_mark import ReplicaMark

_TRIP_S = 0.001
_LOAD_S = 1.0


def on_jumping_clock(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


# ---- what was published in the mirror alone


class _Known:
    """Batches that were made known, and when."""

    def __init__(self, trip_s: float = _TRIP_S) -> None:
        self._trip_s = trip_s
        self.batches: list[tuple[float, list[int]]] = []

    async def make(self, inos: list[int]) -> None:
        began = trio.current_time()
        await trio.sleep(self._trip_s)
        self.batches.append((began, inos))


def test_what_is_published_after_a_rest_is_made_known_at_once() -> None:
    async def test() -> None:
        known = _Known()
        behind = Behind(known.make)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.run)
            for ino in (1, 2):
                await trio.sleep(1)
                published = trio.current_time()
                behind.add([ino])
                await trio.sleep(0.1)
                assert known.batches[-1] == (published, [ino])
            nursery.cancel_scope.cancel()

    on_jumping_clock(test)


@pytest.mark.parametrize(("trip_s", "together"), [(_TRIP_S, 5), (10 * _TRIP_S, 30)])
def test_what_is_published_closely_is_made_known_together(trip_s: float, together: int) -> None:
    async def test() -> None:
        known = _Known(trip_s)
        behind = Behind(known.make)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.run)
            for ino in range(1000):
                behind.add([ino])
                await trio.sleep(_TRIP_S)
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        made = [ino for _, inos in known.batches for ino in inos]
        assert sorted(set(made)) == list(range(1000))
        assert len(known.batches) < 1000 / together

    on_jumping_clock(test)


# ---- what others commit


class _Applier:
    """Whose mirror has all that the log says."""

    def __init__(self) -> None:
        self.mark = ReplicaMark(cluster="", node=1, position=1, token=b"", filled=None)

    def follows(self, _entries: object) -> bool:
        return True

    def apply(self, _entries: object) -> bool:
        return False


class _Log:
    """A server where something is committed all the time; how often it was asked."""

    log = b"x"

    def __init__(self) -> None:
        self.asked = 0

    async def call(self, *_command: object) -> Any:
        await trio.sleep(_TRIP_S)
        self.asked += 1
        return [[b"x", [[b"2-0", [b"t", b"", b"b", b"", b"w", msgspec.msgpack.encode([])]]]]]

    async def script(self, *_command: object) -> Any:
        await trio.sleep(_TRIP_S)
        return msgspec.msgpack.encode([b"ok", [], b""])


def _times_followed(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a node reads the log within _LOAD_S that asks something itself every `pause_s`."""
    log = _Log()

    async def test() -> None:
        following = Follower(_Applier(), log, log)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            with trio.fail_after(1):
                await nursery.start(following.run)
            with trio.move_on_after(_LOAD_S):
                while True:
                    await trio.sleep(pause_s)
                    following.take(LogReply("ok", [], b""), trio.current_time())
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(follower, "now", trio.current_time)
    on_jumping_clock(test)
    return log.asked


def test_a_node_that_asks_seldom_hears_of_each_commit_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _times_followed(0.015, monkeypatch) > 0.9 * _LOAD_S / _TRIP_S


def test_a_node_that_asks_all_the_time_reads_the_log_in_between_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _times_followed(0.002, monkeypatch) < 0.2 * _LOAD_S / _TRIP_S
