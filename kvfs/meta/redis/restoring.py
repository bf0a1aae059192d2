"""Restores a server's knowledge of a cluster after it lost its data: nodes' numbers and
incarnations, the valid secrets, and a log that no replica takes for the one it followed.

In the hash `s`, beside the fields of `leasing`: `restored`, the greatest position of any replica
that took part.
"""

import secrets
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Conflict
from kvfs.meta import keys
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.identity import TOGETHER as TOGETHER_LAYOUT
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.scripts import PASSED, TOP, Script

CLEAR: Final = Script(
    """
local whose = redis.call('HGET', KEYS[3], 'cluster')
if not whose or whose == ARGV[1] then return 0 end
return redis.call('UNLINK', unpack(KEYS))
"""
)
"""ARGV: a cluster. Drops everything of another one that was made in its place."""

ENROL: Final = Script(
    """
local s = KEYS[3]
local store, node, incarnation, digests, position = unpack(ARGV, 1, 5)
local known = redis.call('HGET', s, 'node:' .. store)
if known and known ~= node then return 'other' end
local there = redis.call('HGET', s, 'n:' .. node)
local is_known = known and there and tonumber(there) >= tonumber(incarnation)
redis.call('HSET', s, 'node:' .. store, node)
redis.call('HSETNX', s, 'secrets', digests)
local function at_least(field, number)
  local there = redis.call('HGET', s, field)
  if not there or tonumber(there) < tonumber(number) then redis.call('HSET', s, field, number) end
end
at_least('n:' .. node, incarnation)
at_least('nodes', node)
at_least('restored', position)
return is_known and 'known' or 'new'
"""
)
"""ARGV: a store; its node; the incarnation it remembers; digests of its secrets; the position of
its replica. Returns whether that was known before; 'other' if the store is another node."""

RESTART: Final = Script(
    """
local s, x = KEYS[3], KEYS[4]
local state = redis.call('HMGET', s, 'position', 'restored')
local last = math.max(tonumber(state[1] or 0), tonumber(state[2] or 0))
redis.call('DEL', x)
redis.call('HDEL', s, 'restored', 'marks', 'grown')
redis.call('HSET', s, 'position', string.format('%.0f', last + tonumber(ARGV[1])), 'token', ARGV[2])
return 1
"""
)
"""ARGV: a number; a new token. The log begins anew, so far beyond all known positions that each
replica finds a gap, and is read anew."""

DISCARD: Final = Script(
    """
local h, s, x = KEYS[1], KEYS[3], KEYS[4]
redis.call('HDEL', h, ARGV[1])
redis.call('HSET', h, ARGV[2], '')
redis.call('DEL', x)
redis.call('HDEL', s, 'marks', 'grown')
local last = tonumber(redis.call('HGET', s, 'position') or 0)
redis.call('HSET', s, 'position', string.format('%.0f', last + tonumber(ARGV[3])), 'token', ARGV[4])
return 1
"""
)
"""ARGV: the key of the schema's version; that of the mark of an unfinished copy; a number; a new
token. The metadata are none until they are copied, and each replica is read anew."""

TOGETHER: Final = Script(
    """
local h, s = KEYS[1], KEYS[3]
redis.call('HSET', s, 'layout', ARGV[1])
for _, field in ipairs(redis.call('HKEYS', s)) do
  if field == 'moved' or string.sub(field, 1, 6) == 'moved:' then redis.call('HDEL', s, field) end
end
for i = 2, #ARGV do redis.call('HDEL', h, ARGV[i]) end
return 1
"""
)
"""In TOP. ARGV: the layout of metadata that are all in one shard; places of namespaces, and the
intention. No namespace has a shard of its own any more."""


DISCARD_SHARD: Final = Script(
    """
local state = redis.call('HMGET', KEYS[3], 'position', 'last')
local last = math.max(tonumber(state[1] or 0), tonumber(state[2] or 0))
redis.call('UNLINK', unpack(KEYS))
if last > 0 then redis.call('HSET', KEYS[3], 'last', string.format('%.0f', last)) end
return 1
"""
)
"""In a namespace's shard. Drops all but where its log ended, beyond which the next one begins
(`kvfs.meta.shards.mover`): a replica that was away meanwhile must not take that for this one."""


async def discard_shards(
    location: EngineLocation, deadline_s: float, top: RetryingClient, spaces: Sequence[bytes]
) -> None:
    """Discards metadata of which these namespaces have shards of their own, until a copy is
    finished; killed, it is begun anew. Raises Unavailable, Invalid."""
    token = secrets.token_hex(8).encode()
    await top.script(DISCARD, keys.VERSION, keys.copying(0), PASSED, token)
    for space in spaces:
        caller = RetryingClient(location, deadline_s, keys.unpack_node(space))
        try:
            await caller.script(DISCARD_SHARD)
        finally:
            caller.stop()
    places = [keys.PLACE + each for each in (*spaces, keys.pack_u16(TOP))]
    await top.script(TOGETHER, TOGETHER_LAYOUT.encode(), *places, keys.INTENTION)


class Restoring:
    """The restoring of metadata on one server; all methods raise Unavailable, Invalid."""

    def __init__(self, location: EngineLocation, deadline_s: float) -> None:
        self._caller = RetryingClient(location, deadline_s)

    async def enrol(
        self,
        cluster: str,
        store: str,
        node: int,
        incarnation: int,
        digests: Sequence[bytes],
        position: int,
        *,
        replace: bool,
    ) -> bool:
        """Enrols this store as this node of this cluster; returns whether the server knew it.
        `replace`: another cluster's metadata are dropped. Raises Conflict if it has another
        cluster, or another node for the store."""
        if replace:
            await self._caller.script(CLEAR, cluster.encode())
        await self._caller.examine(cluster)
        packed = ",".join(each.hex() for each in digests).encode()
        arguments = (store.encode(), node, incarnation, packed, position)
        answer = await self._caller.script(ENROL, *arguments)
        if answer == b"other":
            raise Conflict(
                f"the engine {self._caller.location.shown} knows the store {store} as another node"
                f" than {node}: it joined anew, and is no part of what was lost"
            )
        return bool(answer == b"known")

    async def restart(self) -> None:
        """Makes replicas be read anew from here on."""
        await self._caller.script(RESTART, PASSED, secrets.token_hex(8).encode())

    def close(self) -> None:
        """Idempotent."""
        self._caller.stop()
