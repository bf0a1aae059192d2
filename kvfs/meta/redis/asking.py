"""Asks the server for what functions miss, and keeps what is known true."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import trio

from kvfs.base.errors import Conflict, KvfsError
from kvfs.meta.redis import scripts
from kvfs.meta.redis.connecting import Server
from kvfs.meta.redis.crossing import Committer
from kvfs.meta.redis.known import Known, Moment, Range
from kvfs.meta.redis.reading import Request, Wanted, by_shard
from kvfs.meta.redis.scripts import Item, read_arguments

NOWHERE: Final = b"?"
"""No commit's token."""
_MORE: Final = 16
"""What a range that is read again may have grown by, without being asked for a third time."""
_WITH_OLD: Final = 4
"""Parts of an answer that holds again what was read before."""
Step = Callable[[], Awaitable[None]]


class Asker:
    """Fetches into what is known; counts requests, reads and commits alike, in their order."""

    def __init__(self, server: Server, committer: Committer) -> None:
        self._server = server
        self._committer = committer
        self._asked = 0

    def clock(self) -> int:
        """The number of the last request."""
        return self._asked

    def next(self) -> int:
        """The number of a request that is sent now."""
        self._asked += 1
        return self._asked

    async def fetch(self, known: Known, wanted: Wanted, end: float) -> None:
        """Have `known` know what is wanted, as of now; all else of those shards is forgotten where
        something was committed since. Raises Unavailable, Conflict at `end`."""
        if trio.current_time() >= end:
            raise contended()
        requests = by_shard(known.layout, wanted)
        await together(
            [partial(self._ask, known, shard, each, end) for shard, each in requests.items()]
        )

    async def _ask(self, known: Known, shard: int, request: Request, end: float) -> None:
        moment = known.moments.get(shard)
        expected = NOWHERE if moment is None else moment.token
        asked = self.next()
        keys, ranges = list(request.keys), list(request.ranges)
        old_keys = [key for key in request.old_keys if key not in request.keys]
        old_ranges = [Range(*each, known.count(*each) + _MORE) for each in request.old_ranges]
        arguments: list[Item] = [
            expected,
            *read_arguments(keys, ranges),
            *read_arguments(old_keys, old_ranges),
        ]
        token, intent, *found = await self._server.script(scripts.READ, shard, arguments, end)
        if intent:
            await self._committer.resolve(shard, intent, end)
            return
        moment = known.moments.get(shard)
        if moment is not None and moment.token != token:
            if len(found) < _WITH_OLD or asked < moment.asked:
                return
            known.forget(shard)
        latest = asked if moment is None else max(asked, moment.asked)
        known.moments[shard] = Moment(token, latest)
        _learn(known, keys, ranges, found[:2])
        if len(found) == _WITH_OLD:
            _learn(known, old_keys, old_ranges, found[2:])


async def together(steps: Sequence[Step]) -> None:
    """All of them at once; the error of one of them is raised as it is."""
    if len(steps) == 1:
        await steps[0]()
        return
    errors: list[KvfsError] = []

    async def take(step: Step) -> None:
        try:
            await step()
        except KvfsError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for step in steps:
            nursery.start_soon(take, step)
    if errors:
        raise errors[0]


def contended() -> Conflict:
    """Others were always faster."""
    return Conflict("others committed first until the deadline: try again")


def _learn(known: Known, keys: Sequence[bytes], ranges: Sequence[Range], found: list[Any]) -> None:
    values, pairs = found
    known.learn(keys, values)
    for asked, (names, those) in zip(ranges, pairs, strict=True):
        known.learn_range(asked, list(zip(names, those, strict=True)))
