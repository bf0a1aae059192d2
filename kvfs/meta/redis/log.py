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
anew (PAGE). A replica that stands at (position, token) is told one of

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
from typing import Any, Final, NamedTuple

import msgspec

from kvfs.base.errors import Corrupt, NotSupported
from kvfs.meta.lmdb.growth import Growth, growth_of
from kvfs.meta.redis.scripts import COMMON, ENTRY_VERSION, Script

_ENTRY_VERSION: Final = b"%d" % ENTRY_VERSION
ENTRIES: Final = 500
"""Entries in one answer, at most."""
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

local function answered(status, entries, results)
  local packed = {}
  for i = 1, #entries do
    local fields = entries[i][2]
    packed[i] = listed(5, {binary(entries[i][1]), binary(fields[2]), binary(fields[4]), fields[6],
      binary(fields[8] or '1')})
  end
  return listed(3, {binary(status), listed(#packed, packed), binary(results)})
end
"""
)

BEGIN: Final = Script(
    COMMON
    + """
redis.call('HSETNX', s, 'position', 0)
redis.call('HSETNX', s, 'token', '')
return redis.call('HMGET', s, 'position', 'token')
"""
)
"""Begins the log. Returns position and token."""

PAGE: Final = Script(
    COMMON
    + """
local low = '[' .. ARGV[1]
local names = redis.call('ZRANGEBYLEX', z, low, '+', 'LIMIT', 0, ARGV[2])
local found, bytes, count = {}, 0, 0
while count < #names and bytes < 1048576 do
  local last = math.min(count + 100, #names)
  local part = redis.call('HMGET', h, unpack(names, count + 1, last))
  for i = 1, #part do
    found[2 * (count + i) - 1] = names[count + i]
    found[2 * (count + i)] = part[i]
    bytes = bytes + #names[count + i] + #part[i]
  end
  count = last
end
return {count == #names and #names < tonumber(ARGV[2]) and 1 or 0, found}
"""
)
"""ARGV: the first key, a number of keys. Returns whether these are the last ones, and keys and
values in turn."""

POSITION: Final = Script(
    _FOLLOWING
    + """
local status, entries = since(redis.call('HMGET', s, 'token', 'position'), ARGV[1], ARGV[2])
return answered(status, entries, '')
"""
)
"""ARGV: the replica's position. Returns msgpack of the status, the entries (id, token, token
before, writes, version) and nothing."""

PROPOSE: Final = Script(
    _FOLLOWING
    + """
local node, incarnation, engine, number, known, known_token, run, takes = unpack(ARGV, 1, 8)
local state = redis.call('HMGET', s, 'token', 'position', 'e:' .. engine, 'n:' .. node)
if state[4] and state[4] ~= incarnation then return answered('fenced', {}, '') end
local last, results = nil, ''
if state[3] then last, results = string.match(state[3], '^(%d+) (%d*)') end
local status, entries = since(state, known, known_token)
if last and tonumber(last) >= tonumber(number) then
  return answered(status, entries, last == number and results or '')
end
if status ~= 'ok' then return answered(status, entries, '') end
if takes == 'away' then spare() end

local unchanged = run == 'here' and known == state[2]
local packed, bytes = {}, 0
results = {}

local function is_so(first, wanted, ranges, ranges_end)
  if unchanged then return true end
  local found = values(ARGV, first, wanted - 2)
  for i = 1, #found do
    local now = found[i] and '=' .. found[i] or ''
    if now ~= ARGV[wanted + i - 1] then return false end
  end
  for i = ranges, ranges_end, 4 do
    local names, those = range(i)
    local whole = {}
    for j = 1, #names do
      whole[#whole + 1] = #names[j] .. ':' .. names[j] .. #those[j] .. ':' .. those[j]
    end
    if redis.sha1hex(table.concat(whole)) ~= ARGV[i + 3] then return false end
  end
  return true
end

local function put(first, last)
  for from = first, last, 4000 do
    local till = math.min(from + 3999, last)
    local added = redis.call('HSET', h, unpack(ARGV, from, till))
    if added > 0 then
      local scored = {}
      for i = from, till, 2 do
        scored[#scored + 1] = 0
        scored[#scored + 1] = ARGV[i]
      end
      redis.call('ZADD', z, unpack(scored))
    end
  end
end

local function remove(first, last)
  for from = first, last, 4000 do
    local till = math.min(from + 3999, last)
    if redis.call('HDEL', h, unpack(ARGV, from, till)) > 0 then
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
  local done = {}
  for i = first, last, 2 do
    local key = ARGV[i]
    local value = merged(key, redis.call('HGET', h, key), ARGV[i + 1])
    if value then
      if redis.call('HSET', h, key, value) == 1 then redis.call('ZADD', z, 0, key) end
      done[#done + 1] = binary(key)
      done[#done + 1] = binary(value)
    end
  end
  if #done > 0 then packed[#packed + 1] = listed(#done, done) end
end

at = 9
while at <= #ARGV do
  local first = list()
  local wanted = list()
  local ranges, ranges_end = list()
  local puts, puts_end = list()
  local deletes, deletes_end = list()
  local merges, merges_end = list()
  local blob = ARGV[at]
  at = at + 1
  if is_so(first, wanted, ranges, ranges_end) then
    put(puts, puts_end)
    remove(deletes, deletes_end)
    if blob ~= '' then packed[#packed + 1] = blob end
    merge(merges, merges_end)
    results[#results + 1] = '1'
  else
    results[#results + 1] = '0'
  end
end

results = table.concat(results)
if #packed > 0 then
  log(state[2], state[1], engine .. ':' .. number, listed(#packed, packed))
  sent(engine, number .. ' ' .. results)
  status, entries = since({engine .. ':' .. number, tonumber(state[2]) + 1}, known, known_token)
end
return answered(status, entries, results)
"""
)
"""ARGV: the node's number and incarnation; the engine; the number of this request, which grows;
where the replica stands; 'here' where all were run on it as it stands; 'away' where they remove
more than they add, which is done though memory is full. Then of each transaction the lists: keys
read; what they were ('=' and the value, '' for none); start, end, count, digest of ranges read;
keys and values to put; keys to delete; keys and operands to merge; and, by itself, msgpack of what
is put and deleted, as the log has it. Each is checked against what those before it left. Returns as
POSITION does, with a digit for each transaction: 1 done, 0 refused. `fenced`: the node was removed,
or started again elsewhere."""


class Proposal(NamedTuple):
    """A transaction that was run on a replica."""

    reads: Mapping[bytes, bytes | None]
    """The values that must still be so."""
    ranges: Sequence[tuple[bytes, bytes, int, bytes]]
    """Ranges that must still be so: start, end, at most so many keys asked for, digest
    (`scripts.digest`)."""
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
    results: bytes


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_answer: Final = msgspec.msgpack.Decoder(
    tuple[bytes, list[tuple[bytes, bytes, bytes, list[Writes], bytes]], bytes]
).decode
_decode_of_any_version: Final = msgspec.msgpack.Decoder(
    tuple[bytes, list[tuple[bytes, bytes, bytes, msgspec.Raw, bytes]], bytes]
).decode
_decode_writes: Final = msgspec.msgpack.Decoder(list[Writes]).decode


def proposed(proposal: Proposal) -> list[bytes]:
    """Returns its part of PROPOSE's ARGV."""
    reads, ranges, writes, merges = proposal
    puts: list[bytes] = []
    deletes: list[bytes] = []
    packed: Writes = []
    for key, value in writes.items():
        packed += (key, value)
        if value is None:
            deletes.append(key)
        else:
            puts += (key, value)
    count = b"%d" % len(reads)
    items = [count, *reads, count]
    items += [b"" if value is None else b"=" + value for value in reads.values()]
    items.append(b"%d" % (4 * len(ranges)))
    for start, end, limit, digest in ranges:
        items += (start, end, b"%d" % limit, digest)
    items += (b"%d" % len(puts), *puts, b"%d" % len(deletes), *deletes)
    items.append(b"%d" % (2 * len(merges)))
    for pair in merges:
        items += pair
    items.append(_encode(packed) if packed else b"")
    return items


def size(items: Sequence[bytes]) -> int:
    """Returns how many bytes they are, roughly."""
    return sum(map(len, items)) + 8 * len(items)


def read_answer(packed: bytes) -> LogReply:
    """Raises Corrupt, NotSupported (an entry of a later version)."""
    try:
        status, entries, results = _decode_answer(packed)
        return LogReply(status.decode(), [_numbered(*each) for each in entries], results)
    except (ValueError, msgspec.DecodeError) as error:
        _refuse_later(packed)
        raise Corrupt(f"the engine gave an answer that is none: {error}") from None


def _refuse_later(packed: bytes) -> None:
    """Raises NotSupported where an answer cannot be read since an entry is of a later version."""
    with contextlib.suppress(ValueError, msgspec.DecodeError):
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
