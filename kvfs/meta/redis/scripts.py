"""The scripts that run inside the server, and their common part.

All metadata of a prefix lie in one shard: five Redis keys with one hash tag, so in a cluster on one
server. `h` is a hash of all values; `z`, in layout 1, a sorted set of all keys with one score, for
programs that read the server in byte order (ZRANGEBYLEX), in layout 2 the order in which nodes
renewed their leases; `x` the log of writes, which replicas follow (`kvfs.meta.redis.log`); `l` the
leases of nodes (`kvfs.meta.redis.leasing`, `z` too); `s` a hash of the state:

- `token` names the last commit;
- `e:` engine: number and time of the last commit of this engine: one that comes again, since its
  answer was lost, is not done twice;
- `schema`: the version of the layout (`RAISE`); `layout`, `cluster`: whether all is together, and
  the owner;
- `position`: the number of the last entry of the log; missing if there never was one;
- `turn`: the number of the last entry that wrote a namespace's record;
- `grown`, `marks`: how many bytes were logged since the last mark, and the places of the marks.

KEYS are `h`, `z`, `s`, `x`, `l`: a server of a cluster that is giving them to another serves a
script only while it has all of them, so none sees or writes a part. Therefore all are there: `z`
has an empty member from the start. ARGV are flat: binary strings pass through as they are, lists
come after their length.
"""

from collections.abc import Iterable
from hashlib import sha1
from typing import Final

Item = bytes | int
Pair = tuple[bytes, bytes]
TOP: Final = 0
"""The shard of all metadata of a prefix."""
PASSED: Final = 1 << 32
"""Entries that a log may have had which nobody knows of any more."""


class Script:
    """A script with the digest that the server knows it by."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.sha = sha1(self.text, usedforsecurity=False).hexdigest().encode()


SPARING: Final = """
local function spare()
  redis.call('HDEL', KEYS[3], '-')
end
"""
"""Called before anything else is written, it lets a server whose memory is full do all the rest:
the server refuses the first write of a script or none, and this one needs no memory."""

ENTRY_VERSION: Final = 1
"""The version of the log's entries that are written."""

LOG_ENTRIES: Final = 50_000
"""Entries that the log has, at most."""
TRIMMED_AT: Final = 4 << 20
"""Bytes of entries after which the log gets a mark, by which it is shortened."""

COMMON: Final = (
    SPARING
    + f"""
local ENTRY_VERSION, LOG_ENTRIES, TRIMMED_AT = {ENTRY_VERSION}, {LOG_ENTRIES}, {TRIMMED_AT}
"""
    + """
local h, z, s, x = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local at = 1

local function list()
  local count = tonumber(ARGV[at])
  local first = at + 1
  at = first + count
  return first, at - 1
end

local function values(source, first, last)
  local found = {}
  for from = first, last, 4000 do
    local part = redis.call('HMGET', h, unpack(source, from, math.min(from + 3999, last)))
    for i = 1, #part do found[#found + 1] = part[i] end
  end
  return found
end

local function binary(text)
  local size = #text
  if size < 256 then return '\\196' .. string.char(size) .. text end
  if size < 65536 then return '\\197' .. struct.pack('>I2', size) .. text end
  return '\\198' .. struct.pack('>I4', size) .. text
end

local function listed(count, packed)
  return '\\221' .. struct.pack('>I4', count) .. table.concat(packed)
end

local function trimmed(position, grown)
  if grown < TRIMMED_AT then return grown end
  local marks = {}
  for mark in string.gmatch(redis.call('HGET', s, 'marks') or '', '%d+') do
    marks[#marks + 1] = mark
  end
  marks[#marks + 1] = position
  if #marks > 16 then
    redis.call('XTRIM', x, 'MINID', marks[1] .. '-0')
    table.remove(marks, 1)
  end
  redis.call('HSET', s, 'marks', table.concat(marks, ','))
  return 0
end

local function log(position, before, token, packed, grown, ...)
  position = string.format('%.0f', position + 1)
  redis.call('XADD', x, 'MAXLEN', '~', LOG_ENTRIES, position .. '-0', 't', token, 'b', before,
    'w', packed, 'v', ENTRY_VERSION)
  grown = trimmed(position, tonumber(grown or 0) + #packed)
  return redis.call('HSET', s, 'token', token, 'position', position, 'grown', grown, ...)
end

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function forget_old_engines()
  local fields, old = redis.call('HGETALL', s), now() - 86400000
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    local time = string.match(field, '^e:') and string.match(value, ' (%d+)$')
    if time and tonumber(time) < old then redis.call('HDEL', s, field) end
  end
end
"""
)

TOUCH: Final = Script(SPARING + "spare() return redis.call('HSET', KEYS[3], 'synced', ARGV[1])")
"""Makes a write, for a caller that waits until all before it is kept."""

RAISE: Final = Script(
    COMMON
    + """
if redis.call('HGET', s, 'schema') ~= '1' then return 0 end
spare()
redis.call('HSET', s, 'schema', 2)
redis.call('UNLINK', z)
redis.call('ZADD', z, 0, '')
return 1
"""
)
"""Makes layout 1 the present one: there is no order of keys any more, which only programs of the
version before ask for. Returns whether it was layout 1."""

SPREAD: Final = Script(
    COMMON
    + """
if redis.call('HGET', s, 'schema') ~= '2' then return 0 end
redis.call('HSET', s, 'layout', ARGV[1])
return 1
"""
)
"""ARGV: the layout of metadata whose namespaces have shards, which no earlier program reads.
Returns whether the layout within the server allows that."""

IDENTIFY: Final = Script(
    COMMON
    + """
for i = 1, 5, 2 do
  if ARGV[i + 1] ~= '' and redis.call('HEXISTS', s, ARGV[i]) == 0 then
    redis.call('HSET', s, ARGV[i], ARGV[i + 1])
  end
end
if redis.call('HGET', s, 'schema') == '2' and redis.call('EXISTS', z) == 0 then
  redis.call('ZADD', z, 0, '')
end
return redis.call('HMGET', s, ARGV[1], ARGV[3], ARGV[5])
"""
)
"""ARGV: three fields with the values to set if they are not set. Returns their values. Where all
are set it writes nothing: so a node starts also while the server's memory is full."""


def keys_of(prefix: str, shard: int) -> list[bytes]:
    """KEYS of every script."""
    return [b"{%b:%d}%c" % (prefix.encode(), shard, kind) for kind in b"hzsxl"]


def puts_and_deletes(
    writes: Iterable[tuple[bytes, bytes | None]],
) -> tuple[list[bytes], list[bytes]]:
    """Returns the keys and values that are put, one after the other, and the keys that are
    deleted."""
    puts: list[bytes] = []
    deletes: list[bytes] = []
    for key, value in writes:
        if value is None:
            deletes.append(key)
        else:
            puts += (key, value)
    return puts, deletes


def digest(pairs: Iterable[Pair]) -> bytes:
    """Returns the digest of a range: SHA-1, in hexadecimal, of length:key length:value ..., as
    scripts compute it."""
    whole = sha1(usedforsecurity=False)
    for key, value in pairs:
        whole.update(b"%d:%b%d:%b" % (len(key), key, len(value), value))
    return whole.hexdigest().encode()
