"""The server's log for replicas: requests for everything that was written, and for commits that
they propose. No I/O.

The log is the stream `x`. Each script that writes adds one entry, under a number that grows by one
(`<number>-0`), with

- `t`: the token of that commit, which is that of the state from then on;
- `b`: the token before it, so that entries make a chain: a server that lost some of them, or came
  back with older data, is found out by the first entry that does not follow;
- `w`: msgpack of the writes: a list of lists of keys and values in turn (no value: deleted);
- `v`: the version of the entry, which says what `w` is; missing: 1, of a program before versions. A
  later one is refused: a program that took it for its own would apply something else.

It is bounded: 50,000 entries, and some 64 MiB. A replica that needs older ones reads everything
anew (`kvfs.meta.replica.filling.filler`). A replica that stands at (position, token) is told one of

| status | meaning |
|---|---|
| ok | the entries after it |
| behind | the first of them: there are too many for one answer |
| gap | the first of them are not there any more |
| astray | the server was never there: it lost data, or others' data were restored |
| lost | there is no log: the server lost everything |
"""

import contextlib
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Final, NamedTuple

import msgspec

from kvfs.base.errors import Corrupt, NotSupported
from kvfs.meta import keys
from kvfs.meta.lmdb.growth import Growth, growth_of
from kvfs.meta.redis.scripts import COMMON, ENTRY_VERSION, Script, puts_and_deletes

_ENTRY_VERSION: Final = b"%d" % ENTRY_VERSION
_DONE: Final = ord("1")
ENTRIES: Final = 500
"""Entries in one answer, at most."""
_MOST_LOOKED_AT: Final = 1 << 20
"""Bytes of entries in which the server looks for keys of a range: some milliseconds, in which it
serves nobody else."""
_MOVED_WITH_NAMESPACE: Final = "".join(
    kind.decode()
    for kind in (*keys.OF_NAMESPACES, keys.INTENTION)
    if kind[0] not in keys.OF_REGISTRY
)
"""The classes of keys that go into a namespace's shard, but for what nodes have of files (`h`)."""
Writes = list[bytes | None]
"""Keys and values in turn; None for the value of a deleted key."""

_FOLLOWING: Final = (
    COMMON
    + f"""
local ENTRIES = {ENTRIES}
"""
    + """
local function since(state, known, token)
  if not state[2] then return 'lost', {} end
  local position = tonumber(state[2])
  known = tonumber(known)
  if known == position then return token == state[1] and 'ok' or 'astray', {} end
  if known > position then return 'astray', {} end
  local after = '(' .. string.format('%.0f', known) .. '-0'
  local found = redis.call('XRANGE', x, after, '+', 'COUNT', ENTRIES)
  local following = string.format('%.0f', known + 1) .. '-0'
  if not found[1] or found[1][1] ~= following then return 'gap', {} end
  if found[1][2][4] ~= token then return 'astray', {} end
  return position - known > ENTRIES and 'behind' or 'ok', found
end

local function answered(status, entries, results, own, merges)
  local packed = {}
  for i = 1, #entries do
    local fields = entries[i][2]
    packed[i] = listed(5, {binary(entries[i][1]), binary(fields[2]), binary(fields[4]), fields[6],
      binary(fields[8] or '1')})
  end
  return listed(5, {binary(status), listed(#packed, packed), binary(results), binary(own or ''),
    merges or listed(0, {})})
end
"""
)

BEGIN: Final = Script(
    COMMON
    + """
if redis.call('HEXISTS', s, 'position') == 0 then redis.call('HSET', s, 'position', 0) end
if redis.call('HEXISTS', s, 'token') == 0 then redis.call('HSET', s, 'token', '') end
return redis.call('HMGET', s, 'position', 'token')
"""
)
"""Begins the log. Returns position and token. Where it has begun nothing is written: a replica can
be read from a server whose memory is full."""

ENTER: Final = Script(
    COMMON
    + """
local node, incarnation = ARGV[1], tonumber(ARGV[2])
local known = redis.call('HGET', s, 'n:' .. node)
if known and tonumber(known) > incarnation then return 0 end
spare()
redis.call('HSET', s, 'n:' .. node, ARGV[2])
return 1
"""
)
"""In a namespace's shard. ARGV: a node; its incarnation. Fences earlier ones of it there; returns
whether none is later."""

FENCE: Final = Script(
    COMMON
    + """
spare()
for i = 1, #ARGV, 2 do
  local known = redis.call('HGET', s, 'n:' .. ARGV[i])
  if known and tonumber(known) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', s, 'n:' .. ARGV[i], ARGV[i + 1])
  end
end
"""
)
"""In a namespace's shard. ARGV: nodes that were removed, each with the incarnation that TOP has of
it since: they commit there no more."""

MISSING: Final = Script(
    COMMON
    + """
local found, missing = values(ARGV, 1, #ARGV), {}
for i = 1, #ARGV do
  if not found[i] then missing[#missing + 1] = ARGV[i] end
end
return missing
"""
)
"""ARGV: keys. Returns those that are not there."""

POSITION: Final = Script(
    _FOLLOWING
    + """
local status, entries = since(redis.call('HMGET', s, 'token', 'position'), ARGV[1], ARGV[2])
return answered(status, entries, '')
"""
)
"""ARGV: the replica's position. Returns msgpack of the status, the entries (id, token, token
before, writes, version), and of a request what `PROPOSE` says: here nothing."""

PROPOSE: Final = Script(
    _FOLLOWING
    + f"""
local MOST_LOOKED_AT = {_MOST_LOOKED_AT}
local MOVED_WITH_NAMESPACE = '{_MOVED_WITH_NAMESPACE}'
"""
    + """
local node, incarnation, engine, number, known, known_token, run, takes = unpack(ARGV, 1, 8)
local state = redis.call('HMGET', s, 'token', 'position', 'e:' .. engine, 'n:' .. node, 'schema',
  'grown', 'turn', 'moved')
local ordered = state[5] == '1'
if state[4] and state[4] ~= incarnation then return answered('fenced', {}, '') end
local last, results = nil, ''
if state[3] then last, results = string.match(state[3], '^(%d+) (%d*)') end
local status, entries = since(state, known, known_token)
if last and tonumber(last) >= tonumber(number) then
  return answered(status, entries, last == number and results or '')
end
if status ~= 'ok' or tonumber(known) < tonumber(state[7] or 0) then
  return answered(status, entries, '')
end
if string.find(takes, 'away', 1, true) then spare() end

local unchanged = run == 'here' and known == state[2]
local packed, merges, judged, others = {}, {}, {}, nil
results = {}

local function count_of(text, position)
  local kind = string.byte(text, position)
  if kind < 160 then return kind - 144, position + 1 end
  return struct.unpack(kind == 220 and '>I2' or '>I4', text, position + 1)
end

local function size_of(text, position)
  local kind = string.byte(text, position)
  if kind == 196 then return string.byte(text, position + 1), position + 2 end
  return struct.unpack(kind == 197 and '>I2' or '>I4', text, position + 1)
end

local function unpacked(text, position)
  local found, count, size = {}, nil, nil
  count, position = count_of(text, position)
  for i = 1, count do
    if string.byte(text, position) == 192 then
      found[i], position = false, position + 1
    else
      size, position = size_of(text, position)
      found[i], position = string.sub(text, position, position + size - 1), position + size
    end
  end
  return found, position
end

local function precedes(one, other)
  for i = 1, math.min(#one, #other) do
    local left, right = string.byte(one, i), string.byte(other, i)
    if left ~= right then return left < right end
  end
  return #one < #other
end

local function any_within(low, high, keys_, first, last, step)
  local lowest, highest = string.byte(low, 1) or 0, string.byte(high, 1) or 0
  for i = first, last, step do
    local key = keys_[i]
    local kind = string.byte(key, 1)
    if kind >= lowest and kind <= highest and not precedes(key, low) and precedes(key, high) then
      return true
    end
  end
  return false
end

local function by_others()
  if others ~= nil then return others end
  local found, bytes, count, position = {}, 0, nil, nil
  others = false
  for i = 1, #entries do
    local writes = entries[i][2][6]
    bytes = bytes + #writes
    if bytes > MOST_LOOKED_AT then return others end
    count, position = count_of(writes, 1)
    for j = 1, count do found[#found + 1], position = unpacked(writes, position) end
  end
  others = found
  return others
end

local function changed_by_others(low, high)
  local lists = by_others()
  if not lists then return true end
  for i = 1, #lists do
    if any_within(low, high, lists[i], 1, #lists[i], 2) then return true end
  end
  return false
end

local function changes(one, low, high)
  return any_within(low, high, ARGV, one.puts, one.puts_end, 2)
    or any_within(low, high, ARGV, one.deletes, one.deletes_end, 1)
    or any_within(low, high, ARGV, one.merges, one.merges_end, 2)
end

local function was_run_on(kind, i)
  if kind == 'after' then return i == #judged end
  return kind == 'all' and judged[i].kind == 'all'
end

local function is_range_so(kind, low, high)
  if changed_by_others(low, high) then return false end
  for i = 1, #judged do
    local one = judged[i]
    if was_run_on(kind, i) ~= one.is_done and changes(one, low, high) then return false end
  end
  return true
end

local function are_values_so(packed_reads)
  local reads, names = unpacked(packed_reads, 1), {}
  for i = 1, #reads, 2 do names[#names + 1] = reads[i] end
  local found = values(names, 1, #names)
  for i = 1, #names do
    if found[i] ~= reads[2 * i] then return false end
  end
  return true
end

local known_spaces = {}

local function has_moved(keys_, first, last, step)
  for i = first, last, step do
    local key = keys_[i]
    local kind, space = string.sub(key, 1, 1), ''
    if kind == 'h' then
      space = string.sub(key, 4, 5)
    elseif string.find(MOVED_WITH_NAMESPACE, kind, 1, true) then
      space = string.sub(key, 2, 3)
    end
    if #space == 2 then
      if known_spaces[space] == nil then
        known_spaces[space] = redis.call('HEXISTS', s, 'moved:' .. space) == 1
      end
      if known_spaces[space] then return true end
    end
  end
  return false
end

local function changes_moved(one)
  return has_moved(ARGV, one.puts, one.puts_end, 2)
    or has_moved(ARGV, one.deletes, one.deletes_end, 1)
    or has_moved(ARGV, one.merges, one.merges_end, 2)
end

local function is_so(kind, reads, ranges, ranges_end)
  if unchanged then return true end
  if reads ~= '' and not are_values_so(reads) then return false end
  for i = ranges, ranges_end, 2 do
    if not is_range_so(kind, ARGV[i], ARGV[i + 1]) then return false end
  end
  return true
end

local function put(source, first, last)
  for from = first, last, 4000 do
    local till = math.min(from + 3999, last)
    local added = redis.call('HSET', h, unpack(source, from, till))
    if ordered and added > 0 then
      local scored = {}
      for i = from, till, 2 do
        scored[#scored + 1] = 0
        scored[#scored + 1] = source[i]
      end
      redis.call('ZADD', z, unpack(scored))
    end
  end
end

local function remove(first, last)
  for from = first, last, 4000 do
    local till = math.min(from + 3999, last)
    local removed = redis.call('HDEL', h, unpack(ARGV, from, till))
    if ordered and removed > 0 then
      redis.call('ZREM', z, unpack(ARGV, from, till))
    end
  end
end

local function later(one, other)
  local high, low = struct.unpack('>I4I4', one)
  local other_high, other_low = struct.unpack('>I4I4', other)
  if high == other_high then return low > other_low and one or other end
  return high > other_high and one or other
end

local function merged(key, old, operand)
  if string.sub(key, 1, 1) == 's' then
    if not old then return nil end
    local sum, change = cmsgpack.unpack(old), cmsgpack.unpack(operand)
    for i = 1, #sum do sum[i] = sum[i] + (change[i] or 0) end
    return cmsgpack.pack(sum)
  end
  if not old then return operand end
  return later(string.sub(old, 1, 8), string.sub(operand, 1, 8))
    .. later(string.sub(old, 9), string.sub(operand, 9))
end

local function merge(first, last)
  local names, done, changed = {}, {}, {}
  for i = first, last, 2 do names[#names + 1] = ARGV[i] end
  local found = values(names, 1, #names)
  for i = 1, #names do
    local value = merged(names[i], found[i], ARGV[first + 2 * i - 1])
    if value then
      changed[#changed + 1], changed[#changed + 2] = names[i], value
      done[#done + 1], done[#done + 2] = binary(names[i]), binary(value)
    end
  end
  put(changed, 1, #changed)
  if #done > 0 then packed[#packed + 1] = listed(#done, done) end
  merges[#merges + 1] = listed(#done, done)
end

at = 9
while at <= #ARGV do
  local one = {kind = ARGV[at]}
  local reads, writes = ARGV[at + 1], ARGV[at + 2]
  at = at + 3
  local ranges, ranges_end = list()
  one.puts, one.puts_end = list()
  one.deletes, one.deletes_end = list()
  one.merges, one.merges_end = list()
  one.is_done = not (state[8] and changes_moved(one)) and is_so(one.kind, reads, ranges, ranges_end)
  if one.is_done then
    put(ARGV, one.puts, one.puts_end)
    remove(one.deletes, one.deletes_end)
    if writes ~= '' then packed[#packed + 1] = writes end
    merge(one.merges, one.merges_end)
    results[#results + 1] = '1'
  else
    results[#results + 1] = '0'
  end
  judged[#judged + 1] = one
end

results = table.concat(results)
local own = ''
if #packed > 0 then
  own = engine .. ':' .. number
  local added = log(state[2], state[1], own, listed(#packed, packed), state[6], 'e:' .. engine,
    number .. ' ' .. results .. ' ' .. now())
  if added > 0 then forget_old_engines() end
  if string.find(takes, 'turn', 1, true) then
    redis.call('HSET', s, 'turn', string.format('%.0f', state[2] + 1))
  end
end
return answered(status, entries, results, own, listed(#merges, merges))
"""
)
"""ARGV: the node's number and incarnation; the engine; the number of this request, which grows;
where the replica stands; 'here' where all were run on it as it stands; 'away' where they remove
more than they add, which is done though memory is full, with 'turn' (or that alone) where a
namespace's record is written: of it depends what is committed here at all, so nothing is any more
that was run on a replica without it. Then of each transaction

- which of those before it in the request it was run on: `all` that say so too, none (`alone`), or
  the one just `after` which it is;
- msgpack, or '' for nothing, of: keys read, each with its value then (nil: none); what is put and
  deleted, as the log has it;
- lists of: starts and ends of ranges read; keys and values to put; keys to delete; keys and
  operands to merge.

Each is checked against what those before it left. A range is so where nothing in it was written
after the replica's position, as the log says, nor by one before it in the request that it was not
run on, and all of it that it was run on was done. Where more than MOST_LOOKED_AT bytes were
written since, it counts as changed.

Returns as POSITION does, with a digit for each transaction: 1 done, 0 refused; the entries are
those of others. `fenced`: the node was removed, or started again elsewhere."""


class Proposal(NamedTuple):
    """A transaction that was run on a replica."""

    reads: Mapping[bytes, bytes | None]
    """The values that must still be so."""
    ranges: Sequence[tuple[bytes, bytes, int, bytes]]
    """Ranges that must still be so: start, end; and, where it was run by another process than the
    one that proposes it, at most so many keys asked for, and the digest (`digest`) of what was
    there."""
    writes: Mapping[bytes, bytes | None]
    merges: Sequence[tuple[bytes, bytes]]

    @property
    def is_needed(self) -> bool:
        """Whether it changes anything."""
        return bool(self.writes or self.merges)

    @property
    def growth(self) -> Growth:
        """The growth as far as it is known without a look: a key that was not read counts as
        absent."""
        return growth_of(self.writes.items(), self.reads.get)


class LogEntry(NamedTuple):
    """One entry of the log."""

    number: int
    token: bytes
    before: bytes
    writes: list[Writes]


class LogReply(NamedTuple):
    """The answer to POSITION or PROPOSE."""

    status: str
    entries: list[LogEntry]
    """The entries that the replica lacks; of PROPOSE without its own."""
    results: bytes
    own: bytes = b""
    """The token of what PROPOSE did; empty: it did nothing, or did it before."""
    merges: Sequence[Writes] = ()
    """Keys that were merged into, with their values then: of each transaction that was done."""


_encode: Final = msgspec.msgpack.Encoder().encode


class _Answer(msgspec.Struct, array_like=True):
    status: bytes
    entries: list[tuple[bytes, bytes, bytes, list[Writes], bytes]]
    results: bytes
    own: bytes = b""
    merges: list[Writes] = []


_decode_answer: Final = msgspec.msgpack.Decoder(_Answer).decode
_decode_of_any_version: Final = msgspec.msgpack.Decoder(
    tuple[bytes, list[tuple[bytes, bytes, bytes, msgspec.Raw, bytes]], bytes, bytes, list[Writes]]
).decode
_decode_writes: Final = msgspec.msgpack.Decoder(list[Writes]).decode


class Basis(Enum):
    """The transactions before it in a request on which one was run."""

    ALL = b"all"
    """All that were, too."""
    ALONE = b"alone"
    AFTER = b"after"
    """The one just before it."""


class Packed(NamedTuple):
    """A proposal as it is sent, and what it puts and deletes."""

    items: list[bytes]
    writes: Writes


def proposed(proposal: Proposal, basis: Basis = Basis.ALL) -> Packed:
    """Returns its part of PROPOSE's ARGV."""
    reads, ranges, writes, merges = proposal
    puts, deletes = puts_and_deletes(writes.items())
    read, written = [*chain.from_iterable(reads.items())], [*chain.from_iterable(writes.items())]
    items = [basis.value, *(_encode(each) if each else b"" for each in (read, written))]
    items.append(b"%d" % (2 * len(ranges)))
    for start, end, *_ in ranges:
        items += (start, end)
    items += (b"%d" % len(puts), *puts, b"%d" % len(deletes), *deletes)
    items += (b"%d" % (2 * len(merges)), *chain.from_iterable(merges))
    return Packed(items, written)


def done_by(reply: LogReply, mark_token: bytes, position: int, sent: Sequence[Packed]) -> LogReply:
    """Returns the answer to PROPOSE, of what was `sent` by a replica that stood at this position,
    with the entry that it made as the last."""
    if not reply.own:
        return reply
    last = reply.entries[-1] if reply.entries else None
    number, before = (last.number, last.token) if last else (position, mark_token)
    done = [each for each, digit in zip(sent, reply.results, strict=True) if digit == _DONE]
    writes: list[Writes] = []
    for each, merged in zip(done, reply.merges, strict=True):
        writes += (list_ for list_ in (each.writes, merged) if list_)
    return reply._replace(entries=[*reply.entries, LogEntry(number + 1, reply.own, before, writes)])


def size(items: Sequence[bytes]) -> int:
    """Returns how many bytes they are, roughly."""
    return sum(map(len, items)) + 8 * len(items)


def read_answer(packed: bytes) -> LogReply:
    """Raises Corrupt, NotSupported (an entry of a later version)."""
    try:
        found = _decode_answer(packed)
        entries = [_numbered(*each) for each in found.entries]
        return LogReply(found.status.decode(), entries, found.results, found.own, found.merges)
    except (ValueError, msgspec.DecodeError) as error:
        _refuse_later(packed)
        raise Corrupt(f"the engine gave an answer that is none: {error}") from None


def _refuse_later(packed: bytes) -> None:
    """Raises NotSupported where an answer cannot be read since an entry is of a later version."""
    with contextlib.suppress(ValueError, msgspec.DecodeError, RecursionError):
        for name, *_, version in _decode_of_any_version(packed)[1]:
            _check_version(name, version)


def read_entries(found: Sequence[Any]) -> list[LogEntry]:
    """Returns entries as XRANGE and XREAD give them. Raises Corrupt, NotSupported (a later
    version)."""
    return [_entry(name, fields) for name, fields in found]


def _numbered(
    name: bytes, token: bytes, before: bytes, writes: list[Writes], version: bytes
) -> LogEntry:
    if version != _ENTRY_VERSION:
        _check_version(name, version)
    return LogEntry(int(name.partition(b"-")[0]), token, before, writes)


def _entry(name: bytes, fields: Sequence[bytes]) -> LogEntry:
    try:
        version = fields[7] if len(fields) > 7 else _ENTRY_VERSION
        _check_version(name, version)
        token, before, packed = fields[1], fields[3], fields[5]
        return _numbered(name, token, before, _decode_writes(packed), version)
    except (IndexError, ValueError, msgspec.DecodeError) as error:
        raise Corrupt(f"the engine's log has an entry {name!r} that is none: {error}") from None


def _check_version(name: bytes, version: bytes) -> None:
    """Raises NotSupported; ValueError where it is none."""
    if int(version) > ENTRY_VERSION:
        raise NotSupported(
            f"entry {name.decode()} of the engine's log has version {version.decode()}, this KVFS"
            f" reads {ENTRY_VERSION}: use the version of the node that wrote it"
        )
