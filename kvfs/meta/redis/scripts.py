"""What runs inside the server: scripts that read, that check and commit, and that settle a commit
of several shards.

Each shard has five Redis keys with one hash tag: `h`, a hash of all values; `z`, a sorted set of
all keys with one score, which ZRANGEBYLEX reads in byte order; `x`, the log of what was written,
which mirrors follow (`kvfs.meta.redis.log`); `s`, a hash of its state:

- `token` names the last commit;
- `e:` engine: number and time of the last commit of this engine: one that comes again, since its
  answer was lost, is not done twice;
- `intent`: a commit of several shards that waits for its commit point: its id, the shard of that,
  when it was made, and what it writes here;
- `m:` id, in the shard of the commit point: `done:` and the shards whose intents are left, or
  `undone:` and when;
- `schema`, `layout`, `cluster`, in shard 0: how all this is laid out, and whose it is;
- `position`: the number of the last entry of the log; missing where nobody ever followed it;
- `grown`, `marks`: how many bytes were logged since the last mark, and where the marks are.

KEYS are `h`, `z`, `s`, `x`, `l` of one shard: a server of a cluster that is giving them to another
serves a script only while it has all of them, so none sees or writes a part. ARGV are flat: binary
strings pass through as they are, lists come after their length.
"""

from collections.abc import Iterable, Sequence
from hashlib import sha1
from typing import Final, NamedTuple

from kvfs.meta.redis.known import Pair, Range

Item = bytes | int


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
"""Called before anything else is written, it has a server whose memory is full do all the rest: it
refuses the first write of a script or none, and this one needs no memory."""

COMMON: Final = (
    SPARING
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

local function range(i)
  local low, high = '[' .. ARGV[i], '(' .. ARGV[i + 1]
  local keys = redis.call('ZRANGEBYLEX', z, low, high, 'LIMIT', 0, ARGV[i + 2])
  return keys, values(keys, 1, #keys)
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

local function bound(position, bytes)
  if redis.call('HINCRBY', s, 'grown', bytes) < 4194304 then return end
  local marks = {}
  for mark in string.gmatch(redis.call('HGET', s, 'marks') or '', '%d+') do
    marks[#marks + 1] = mark
  end
  marks[#marks + 1] = position
  if #marks > 16 then
    redis.call('XTRIM', x, 'MINID', marks[1] .. '-0')
    table.remove(marks, 1)
  end
  redis.call('HSET', s, 'grown', 0, 'marks', table.concat(marks, ','))
end

local function log(position, before, token, packed)
  position = string.format('%.0f', position + 1)
  local id = position .. '-0'
  redis.call('XADD', x, 'MAXLEN', '~', 50000, id, 't', token, 'b', before, 'w', packed)
  redis.call('HSET', s, 'token', token, 'position', position)
  bound(position, #packed)
end

local function log_list(source, puts, puts_end, deletes, deletes_end, token)
  local state = redis.call('HMGET', s, 'position', 'token')
  if not state[1] then
    redis.call('HSET', s, 'token', token)
    return
  end
  local packed = {}
  for i = puts, puts_end do packed[#packed + 1] = binary(source[i]) end
  for i = deletes, deletes_end do
    packed[#packed + 1] = binary(source[i])
    packed[#packed + 1] = '\\192'
  end
  log(state[1], state[2] or '', token, listed(1, {listed(#packed, packed)}))
end

local function write(source, puts, puts_end, deletes, deletes_end, token)
  for i = puts, puts_end, 2 do
    if redis.call('HSET', h, source[i], source[i + 1]) == 1 then
      redis.call('ZADD', z, 0, source[i])
    end
  end
  for i = deletes, deletes_end do
    if redis.call('HDEL', h, source[i]) == 1 then redis.call('ZREM', z, source[i]) end
  end
  log_list(source, puts, puts_end, deletes, deletes_end, token)
end

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function sent(engine, number)
  if redis.call('HSET', s, 'e:' .. engine, number .. ' ' .. now()) == 0 then return end
  local fields, old = redis.call('HGETALL', s), now() - 86400000
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    local time = string.match(field, '^e:') and string.match(value, ' (%d+)$')
      or string.match(field, '^m:') and string.match(value, '^undone:(%d+)$')
    if time and tonumber(time) < old then redis.call('HDEL', s, field) end
  end
end

local function pending(packed)
  if not packed then return {} end
  local intent = cmsgpack.unpack(packed)
  return {intent[1], intent[2], now() - intent[3]}
end
"""
)

TOUCH: Final = Script(SPARING + "spare() return redis.call('HSET', KEYS[3], 'synced', ARGV[1])")
"""A write, for who waits until all before it is kept."""

READ: Final = Script(
    COMMON
    + """
local function read()
  local first, last = list()
  local found, ranges = values(ARGV, first, last), {}
  first, last = list()
  for i = first, last, 3 do
    local keys, those = range(i)
    ranges[#ranges + 1] = {keys, those}
  end
  return found, ranges
end

local state = redis.call('HMGET', s, 'token', 'intent')
local token = state[1] or ''
at = 2
local found, ranges = read()
local answer = {token, pending(state[2]), found, ranges}
if token ~= ARGV[1] then answer[5], answer[6] = read() end
return answer
"""
)
"""ARGV: a token; keys; start, end, limit of ranges; and again keys and ranges, to be read only if
the token is another by now. Returns the token; the intent that waits (its id, the shard of its
commit point, its age in ms), or nothing; values; keys and values of each range; and those
again."""

COMMIT: Final = Script(
    COMMON
    + """
local engine, number, expected, kind, id, shards = unpack(ARGV, 1, 6)
local state = redis.call('HMGET', s, 'token', 'intent', 'e:' .. engine, 'm:' .. id)
local token, last = state[1] or '', state[3]
local before = last and tonumber(string.match(last, '^%d+')) or -1
if before == tonumber(number) then return {'again'} end
if before > tonumber(number) then return {'late'} end
if state[2] then return {'busy', pending(state[2])} end
if kind == 'point' and state[4] then return {'undone'} end

at = 7
local first, last = list()
local expected_values = list()
local ranges, ranges_end = list()
if token ~= expected then
  local found = values(ARGV, first, last)
  for i = 1, #found do
    local wanted = ARGV[expected_values + i - 1]
    if found[i] then
      if '=' .. found[i] ~= wanted then return {'conflict'} end
    elseif wanted ~= '' then
      return {'conflict'}
    end
  end
  for i = ranges, ranges_end, 4 do
    local keys, those = range(i)
    local whole = {}
    for j = 1, #keys do
      whole[#whole + 1] = #keys[j] .. ':' .. keys[j] .. #those[j] .. ':' .. those[j]
    end
    if redis.sha1hex(table.concat(whole)) ~= ARGV[i + 3] then return {'conflict'} end
  end
end
local puts, puts_end = list()
local deletes, deletes_end = list()
if kind == 'check' then return {'done', token} end

if kind == 'intent' then
  local intent = {id, shards, now(), {}, {}}
  for i = puts, puts_end do intent[4][#intent[4] + 1] = ARGV[i] end
  for i = deletes, deletes_end do intent[5][#intent[5] + 1] = ARGV[i] end
  redis.call('HSET', s, 'intent', cmsgpack.pack(intent))
else
  write(ARGV, puts, puts_end, deletes, deletes_end, engine .. ':' .. number)
  if kind == 'point' then redis.call('HSET', s, 'm:' .. id, 'done:' .. shards) end
end

sent(engine, number)
return {'done', token}
"""
)
"""ARGV: the engine; the number of this commit, which grows; the token at which all that follows was
known; `check` (write nothing), `write`, `intent` (keep the writes for later) or `point` (write, and
mark the intents elsewhere as committed); the id of a commit of several shards; for `intent` the
shard of its commit point, for `point` the shards of its intents. Then lists: keys read; what they
were ('=' and the value, '' for none); start, end, count, digest of ranges read; keys and values
to put; keys to delete. Returns 'done' and the token before, or 'again', 'conflict', 'undone', or
'busy' and the intent that waits. 'late' is for one that came by a connection that was lost, when
others of that engine were done: nobody hears it."""

DECIDE: Final = Script(
    COMMON
    + """
local mark = redis.call('HGET', s, 'm:' .. ARGV[1])
if not mark and ARGV[2] == 'undo' then
  mark = 'undone:' .. now()
  redis.call('HSET', s, 'm:' .. ARGV[1], mark)
end
return mark and string.match(mark, '^%a+') or ''
"""
)
"""In the shard of a commit point. ARGV: an id; 'undo' to forbid it where it was not done yet.
Returns 'done', 'undone', or '' where neither is decided."""

SETTLE: Final = Script(
    COMMON
    + """
local packed = redis.call('HGET', s, 'intent')
if not packed then return 0 end
local intent = cmsgpack.unpack(packed)
if intent[1] ~= ARGV[1] then return 0 end
if ARGV[2] == 'done' then
  local all, puts = {}, #intent[4]
  for i = 1, puts do all[i] = intent[4][i] end
  for i = 1, #intent[5] do all[puts + i] = intent[5][i] end
  write(all, 1, puts, puts + 1, #all, 'i:' .. ARGV[1])
end
redis.call('HDEL', s, 'intent')
return 1
"""
)
"""ARGV: an id; 'done' to write what its intent kept. Removes the intent. Returns whether it was
there."""

FORGET: Final = Script(
    COMMON
    + """
local field = 'm:' .. ARGV[1]
local mark = redis.call('HGET', s, field)
local shards = mark and string.match(mark, '^done:(.*)$')
if not shards then return 0 end
local left = {}
for shard in string.gmatch(shards, '%d+') do
  if shard ~= ARGV[2] then left[#left + 1] = shard end
end
if #left == 0 then
  redis.call('HDEL', s, field)
else
  redis.call('HSET', s, field, 'done:' .. table.concat(left, ','))
end
return #left
"""
)
"""In the shard of a commit point. ARGV: an id; a shard whose intent was settled. The mark goes
with the last one."""

IDENTIFY: Final = Script(
    COMMON
    + """
for i = 1, 5, 2 do
  if ARGV[i + 1] ~= '' then redis.call('HSETNX', s, ARGV[i], ARGV[i + 1]) end
end
return redis.call('HMGET', s, ARGV[1], ARGV[3], ARGV[5])
"""
)
"""ARGV: three fields with what they are to be where they are not set. Returns what they are."""


def keys_of(prefix: str, shard: int) -> list[bytes]:
    """KEYS of every script."""
    return [b"{%b:%d}%c" % (prefix.encode(), shard, kind) for kind in b"hzsxl"]


class Changes(NamedTuple):
    """What a commit checks and writes in one shard."""

    reads: Sequence[tuple[bytes, bytes | None]]
    scans: Sequence[tuple[bytes, bytes, Sequence[Pair]]]
    """Start, end, and what was between them."""
    puts: Sequence[Pair]
    deletes: Sequence[bytes]

    @property
    def writes(self) -> dict[bytes, bytes | None]:
        """What is so when it is committed; None: deleted."""
        return {**dict(self.puts), **dict.fromkeys(self.deletes)}


def read_arguments(keys: Sequence[bytes], ranges: Sequence[Range]) -> list[Item]:
    """One of READ's two pairs of lists."""
    return [len(keys), *keys, 3 * len(ranges), *(part for each in ranges for part in each)]


def commit_arguments(changes: Changes) -> list[Item]:
    """COMMIT's lists."""
    reads, scans, puts, deletes = changes
    return [
        *_counted(key for key, _ in reads),
        *_counted(b"" if value is None else b"=" + value for _, value in reads),
        4 * len(scans),
        *(part for each in scans for part in (each[0], each[1], len(each[2]) + 1, digest(each[2]))),
        2 * len(puts),
        *(part for pair in puts for part in pair),
        *_counted(deletes),
    ]


def digest(pairs: Iterable[Pair]) -> bytes:
    """Of what a range held: SHA-1, in hexadecimal, of length:key length:value ..., as COMMIT
    does."""
    whole = sha1(usedforsecurity=False)
    for key, value in pairs:
        whole.update(b"%d:%b%d:%b" % (len(key), key, len(value), value))
    return whole.hexdigest().encode()


def _counted(items: Iterable[bytes]) -> list[Item]:
    listed = list(items)
    return [len(listed), *listed]
