"""How soon what was committed goes out, and comes in: at once after a rest, gathered under load.

On a clock that jumps: what is compared are its times.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from kvfs.base.errors import NoSpace
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica import follower
from kvfs.meta.replica.async_publisher import AsyncPublisher
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
        behind = AsyncPublisher(known.make, lambda _ino: False)
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


def test_one_that_follows_one_alone_is_not_kept_for_others() -> None:
    """A program that writes a block every now and then, for a reader that waits for it."""

    async def test() -> None:
        known = _Known(trip_s := 5 * _TRIP_S)
        behind = AsyncPublisher(known.make, lambda _ino: False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.run)
            for ino in range(100):
                published = trio.current_time()
                behind.add([ino])
                await trio.sleep(2.5 * trip_s)
                assert known.batches[-1] == (published, [ino])
            nursery.cancel_scope.cancel()

    on_jumping_clock(test)


@pytest.mark.parametrize(
    ("per_second", "trip_s", "together", "late_s"),
    [
        (100, _TRIP_S, 1, 0.02),
        (300, _TRIP_S, 10, 0.06),
        (700, _TRIP_S, 60, 0.11),
        (700, 20 * _TRIP_S, 60, 0.15),
        (2_000, _TRIP_S, 80, 0.11),
        (20_000, _TRIP_S, 100, 0.11),
    ],
)
def test_the_more_is_published_the_more_is_made_known_together(
    per_second: int, trip_s: float, together: int, late_s: float
) -> None:
    async def test() -> None:
        known = _Known(trip_s)
        behind = AsyncPublisher(known.make, lambda _ino: False)
        published: dict[int, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.run)
            for ino in range(2 * per_second):
                published[ino] = trio.current_time()
                behind.add([ino])
                await trio.sleep(1 / per_second)
            await trio.sleep(0.2)
            nursery.cancel_scope.cancel()
        made = {ino: began for began, inos in known.batches for ino in inos}
        assert made.keys() == published.keys()
        in_load = [inos for began, inos in known.batches if began > 1]
        assert len(in_load) <= per_second / together
        assert max(made[ino] - published[ino] for ino in published) <= late_s

    on_jumping_clock(test)


def test_a_few_files_at_once_are_no_load() -> None:
    """The blocks of one prompt."""

    async def test() -> None:
        known = _Known()
        behind = AsyncPublisher(known.make, lambda _ino: False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(behind.run)
            for first in range(0, 100, 10):
                behind.add(range(first, first + 5))
                await trio.sleep(2 * _TRIP_S)
                behind.add(range(first + 5, first + 10))
                await trio.sleep(1)
            nursery.cancel_scope.cancel()
        times = {ino: began for began, inos in known.batches for ino in inos}
        assert all(times[first + 9] - times[first] <= 0.01 for first in range(0, 100, 10))

    on_jumping_clock(test)


# ---- what others commit


class _Applier:
    """Whose mirror has all that the log says."""

    shard: int = TOP
    is_overtaken = False

    def __init__(self) -> None:
        self.mark = ReplicaMark(cluster="", node=1, position=1, token=b"", filled=None)

    def follows(self, _entries: object) -> bool:
        return True

    def returning(self, _entries: object) -> set[int]:
        return set()

    def begin(self, _position: int, _token: bytes, _spaces: object) -> None:
        raise NoSpace("the disk is full")

    def apply(self, _entries: object) -> bool:
        return False


class _Log:
    """A server where others commit every so often; when its answers came, and what they held."""

    log = b"x"
    state = b"s"
    values = b"h"

    def __init__(self, commits_s: float) -> None:
        self._commits_s = commits_s
        self._next_at = 0.0
        self.answered: list[tuple[float, float]] = []
        """When, and how long after the first commit that it tells of."""

    async def call(self, *command: object) -> Any:
        await trio.sleep(_TRIP_S)
        if command[0] == b"HMGET":
            return [b"1", b""]
        if command[0] == b"HGET":
            return None
        first, entries = self._next_at, list[Any]()
        await trio.sleep_until(first)
        while self._next_at <= trio.current_time():
            self._next_at += self._commits_s
            entries.append([b"2-0", [b"t", b"", b"b", b"", b"w", msgspec.msgpack.encode([])]])
        self.answered.append((trio.current_time(), trio.current_time() - first))
        return [[b"x", entries]]

    async def script(self, *_command: object) -> Any:
        await trio.sleep(_TRIP_S)
        return msgspec.msgpack.encode([b"ok", [], b""])


def _followed(commits_s: float, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The answers of `_Log` within _LOAD_S."""
    log = _Log(commits_s)

    async def test() -> None:
        following = Follower(_Applier(), log, log)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            with trio.fail_after(1):
                await nursery.start(following.run)
            await trio.sleep(_LOAD_S)
            nursery.cancel_scope.cancel()

    monkeypatch.setattr(follower, "now", trio.current_time)
    on_jumping_clock(test)
    return log.answered


def test_a_commit_after_a_rest_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = _followed(0.015, monkeypatch)
    assert len(answered) > 0.9 * _LOAD_S / 0.015
    assert max(late for _, late in answered[1:]) <= 2 * _TRIP_S


def test_few_commits_are_heard_at_once_however_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is written, recorded and removed again, every 20 ms."""
    answered = _followed(0.005, monkeypatch)
    assert max(late for _, late in answered[1:]) <= 2 * _TRIP_S


def test_commits_in_close_succession_are_heard_together_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = _followed(0.002, monkeypatch)
    assert len(answered) < 0.1 * _LOAD_S / 0.002
    assert max(late for _, late in answered[1:]) < 0.03


def test_a_full_disk_has_the_server_asked_for_everything_seldom() -> None:
    class Counted(_Log):
        asked = 0

        async def script(self, *_command: object) -> Any:
            self.asked += 1
            return [b"1", b""]

        async def call(self, *_command: object) -> Any:
            return 100  # keys, at each look

    log, applier = Counted(1), _Applier()
    applier.mark = msgspec.structs.replace(applier.mark, filled=b"")
    applier.shard = 1  # of the shard of all, a start ends with the error

    async def test() -> None:
        following = Follower(applier, log, log)  # type: ignore[arg-type]
        with trio.move_on_after(60):
            await following.run(trio.TASK_STATUS_IGNORED)

    on_jumping_clock(test)
    assert 6 <= log.asked <= 15
