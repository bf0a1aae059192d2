"""The live nodes of a cluster, as its Redis server knows them: numbers, incarnations and leases.

All of it lies in shard 0: lasting facts in the hash `s` (`scripts`),

- `cluster`, `secrets`: the owner of the metadata, and the digests of the valid secrets;
- `nodes`: the last number that was given to a node;
- `node:` store: the number of that store's node; with a minus sign once it was removed;
- `n:` node: its incarnation. A script that writes for a node looks here first: an older incarnation
  than this one is fenced, whatever it believes;
- `t:` node: the process that made that incarnation: a join whose answer was lost, and that comes
  again, is one;

and in the hash `l`, of which no log tells, a lease for each node: its incarnation, a number that
grows with each renewal, the server's time of the renewal, and the node's report about itself. That
clock may jump: a lease has ended if its number stands still, which observers have to notice
(`kvfs.cluster.failure_detector`).
"""

from collections.abc import Sequence
from typing import Any, Final

import trio

from kvfs.base.errors import AccessDenied, Conflict
from kvfs.meta.node_leases import Fenced, Joined, JoinState, Lease, Leases, Lost, Renewed
from kvfs.meta.redis.about import read_info, seems_emptied
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.scripts import SPARING, Script

_COMMON: Final = (
    SPARING
    + """
spare()
local s, l = KEYS[3], KEYS[5]

local function now()
  local time = redis.call('TIME')
  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
end

local function leases()
  return {now(), redis.call('HGETALL', l)}
end

local function renew(node, incarnation, words)
  local old = redis.call('HGET', l, node)
  local beat = old and tonumber(string.match(old, '^%d+ (%d+)')) or 0
  local head = string.format('%s %.0f %s ', incarnation, beat + 1, now())
  redis.call('HSET', l, node, head .. words)
end
"""
)
"""The living nodes must be known even if the server's memory is full."""

PEEK: Final = Script(
    _COMMON
    + """
local state = redis.call('HMGET', s, 'cluster', 'secrets')
return {state[1] or '', state[2] or '', leases()}
"""
)
"""Returns the cluster, its secrets, leases."""

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
renew(node, incarnation, words)
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
local incarnation = redis.call('HGET', s, 'n:' .. ARGV[1])
if not incarnation or tonumber(incarnation) < tonumber(ARGV[2]) then return {'lost'} end
if incarnation ~= ARGV[2] then return {'fenced'} end
renew(ARGV[1], incarnation, ARGV[3])
return {'done', redis.call('HGET', s, 'secrets') or '', leases()}
"""
)
"""ARGV: a node; its incarnation; its report about itself. Returns 'done', the secrets and all
leases; 'fenced'; or 'lost', as JOIN does."""

LEAVE: Final = Script(
    _COMMON
    + """
if redis.call('HGET', s, 'n:' .. ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', l, ARGV[1])
"""
)
"""ARGV: a node; its incarnation. The node stopped in order: its lease goes at once."""

REMOVE: Final = Script(
    _COMMON
    + """
redis.call('HSET', s, 'node:' .. ARGV[2], '-' .. ARGV[1])
redis.call('HDEL', l, ARGV[1])
return redis.call('HINCRBY', s, 'n:' .. ARGV[1], 1)
"""
)
"""ARGV: a node; its store. Its processes are fenced, and it cannot join again."""

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
        cluster, secrets, leases = await self._run(PEEK)
        return JoinState(cluster.decode(), _digests(secrets), _leases(leases))

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

    async def renew(self, me: Joined, words: bytes) -> Renewed:
        """Raises Fenced, Lost."""
        answer = await self._run(RENEW, me.node, me.incarnation, words)
        if answer[0] == b"done":
            return Renewed(_digests(answer[1]), _leases(answer[2]))
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


def _leases(answer: object) -> Leases:
    assert isinstance(answer, list)
    now, flat = answer
    found = {}
    for node, value in zip(flat[::2], flat[1::2], strict=True):
        incarnation, beat, renewed, words = value.split(b" ", 3)
        age_s = (int(now) - int(renewed)) / 1000
        found[int(node)] = Lease(int(incarnation), int(beat), age_s, words)
    return found
