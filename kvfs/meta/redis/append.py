"""A commit at the end of the log, by a node that has all of it: nothing is left to be checked, and
the writes come as the log and the server's hash are to have them.

It does what `kvfs.meta.redis.log.PROPOSE` does where nobody committed since, in a tenth of its
steps. In anything out of the ordinary it does nothing, and the caller asks PROPOSE, under the same
number. No I/O.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Final

import msgspec

from kvfs.meta.redis.log import Writes
from kvfs.meta.redis.scripts import (
    ENTRY_VERSION,
    LOG_ENTRIES,
    TRIMMED_AT,
    Item,
    Script,
    puts_and_deletes,
)

MOST_ITEMS: Final = 4_000
"""Keys and values in one request: as many as a command within a script takes."""

APPEND: Final = Script(
    f"""
local MOST, TRIMMED_AT, VERSION = {LOG_ENTRIES}, {TRIMMED_AT}, {ENTRY_VERSION}
"""
    + """
local h, s, x = KEYS[1], KEYS[3], KEYS[4]
local engine, number, own = 'e:' .. ARGV[3], ARGV[4], ARGV[3] .. ':' .. ARGV[4]
local state = redis.call('HMGET', s, 'position', 'token', engine, 'n:' .. ARGV[1], 'schema',
  'grown', 'moved')
if not state[3] then return 0 end
local last = string.match(state[3], '^%d+')
if last == number then return 1 end
local grown = tonumber(state[6] or 0) + #ARGV[9]
if tonumber(last) > tonumber(number) or state[1] ~= ARGV[5] or state[2] ~= ARGV[6]
  or (state[4] and state[4] ~= ARGV[2]) or state[5] ~= '2' or state[7] or grown >= TRIMMED_AT then
  return 0
end
local puts, time = 9 + ARGV[8], redis.call('TIME')
redis.call('XADD', x, 'MAXLEN', '~', MOST, ARGV[7] .. '-0', 't', own, 'b', ARGV[6], 'w', ARGV[9],
  'v', VERSION)
if puts > 9 then redis.call('HSET', h, unpack(ARGV, 10, puts)) end
if puts < #ARGV then redis.call('HDEL', h, unpack(ARGV, puts + 1)) end
redis.call('HSET', s, 'token', own, 'position', ARGV[7], 'grown', grown, engine,
  number .. ' 1 ' .. time[1] .. string.format('%03d', time[2] / 1000))
return 1
"""
)
"""ARGV: the node's number and incarnation; the engine; the number of this request, which grows;
position and token of the last entry of the log, and the position of the one to be added; how many
of the last items are keys and values that are put; msgpack of the entry's writes; those keys and
values, then the keys that are deleted.

Returns 1 where it was done, now or by an earlier request of that number; 0 where nothing was:
others committed since, the node is fenced, keys have an order there or have moved to other shards,
it is the engine's first commit, or the log is to be shortened."""

_encode: Final = msgspec.msgpack.Encoder().encode


def appended(writes: Mapping[bytes, bytes | None]) -> tuple[list[Item], list[Writes]]:
    """Returns the end of APPEND's ARGV, and the entry's writes."""
    entry: list[Writes] = [[*chain.from_iterable(writes.items())]]
    puts, deletes = puts_and_deletes(writes.items())
    return [len(puts), _encode(entry), *puts, *deletes], entry
