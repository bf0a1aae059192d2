"""Moves namespaces out of the shard of all, each into one of its own, while nodes go on writing.

| step | commits of the namespace | a kill after it leaves |
|---|---|---|
| 1 copy: all its keys, and what the log brings | in TOP | keys that nobody reads; begun anew |
| 2 check: both are compared, page by page, and kept | in TOP | likewise |
| 3 shut: TOP takes no more of them | wait | withdrawn by any node after a moment: as after 2 |
| 4 the rest of the log is copied | wait | likewise |
| 5 open: its place is its own shard | there | its old keys in TOP, which nobody reads |
| 6 clean: these go | there | |

A request whose answer was lost is sent again: each that comes again does nothing more, and is
answered as the first was, so what an error says of a namespace is so.

In the hash `s` of TOP: `moved`, whether any namespace was shut; `moved:` id, one that is, or was
and has its shard: a commit that writes its keys is refused, whatever its node has heard. In that of
the new shard: `mover`, whose keys are taken, and with a dot behind it, who began its log; `taken`,
the number of the last keys; `last`, where a log ended that it had before. A replica that was
whole at step 5 has all keys: it follows the new log from its beginning, which is beyond that of any
log before, so that who knows only such a one reads all anew.

What leads back is in `kvfs.meta.shards.gatherer`.
"""

import secrets
from collections.abc import Container, Iterable, Sequence
from typing import Final

from kvfs.base.errors import Conflict, Corrupt, Unavailable
from kvfs.meta import keys
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.log import BEGIN
from kvfs.meta.redis.scripts import COMMON, PASSED, Item, Script, puts_and_deletes
from kvfs.meta.shards.log_tail import PAGE, LogTail, each_page
from kvfs.meta.shards.shard_map import OWN, shut_place, space_of

EMPTY: Final = Script(
    COMMON
    + """
if redis.call('HGET', s, 'mover') ~= ARGV[1] then return 0 end
redis.call('UNLINK', h, x)
local last = redis.call('HMGET', s, 'position', 'last')
last = math.max(tonumber(last[1] or 0), tonumber(last[2] or 0))
redis.call('HDEL', s, 'position', 'token', 'marks', 'grown', 'taken', 'moved', 'gather',
  'moved:' .. ARGV[2])
if last > 0 then redis.call('HSET', s, 'last', string.format('%.0f', last)) end
return string.format('%.0f', last)
"""
)
"""In a new shard. ARGV: a mover; the namespace's id. Drops what an earlier one left, or what
another cluster had there. Returns the position of the last log; 0: none, or it is the mover no
more."""

BEGIN_LOG: Final = Script(
    COMMON
    + """
local mover, begun = redis.call('HGET', s, 'mover'), ARGV[1] .. '.'
if mover == begun then return 1 end
if mover ~= ARGV[1] then return 0 end
redis.call('HSET', s, 'position', ARGV[2], 'token', '', 'mover', begun)
redis.call('HDEL', s, 'taken')
return 1
"""
)
"""In a new shard. ARGV: a mover; the log's position. Begins the log; returns whether it was the
mover still."""

TAKE: Final = Script(
    COMMON
    + """
local state = redis.call('HMGET', s, 'mover', 'taken')
if state[1] ~= ARGV[1] then return 0 end
if tonumber(state[2] or 0) >= tonumber(ARGV[2]) then return 1 end
redis.call('HSET', s, 'taken', ARGV[2])
at = 3
local first, last = list()
if last >= first then redis.call('HSET', h, unpack(ARGV, first, last)) end
first, last = list()
if last >= first then redis.call('HDEL', h, unpack(ARGV, first, last)) end
return 1
"""
)
"""In the new shard. ARGV: a mover; a number that grows; keys and values to put; keys to delete.
Returns whether they were taken: one that comes late changes nothing of what came after it."""

LOGGED: Final = (
    COMMON
    + """
local function logged(place, value)
  local state = redis.call('HMGET', s, 'position', 'token', 'grown')
  if value then redis.call('HSET', h, place, value) else redis.call('HDEL', h, place) end
  local packed = listed(1, {listed(2, {binary(place), value and binary(value) or '\\192'})})
  log(state[1], state[2], ARGV[2], packed, state[3])
end
"""
)

SHUT_OUT: Final = Script(
    LOGGED
    + """
local place, token, value, record = unpack(ARGV, 1, 4)
local known = redis.call('HGET', h, place)
if known then return known == value and 1 or 0 end
if redis.call('HGET', h, 'n' .. string.sub(place, 2)) ~= record then return 0 end
redis.call('HSET', s, 'moved', 1, 'moved:' .. string.sub(place, 2), 1)
logged(place, value)
return 1
"""
)
"""In TOP. ARGV: a namespace's place; a token; the place's value; the namespace's record. Returns
whether the place had none, and the record is so, or it has this value."""

CHANGE_PLACE: Final = Script(
    LOGGED
    + """
local place, token, before, after = unpack(ARGV, 1, 4)
local known = redis.call('HGET', h, place)
if known == after then return 1 end
if known ~= before then return 0 end
spare()
if after == 'none' then
  redis.call('HDEL', s, 'moved:' .. string.sub(place, 2))
  logged(place, nil)
else
  logged(place, after)
end
return 1
"""
)
"""In TOP. ARGV: the place of a namespace; a token; its value; the next one, or `none`: TOP takes
its commits again. Returns whether it had the first, or has the second. The namespace's commits wait
for it: it is done though memory is full."""


CLEAN: Final = Script(
    COMMON
    + """
if redis.call('HGET', h, ARGV[1]) ~= '' then return 0 end
spare()
for from = 2, #ARGV, 4000 do
  redis.call('HDEL', h, unpack(ARGV, from, math.min(from + 3999, #ARGV)))
end
return 1
"""
)
"""In TOP. ARGV: the place of a namespace; keys of it. Drops them if its shard has them: of one that
was gathered meanwhile they are TOP's."""


class NamespaceMover:
    """Moves these namespaces of `cluster`. All methods raise Unavailable, NoSpace."""

    def __init__(
        self,
        location: EngineLocation,
        deadline_s: float,
        cluster: str,
        numbers: Sequence[int],
    ) -> None:
        self._top = RetryingClient(location, deadline_s)
        self._cluster = cluster
        self._id = secrets.token_hex(8).encode()
        self._targets = {
            keys.pack_u16(each): RetryingClient(location, deadline_s, each) for each in numbers
        }
        self._tail = LogTail(self._top, self._give)
        self._begins: dict[bytes, int] = {}
        """The positions at which the new logs begin."""
        self._records: dict[bytes, bytes | None] = {}
        """The namespaces' records at the beginning."""
        self.copied = 0
        """Keys copied so far."""
        self._taken = 0
        """Requests so far that gave keys to shards."""

    async def begin(self) -> None:
        """Prepares the shards, and notes where the log stands. Raises Conflict."""
        self._tail.begin(*await self._top.script(BEGIN))
        for space, target in self._targets.items():
            await target.examine(self._cluster)
            # Whoever was the mover before cannot open it from here on: so its place stays, or shows
            # that it is in use.
            await target.call(b"HSET", target.state, b"mover", self._id)
            if await self._top.call(b"HGET", self._top.values, keys.PLACE + space) is not None:
                await target.call(b"HDEL", target.state, b"mover")
                raise Conflict(f"the namespace {keys.unpack_node(space)} is moved, or was")
            last = int(await target.script(EMPTY, self._id, space))
            self._begins[space] = last + PASSED if last else 0
            record = keys.NAMESPACE + space
            self._records[space] = await self._top.call(b"HGET", self._top.values, record)

    async def copy(self) -> None:
        """Step 1."""

        async def copy(found: list[bytes]) -> None:
            await self._give(dict(zip(found[::2], found[1::2], strict=True)))
            self.copied += len(found) // 2
            await self.follow()

        await each_page(self._top, copy)

    async def check(self) -> None:
        """Step 2. Raises Corrupt."""

        async def check(found: list[bytes]) -> None:
            parts: dict[bytes, list[bytes]] = {}
            for key in found[::2]:
                parts.setdefault(space_of(key), []).append(key)
            for space in parts.keys() & self._targets.keys():
                await self._check(self._targets[space], parts[space])

        for each in (self._top, *self._targets.values()):
            await each_page(each, check)
        for target in self._targets.values():
            await target.keep()  # a fail-over right afterwards must not lose what TOP lets go

    async def shut(self, space: bytes) -> bool:
        """Step 3; returns whether it was done: else another one moves it, or its record was changed
        since the beginning (its names may be each node's own by now), or it is gone."""
        record = self._records[space]
        if record is None:
            return False
        place = keys.PLACE + space
        value = self._shut_value(space)
        return bool(await self._top.script(SHUT_OUT, place, new_token(), value, record))

    def _shut_value(self, space: bytes) -> bytes:
        """Returns the place of a namespace that this one has shut."""
        return shut_place(self._id, self._begins[space])

    async def follow(self) -> None:
        """Copies what the log brings, as step 4 after `shut`. Raises Unavailable too where the log
        does not reach back: begin anew."""
        await self._tail.follow()

    async def open(self, space: bytes) -> bool:
        """Step 5; returns whether it was done: else it was withdrawn meanwhile."""
        if not await self._targets[space].script(BEGIN_LOG, self._id, self._begins[space]):
            return False
        value, place = self._shut_value(space), keys.PLACE + space
        return bool(await self._top.script(CHANGE_PLACE, place, new_token(), value, OWN))

    async def clean(self, spaces: Container[bytes]) -> None:
        """Step 6, of all that are open, also since earlier calls."""

        async def clean(found: list[bytes]) -> None:
            gone: dict[bytes, list[bytes]] = {}
            for key in found[::2]:
                if (space := space_of(key)) in spaces:
                    gone.setdefault(space, []).append(key)
            for space, names in gone.items():
                await self._top.script(CLEAN, keys.PLACE + space, *names)

        await each_page(self._top, clean)

    async def move(self) -> None:
        """Does steps 1 to 5. Raises Conflict, Corrupt."""
        await self.begin()
        await self.copy()
        await self.check()
        for space in self._targets:
            await self.follow()
            if not await self.shut(space):
                raise Conflict("a namespace was changed meanwhile, or is moved: begin anew")
            await self.follow()
            if not await self.open(space):
                raise Conflict("moving took too long, and was withdrawn: begin anew")

    def close(self) -> None:
        """Idempotent."""
        for each in (self._top, *self._targets.values()):
            each.stop()

    async def _give(self, written: dict[bytes, bytes | None]) -> None:
        parts: dict[bytes, dict[bytes, bytes | None]] = {}
        for key, value in written.items():
            if (space := space_of(key)) in self._targets:
                parts.setdefault(space, {})[key] = value
        for space, part in parts.items():
            for some in batches(part):
                self._taken += 1
                if not await self._targets[space].script(TAKE, self._id, self._taken, *some):
                    raise Unavailable("another one moves the namespace")

    async def _check(self, target: RetryingClient, names: list[bytes]) -> None:
        """Compares the values of these keys. Raises Corrupt."""

        async def copied(names: Sequence[bytes]) -> list[bytes]:
            found: list[bytes] = await target.call(b"HMGET", target.values, *names)
            return found

        if differing := await self._tail.differing(names, copied):
            raise Corrupt(
                f"{len(differing)} keys differ in the new shards: {differing[0]!r} is one"
            )


def new_token() -> bytes:
    """Returns a token for a commit of no engine."""
    return secrets.token_hex(8).encode()


def batches(part: dict[bytes, bytes | None]) -> Iterable[tuple[Item, ...]]:
    """Yields what is to be put and deleted, as much as a request has, as TAKE has it."""
    items = list(part.items())
    for at in range(0, len(items), PAGE):
        puts, deletes = puts_and_deletes(items[at : at + PAGE])
        yield (len(puts), *puts, len(deletes), *deletes)
