"""The live nodes of a cluster, as its Redis server knows them: numbers, incarnations and leases.

All of it lies in shard 0: lasting facts in the hash `s` (`scripts`),

- `cluster`, `secrets`: the owner of the metadata, and the digests of the valid secrets;
- `nodes`: the last number that was given to a node;
- `node:` store: the number of that store's node; with a minus sign once it was removed;
- `n:` node: its incarnation. A script that writes for a node looks here first: an older incarnation
  than this one is fenced, whatever it believes;
- `t:` node: the process that made that incarnation: a join whose answer was lost, and that comes
  again, is one;

in the hash `l`, of which no log tells, a lease for each node: its incarnation, its beat (a number
that grows with each renewal), the server's time of the renewal, and the node's report about itself.
That clock may jump: a lease has ended if its beat stands still, which observers have to notice
(`kvfs.cluster.failure_detector`);

and, in layout 2, in the sorted set `z` the order in which leases were renewed, by numbers: each is
the server's time in microseconds, or one more than the greatest there where that clock was set
back.

- `=` node: the number of its last renewal, its beat; in `l` stands that of its last change;
- node: negative, the number of the last change of its lease but for renewals: it came, its
  incarnation or report changed, or it went.

So a renewal writes one number, and brings what happened since the node's own one before: the nodes
that renewed nothing since, which are few (those that are dead are not named again and again), and
the leases that changed. It names that one by its number. Where the node has another in `z` (an
answer was lost, or the server went back to an older state), and in layout 1, where nodes of the
version before renew by `l` alone, it brings all leases; those that `z` lacks, since they are older
than it, are entered then.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import trio

from kvfs.base.errors import AccessDenied, Conflict
from kvfs.meta.node_leases import (
    Fenced,
    HeardLeases,
    Joined,
    JoinState,
    Lease,
    LeaseNews,
    Leases,
    Lost,
    Renewed,
)
from kvfs.meta.redis.about import read_info, seems_emptied
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.scripts import SPARING, Script

_COMMON: Final = (
    SPARING
    + """
spare()
local z, s, l = KEYS[2], KEYS[3], KEYS[5]

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function text(number)
  return string.format('%.0f', number)
end

local function is_ordered()
  return redis.call('HGET', s, 'schema') == '2'
end

local function next_number(time)
  local last = redis.call('ZREVRANGE', z, 0, 0, 'WITHSCORES')[2] or 0
  return text(math.max(time, last + 1))
end

local function report(node, incarnation, words, time, number)
  local old, was, beat, said = redis.call('HGET', l, node), '', 0, ''
  if old then was, beat, said = string.match(old, '^(%d+) (%d+) %d+ (.*)$') end
  if number and was == incarnation and said == words then return end
  local head = incarnation .. ' ' .. (number or text(beat + 1)) .. ' ' .. text(time / 1000) .. ' '
  redis.call('HSET', l, node, head .. words)
  if number then redis.call('ZADD', z, '-' .. number, node) end
end

local function leases(ordered)
  local beats = ordered and redis.call('ZRANGEBYSCORE', z, '(0', '+inf', 'WITHSCORES') or {}
  return redis.call('HGETALL', l), beats
end

local function drop(node)
  if is_ordered() then
    redis.call('ZADD', z, '-' .. next_number(now()), node)
    redis.call('ZREM', z, '=' .. node)
  end
  return redis.call('HDEL', l, node)
end
"""
)
"""The living nodes must be known even if the server's memory is full."""

PEEK: Final = Script(
    _COMMON
    + """
local state = redis.call('HMGET', s, 'cluster', 'secrets')
return {state[1] or '', state[2] or '', text(now()), leases(is_ordered())}
"""
)
"""Returns the cluster, its secrets, the time, leases and beats."""

JOIN: Final = Script(
    _COMMON
    + """
local store, token, words, digests, remembered, wanted = unpack(ARGV, 1, 6)
local node = redis.call('HGET', s, 'node:' .. store)
if node and string.sub(node, 1, 1) == '-' then return {'removed'} end
if remembered ~= '' then
  local known = node and redis.call('HGET', s, 'n:' .. node)
  if not known or tonumber(known) < tonumber(remembered) then return {'lost'} end
end

local valid = redis.call('HGET', s, 'secrets')
if valid then
  local common = false
  for digest in string.gmatch(digests, '%x+') do
    common = common or string.find(valid, digest, 1, true) ~= nil
  end
  if not common then return {'secret'} end
else
  redis.call('HSET', s, 'secrets', digests)
end

if not node then
  local last = tonumber(redis.call('HGET', s, 'nodes') or 0)
  local number = last + 1
  if tonumber(wanted) > 0 and tonumber(wanted) <= 65535
     and redis.call('HEXISTS', s, 'n:' .. wanted) == 0 then number = tonumber(wanted) end
  if number > 65535 then return {'full'} end
  node = string.format('%.0f', number)
  redis.call('HSET', s, 'nodes', string.format('%.0f', math.max(last, number)))
  redis.call('HSET', s, 'node:' .. store, node)
end
if redis.call('HGET', s, 't:' .. node) ~= token then
  redis.call('HINCRBY', s, 'n:' .. node, 1)
  redis.call('HSET', s, 't:' .. node, token)
end
local incarnation = redis.call('HGET', s, 'n:' .. node)
local time = now()
local number = is_ordered() and next_number(time) or nil
if number then redis.call('ZADD', z, number, '=' .. node) end
report(node, incarnation, words, time, number)
return {'done', node, incarnation}
"""
)
"""ARGV: a store; a token of the process that joins; its report about itself; digests of its
secrets, the newest first; the incarnation that it remembers ('': it never joined); the number that
it is to have if nobody had it yet (0: any), since its name is taken for one. Returns 'done', its
number and its incarnation; or the obstacle: 'removed', 'lost' (the incarnation that it remembers is
not known here: the data are gone, or older than the store), 'secret' (none of these is valid),
'full'."""

RENEW: Final = Script(
    _COMMON
    + """
local function complete(number)
  local there = {}
  for _, node in ipairs(redis.call('HKEYS', l)) do
    there['=' .. node] = true
    if not redis.call('ZSCORE', z, '=' .. node) then
      local ms = string.match(redis.call('HGET', l, node), '^%d+ %d+ (%d+)')
      local beat = text(math.min(ms * 1000, number - 1))
      redis.call('ZADD', z, beat, '=' .. node, '-' .. number, node)
    end
  end
  for _, field in ipairs(redis.call('ZRANGEBYSCORE', z, '(0', '+inf')) do
    if not there[field] then
      redis.call('ZREM', z, field)
      redis.call('ZADD', z, '-' .. number, string.sub(field, 2))
    end
  end
end

local function changed(since)
  local nodes, leases = redis.call('ZRANGEBYSCORE', z, '-inf', '(-' .. since), {}
  for from = 1, #nodes, 4000 do
    local part = redis.call('HMGET', l, unpack(nodes, from, math.min(from + 3999, #nodes)))
    for i = 1, #part do leases[#leases + 1] = part[i] end
  end
  return nodes, leases
end

local node, incarnation, words, is_told, since, dead_beat, dead = unpack(ARGV, 1, 7)
local state = redis.call('HMGET', s, 'n:' .. node, 'secrets', 'schema')
if not state[1] or tonumber(state[1]) < tonumber(incarnation) then return {'lost'} end
if state[1] ~= incarnation then return {'fenced'} end
local secrets, time = state[2] or '', now()
if state[3] ~= '2' then
  report(node, incarnation, words, time)
  return {'all', secrets, '', text(time), leases()}
end

local number, is_known = next_number(time), redis.call('ZSCORE', z, '=' .. node) == since
redis.call('ZADD', z, number, '=' .. node)
if not is_known or is_told == '0' then report(node, incarnation, words, time, number) end
if not is_known then
  if redis.call('HLEN', l) ~= redis.call('ZCOUNT', z, '(0', '+inf') then complete(number) end
  return {'all', secrets, number, text(time), leases(true)}
end
local kind, from = 'news', '(0'
if dead ~= '0' and redis.call('ZCOUNT', z, '(0', dead_beat) == tonumber(dead) then
  kind, from = 'rest', '(' .. dead_beat
end
local silent = redis.call('ZRANGEBYSCORE', z, from, since, 'WITHSCORES')
return {kind, secrets, number, text(time), silent, changed(since)}
"""
)
"""ARGV: a node; its incarnation; its report about itself; of what it has heard: whether that report
was taken, the number of its last renewal (or nothing), the beat up to which nodes are dead, how
many these are. Returns 'news', the secrets, the number of this renewal, the time, the nodes that
renewed nothing since, with their beats, as `z` has them, those whose leases changed since, and
these leases (nil: it went); or 'rest', likewise without those dead, who still are; or 'all',
likewise until the time, all leases, and the beats that `z` has; 'fenced'; or 'lost', as JOIN
does."""

LEAVE: Final = Script(
    _COMMON
    + """
if redis.call('HGET', s, 'n:' .. ARGV[1]) ~= ARGV[2] then return 0 end
return drop(ARGV[1])
"""
)
"""ARGV: a node; its incarnation. The node stopped in order: its lease goes at once."""

REMOVE: Final = Script(
    _COMMON
    + """
if redis.call('HGET', s, 'node:' .. ARGV[2]) == '-' .. ARGV[1] then return 0 end
redis.call('HSET', s, 'node:' .. ARGV[2], '-' .. ARGV[1])
drop(ARGV[1])
return redis.call('HINCRBY', s, 'n:' .. ARGV[1], 1)
"""
)
"""ARGV: a node; its store. Its processes are fenced, and it cannot join again. Idempotent."""

REPLACE_SECRETS: Final = Script(
    _COMMON
    + """
if redis.call('HGET', s, 'secrets') ~= ARGV[1] then return 0 end
redis.call('HSET', s, 'secrets', ARGV[2])
return 1
"""
)
"""ARGV: valid digests; those that are to be valid. Returns whether the first were as told."""


class LeaseTable:
    """The scripts above on one server, over a connection of its own. `deadline_s` bounds each call,
    and its wait for the one before; all raise Unavailable, Invalid."""

    def __init__(self, location: EngineLocation, deadline_s: float) -> None:
        self._caller = RetryingClient(location, deadline_s)
        self._turn = trio.Lock()
        self._shown = location.shown

    async def found(self, cluster: str | None) -> str:
        """Checks the server; returns the owner of its metadata: `cluster`, or a new id if there are
        none. Raises NotSupported, Conflict (another cluster's)."""
        async with self._turn:
            return await self._caller.examine(cluster)

    async def peek(self) -> JoinState:
        """Returns the present state; changes nothing."""
        cluster, secrets, time, leases, beats = await self._run(PEEK)
        return JoinState(cluster.decode(), _digests(secrets), _leases(leases, beats, int(time)))

    async def join(
        self,
        store: str,
        token: str,
        words: bytes,
        digests: Sequence[bytes],
        remembered: int | None,
        *,
        wanted: int = 0,
    ) -> Joined:
        """Joins as this store's node; `token` is the same when one process asks again. `wanted`:
        the number of a new one, if nobody had it. Raises Fenced (it was removed), Lost,
        AccessDenied (no secret of these is valid), Conflict."""
        known = "" if remembered is None else str(remembered)
        answer = await self._run(JOIN, store, token, words, _joined(digests), known, wanted)
        if answer[0] == b"done":
            return Joined(int(answer[1]), int(answer[2]))
        if answer[0] == b"secret":
            raise AccessDenied(
                f"the secret given is not that of the cluster at {self._shown}: `kvfs node secret`"
                " on one of its nodes prints it, `kvfs node join` takes it"
            )
        if answer[0] == b"removed":
            raise Fenced(
                f"this node was removed from the cluster at {self._shown}: `kvfs node join --again`"
                " makes it a new one"
            )
        if answer[0] == b"full":
            raise Conflict(f"the engine {self._shown} has given all 65,535 numbers of nodes")
        raise self._lost()

    async def was_emptied(self) -> bool:
        """Returns whether the server was emptied, as far as it can tell: it forgets that when it
        ends."""
        commands = read_info(await self._caller.call(b"INFO", b"commandstats"))
        return seems_emptied(commands, int(await self._caller.call(b"DBSIZE")))

    async def renew(self, me: Joined, words: bytes, heard: HeardLeases) -> Renewed:
        """Renews the lease, and adds the news to what was `heard`. Raises Fenced, Lost."""
        known = (heard.words == words, heard.number, heard.dead_beat, len(heard.dead))
        answer = await self._run(RENEW, me.node, me.incarnation, words, *known)
        if answer[0] in (b"news", b"rest", b"all"):
            heard.words = words
            return _renewed(answer, heard)
        if answer[0] == b"fenced":
            raise Fenced(
                f"node {me.node} was started elsewhere, or removed from the cluster: this process"
                " must not go on as it"
            )
        raise self._lost()

    async def leave(self, me: Joined) -> None:
        await self._run(LEAVE, me.node, me.incarnation)

    async def remove(self, node: int, store: str) -> None:
        await self._run(REMOVE, node, store)

    async def replace_secrets(self, old: Sequence[bytes], new: Sequence[bytes]) -> None:
        """Replaces the secrets. Raises Conflict if others are valid by now."""
        if not await self._run(REPLACE_SECRETS, _joined(old), _joined(new)):
            raise Conflict("somebody else replaced the cluster's secret meanwhile: look again")

    def close(self) -> None:
        """Idempotent."""
        self._caller.stop()

    async def _run(self, script: Script, *arguments: str | bytes | int) -> Any:
        packed = [each.encode() if isinstance(each, str) else each for each in arguments]
        async with self._turn:
            return await self._caller.script(script, *packed)

    def _lost(self) -> Lost:
        return Lost(
            f"the engine {self._shown} does not know this node as it was: its data are gone, or"
            " were put back to an older state. Stop all nodes, and see `kvfs rebuild --help`"
        )


def _joined(digests: Sequence[bytes]) -> str:
    return ",".join(digest.hex() for digest in digests)


def _digests(text: bytes) -> tuple[bytes, ...]:
    return tuple(bytes.fromhex(each) for each in text.decode().split(",") if each)


def _renewed(answer: Sequence[Any], heard: HeardLeases) -> Renewed:
    kind, secrets, number, time, *told = answer
    silent: dict[int, int] = {}
    if kind == b"all":
        leases, beats = told
        news = LeaseNews(_leases(leases, beats, int(time)), {}, (), is_whole=True)
    else:
        still, nodes, leases = told
        silent = {**(heard.dead if kind == b"rest" else {}), **_beats(still)}
        changed = dict(zip(map(int, nodes), leases, strict=True))
        there = {node: _lease(each, None, int(time)) for node, each in changed.items() if each}
        news = LeaseNews(there, silent, changed.keys() - there.keys(), is_whole=False)
    heard.hear(number, silent)
    return Renewed(_digests(secrets), news, int(time) * 1000)


def _leases(flat: Sequence[bytes], renewed: Sequence[bytes], now: int) -> Leases:
    beats = _beats(renewed)
    return {int(node): _lease(packed, beats.get(int(node)), now) for node, packed in _pairs(flat)}


def _lease(packed: bytes, beat: int | None, now: int) -> Lease:
    """Returns a lease at `now`, in microseconds; `beat`: a later one."""
    incarnation, first, time, words = packed.split(b" ", 3)
    renewed = int(time) * 1000 if beat is None else beat
    return Lease(
        int(incarnation), int(first) if beat is None else beat, (now - renewed) / 1e6, words
    )


def _beats(flat: Sequence[bytes]) -> dict[int, int]:
    return {int(field[1:]): int(beat) for field, beat in _pairs(flat)}


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
