"""Drops keys of the server that no replica follows any more, a page at a time and without the log.

They are found by going through all that the server has: it keeps no order of its keys.
"""

from typing import Final

from kvfs.base.errors import Conflict, Unavailable
from kvfs.meta import keys
from kvfs.meta.local_keys import NOTHING, is_local_key
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.scripts import COMMON, Script

_PAGE_KEYS: Final = 2_000
_SCANNED: Final = b"0"
"""The cursor with which a scan begins, and which says that it has ended."""

DROP: Final = Script(
    COMMON
    + """
if redis.call('HGET', h, ARGV[1]) ~= ARGV[2] then return 0 end
spare()
local ordered = redis.call('HGET', s, 'schema') == '1'
redis.call('HSET', h, ARGV[3], ARGV[4])
for from = 5, #ARGV, 4000 do
  local till = math.min(from + 3999, #ARGV)
  redis.call('HDEL', h, unpack(ARGV, from, till))
  if ordered then redis.call('ZREM', z, unpack(ARGV, from, till)) end
end
return 1
"""
)
"""ARGV: a key and its value, without which nothing is done; a key and its new value; keys to drop.
Returns whether that was done."""


async def drop_local_keys(caller: RetryingClient, namespace_id: int, record: bytes) -> None:
    """Drops the keys of a namespace that are each node's own, and puts the usage of one without
    files, as long as the server has this record of it. Raises Unavailable, Conflict (it has
    not)."""
    only_if, kept = (keys.namespace(namespace_id), record), (keys.usage(namespace_id), NOTHING)
    spaces = (keys.pack_u16(namespace_id),)
    connections, cursor = caller.connections, b""
    while cursor != _SCANNED:
        options = (cursor or _SCANNED, b"COUNT", _PAGE_KEYS)
        cursor, found = await caller.call(b"HSCAN", caller.values, *options)
        if connections not in (0, caller.connections):
            raise Unavailable("the engine's server changed while records were dropped there")
        connections = caller.connections
        names = [key for key in found[::2] if key != kept[0] and is_local_key(key, spaces)]
        is_last = cursor == _SCANNED
        if (names or is_last) and not await caller.script(DROP, *only_if, *kept, *names):
            raise Conflict("the namespace was changed meanwhile")
