"""Moves a namespace from its own shard back into the one of all, TOP, while nodes go on writing.

| step | its place | commits of the namespace | a kill after it leaves |
|---|---|---|---|
| 1 begin: every node follows it from now on | `<` id | in its shard | that: to be begun anew |
| 2 copy: all its keys, and what its log brings | | | keys in TOP that nobody reads |
| 3 check: both are compared, page by page | | | likewise |
| 4 close: its shard takes no more of them | `>` id | wait | reopened by any node after a moment |
| 5 the rest of its log is copied | | wait | likewise |
| 6 open: TOP takes them | none | in TOP | its old keys, until the next call drops them |
| 7 drop: its shard's keys go, once TOP keeps its own | | | |

A node that applies step 6 has all of the namespace, with the end of its log, which changes no more;
one that has not reads TOP anew. Step 7 leaves others some time for that.

What is half closed is reopened in two steps: the place becomes `?` id, so that nobody opens TOP any
more; then the shard takes commits again, and the place is `<` with another id.

Requests that come again, and late ones, do nothing more: as those of `kvfs.meta.shards.mover`. In
the hash `s` of TOP: `back:` id of the namespace, the number of the last keys that were taken. In
that of the shard: `gather`, who may close it, with `!` before it: who may no more; `moved:` id of
the namespace, that it is closed.
"""

import secrets
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Conflict, Corrupt, Unavailable
from kvfs.meta import keys
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.scripts import COMMON, Script
from kvfs.meta.shards.log_tail import LogTail, each_page
from kvfs.meta.shards.mover import CHANGE_PLACE, LOGGED, batches, new_token
from kvfs.meta.shards.shard_map import CLOSED, GATHERED, WITHDRAWN, space_of
from kvfs.meta.shards.shard_replica import ShardReplica

GATHER: Final = Script(
    LOGGED
    + """
local place, token, value = unpack(ARGV, 1, 3)
local known = redis.call('HGET', h, place)
if known == value then return 1 end
if known ~= '' and (not known or string.sub(known, 1, 1) ~= '<') then return 0 end
redis.call('HDEL', s, 'back:' .. string.sub(place, 2))
redis.call('HSET', s, 'moved', 1, 'moved:' .. string.sub(place, 2), 1)
logged(place, value)
return 1
"""
)
"""In TOP. ARGV: a namespace's place; a token; the place's value. Returns whether the namespace had
a shard of its own, or was left by one who gathered it before."""

ENTITLE: Final = Script(
    COMMON
    + """
local known = redis.call('HGET', s, 'gather')
if known == '!' .. ARGV[1] then return {false, false} end
if known ~= ARGV[1] and redis.call('HEXISTS', s, 'moved') == 1 then return {false, false} end
redis.call('HSET', s, 'gather', ARGV[1])
return redis.call('HMGET', s, 'position', 'token')
"""
)
"""In a namespace's shard. ARGV: an id. Lets that one alone close the shard. Returns position and
token of the log; none: there is no log, or the time of this one is over, as it is once another one
has closed it: who did that has to be known until it is reopened."""

TAKE_BACK: Final = Script(
    COMMON
    + """
local place, id, number = unpack(ARGV, 1, 3)
local known = redis.call('HGET', h, place)
if not known or string.sub(known, 2) ~= id then return 0 end
local field = 'back:' .. string.sub(place, 2)
local taken = tonumber(redis.call('HGET', s, field) or 0)
if taken >= tonumber(number) then return 1 end
if taken + 1 < tonumber(number) then return 0 end
if ARGV[4] == '0' then spare() end
redis.call('HSET', s, field, number)
at = 4
local first, last = list()
if last >= first then redis.call('HSET', h, unpack(ARGV, first, last)) end
first, last = list()
if last >= first then redis.call('HDEL', h, unpack(ARGV, first, last)) end
return 1
"""
)
"""In TOP. ARGV: a namespace's place; an id; a number that grows by one; keys and values to put;
keys to delete. Returns whether they were taken, as those of `kvfs.meta.shards.mover.TAKE`; not
where those before them were lost, which no log has. What only deletes is done though memory is
full."""

_UNINTENDED: Final = (
    LOGGED
    + f"""
local function is_intended() return redis.call('HEXISTS', h, '{keys.INTENTION.decode()}') == 1 end
"""
)

CLOSE: Final = Script(
    _UNINTENDED
    + """
local place, token, before, after = unpack(ARGV, 1, 4)
local known = redis.call('HGET', h, place)
if known == after then return 1 end
if known ~= before then return 0 end
if is_intended() then return 2 end
logged(place, after)
return 1
"""
)
"""In TOP. ARGV: a namespace's place; a token; its value; the next one. Returns whether it had the
first, or has the second; 2: a change over two shards is under way, which may need this one."""

CLOSE_SHARD: Final = Script(
    COMMON
    + """
if redis.call('HGET', s, 'gather') ~= ARGV[1] then return 0 end
redis.call('HSET', s, 'moved', 1, 'moved:' .. ARGV[2], 1)
return 1
"""
)
"""In a namespace's shard. ARGV: an id; that of the namespace. From then on a commit that writes
its keys is refused, whatever its node has heard. Returns whether this one may close it."""

REOPEN_SHARD: Final = Script(
    COMMON
    + """
local entitled = redis.call('HGET', s, 'gather')
if entitled ~= ARGV[1] and entitled ~= '!' .. ARGV[1] then return 0 end
spare()
redis.call('HSET', s, 'gather', '!' .. ARGV[1])
redis.call('HDEL', s, 'moved', 'moved:' .. ARGV[2])
return 1
"""
)
"""In a namespace's shard. ARGV: an id; that of the namespace. It takes commits again, and this one
closes it no more; nothing if another one may by now."""

OPEN: Final = Script(
    _UNINTENDED
    + """
local place, token, before, taken = unpack(ARGV, 1, 4)
local known = redis.call('HGET', h, place)
if not known then return 1 end
if known ~= before then return 0 end
if is_intended() then return 2 end
if (redis.call('HGET', s, 'back:' .. string.sub(place, 2)) or '0') ~= taken then return 3 end
redis.call('HDEL', s, 'moved:' .. string.sub(place, 2), 'back:' .. string.sub(place, 2))
logged(place, nil)
for _, field in ipairs(redis.call('HKEYS', s)) do
  if string.sub(field, 1, 6) == 'moved:' then return 1 end
end
redis.call('HDEL', s, 'moved')
return 1
"""
)
"""In TOP. ARGV: a namespace's place; a token; its value; the number of the last keys that were
given to TOP. TOP takes its commits. Returns as `CLOSE`; 3: TOP has lost some of these keys."""

DROP: Final = Script(
    COMMON
    + """
if redis.call('HEXISTS', s, 'moved:' .. ARGV[1]) == 0 then return 0 end
if redis.call('HGET', s, 'gather') ~= ARGV[2] then return 0 end
local last = redis.call('HGET', s, 'position')
if last then redis.call('HSET', s, 'last', last) end
redis.call('HDEL', s, 'position', 'token', 'marks', 'grown', 'taken', 'gather', 'moved',
  'moved:' .. ARGV[1])
redis.call('UNLINK', h, x)
return 1
"""
)
"""In a namespace's shard. ARGV: the namespace's id; who gathered it. Drops what it had, if it was
closed, by that one. Nobody takes it for an empty one: it has no log."""


_LACKING: Final = 3
_LOST: Final = "the registry's server lost keys that it had been given: begin anew"


class NamespaceGatherer:
    """Gathers one namespace. All methods raise Unavailable, NoSpace."""

    def __init__(self, location: EngineLocation, deadline_s: float, number: int) -> None:
        self._top = RetryingClient(location, deadline_s)
        self._shard = RetryingClient(location, deadline_s, number)
        self._number = number
        self._space = keys.pack_u16(number)
        self._place = keys.PLACE + self._space
        self._id = secrets.token_hex(8).encode()
        self._tail = LogTail(self._shard, self._give)
        self._taken = 0
        """Requests so far that gave keys to TOP."""

    async def begin(self) -> None:
        """Step 1. Raises Conflict."""
        if not await self._top.script(GATHER, self._place, new_token(), GATHERED + self._id):
            raise Conflict(f"the namespace {self._number} is moved just now, or is gathered")
        position, token = await self._shard.script(ENTITLE, self._id)
        if position is None:
            raise Unavailable(
                f"the engine lost the metadata of the namespace {self._number}, by"
                f" {self._shard.at}: restore what that server had"
            )
        self._tail.begin(position, token)

        await self.clear()  # what an earlier one left

    async def clear(self) -> None:
        """Drops the namespace's keys in TOP, while nobody reads them."""

        async def drop(found: list[bytes]) -> None:
            names = [key for key in found[::2] if space_of(key) == self._space]
            await self._give(dict.fromkeys(names))

        await each_page(self._top, drop)

    async def copy(self) -> None:
        """Step 2."""

        async def copy(found: list[bytes]) -> None:
            await self._give(dict(zip(found[::2], found[1::2], strict=True)))
            await self.follow()

        await each_page(self._shard, copy)

    async def check(self) -> None:
        """Step 3. Raises Corrupt."""

        async def check(found: list[bytes]) -> None:
            names = [key for key in found[::2] if space_of(key) == self._space]
            if differing := await self._tail.differing(names, self._copied):
                raise Corrupt(
                    f"{len(differing)} keys differ in the registry's shard: {differing[0]!r} is one"
                )

        for each in (self._shard, self._top):
            await each_page(each, check)

    async def close(self) -> bool:
        """Step 4; returns whether it was done: else another one gathers it, or, for now, a change
        over two shards is under way."""
        before, after = GATHERED + self._id, CLOSED + self._id
        if await self._top.script(CLOSE, self._place, new_token(), before, after) != 1:
            return False
        if not await self._shard.script(CLOSE_SHARD, self._id, self._space):
            return False
        await self._shard.keep()  # no log has it: a server that came back without it would go on
        closed = b"moved:" + self._space  # it may have come back so before it kept anything
        return bool(await self._shard.call(b"HEXISTS", self._shard.state, closed))

    async def follow(self) -> None:
        """Copies what the log brings, as step 5 after `close`. Raises Unavailable too where the log
        does not reach back: begin anew."""
        await self._tail.follow()

    async def open(self) -> bool:
        """Step 6; returns whether it was done: else it was withdrawn meanwhile, or, for now, a
        change over two shards is under way. Raises Unavailable too where TOP's server lost keys."""
        before = CLOSED + self._id
        opened = await self._top.script(OPEN, self._place, new_token(), before, self._taken)
        if opened == _LACKING:
            raise Unavailable(_LOST)
        return bool(opened == 1)

    def stop(self) -> None:
        """Ends the connections; idempotent."""
        self._top.stop()
        self._shard.stop()

    async def _give(self, written: dict[bytes, bytes | None]) -> None:
        for some in batches(written):
            taken = self._place, self._id, self._taken + 1
            if not await self._top.script(TAKE_BACK, *taken, *some):
                raise Unavailable(f"another one gathers the namespace, or {_LOST}")
            self._taken += 1

    async def _copied(self, names: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = await self._top.call(b"HMGET", self._top.values, *names)
        return found


async def reopen(top: ShardReplica, shard: RetryingClient, space: bytes, place: bytes) -> bool:
    """Has the shard of a namespace take commits again that somebody closed, and left: `place` is
    what it has since. Returns whether this one did. Raises Unavailable, NoSpace."""
    key, id_ = keys.PLACE + space, place[1:]
    withdrawn = WITHDRAWN + id_
    if not await top.script(CHANGE_PLACE, key, new_token(), place, withdrawn):
        return False
    is_open = await shard.script(REOPEN_SHARD, id_, space)
    await shard.keep()
    if is_open and await shard.call(b"HEXISTS", shard.state, b"moved:" + space):
        raise Unavailable("the namespace's server came back as it was before: try again")
    anew = GATHERED + new_token()
    return bool(await top.script(CHANGE_PLACE, key, new_token(), withdrawn, anew))


async def drop(top: ShardReplica, shard: RetryingClient, space: bytes) -> None:
    """Step 7, of a namespace unless it has a place. Raises Unavailable."""
    gatherer = await shard.call(b"HGET", shard.state, b"gather")
    if gatherer is None or await top.call(b"HEXISTS", top.proposing.values, keys.PLACE + space):
        return
    await shard.script(DROP, space, gatherer)  # another one would have another id
