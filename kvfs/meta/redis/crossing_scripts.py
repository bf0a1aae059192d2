"""A shard's part of a commit over several of them (`kvfs.meta.redis.crossing`).

In the hash `s` of a shard, beside the fields of `scripts`:

- `intent`: a commit that waits for its commit point: its id, the shard of that, when it was made,
  and what it writes here;
- `m:` id, in the shard of the commit point: `done:` and the shards whose intents are left, or
  `undone:` and when; the latter goes after a day.
"""

from typing import Final

from kvfs.meta.redis.scripts import COMMON, Script

_COMMON: Final = (
    COMMON
    + """
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

local function pending(packed)
  if not packed then return {} end
  local intent = cmsgpack.unpack(packed)
  return {intent[1], intent[2], now() - intent[3]}
end

local function forget_undone()
  local fields, old = redis.call('HGETALL', s), now() - 86400000
  for i = 1, #fields, 2 do
    local time = string.match(fields[i], '^m:') and string.match(fields[i + 1], '^undone:(%d+)$')
    if time and tonumber(time) < old then redis.call('HDEL', s, fields[i]) end
  end
end
"""
)

PENDING: Final = Script(
    _COMMON
    + """
return pending(redis.call('HGET', s, 'intent'))
"""
)
"""Returns the intent that waits (its id, the shard of its commit point, its age in ms), or
nothing."""

COMMIT: Final = Script(
    _COMMON
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
    _COMMON
    + """
local mark = redis.call('HGET', s, 'm:' .. ARGV[1])
if not mark and ARGV[2] == 'undo' then
  forget_undone()
  mark = 'undone:' .. now()
  redis.call('HSET', s, 'm:' .. ARGV[1], mark)
end
return mark and string.match(mark, '^%a+') or ''
"""
)
"""In the shard of a commit point. ARGV: an id; 'undo' to forbid it where it was not done yet.
Returns 'done', 'undone', or '' where neither is decided."""

SETTLE: Final = Script(
    _COMMON
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
    _COMMON
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
