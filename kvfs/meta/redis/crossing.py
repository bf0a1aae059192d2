"""Commits of several shards, all or nothing, also where whoever makes one dies on the way.

| step | in | leaves there | without a next step |
|---|---|---|---|
| 1 intent | each shard written but the highest | what to write; nothing else commits | undone |
| 2 point | the highest shard written | it is written; a mark names the intents' shards | done |
| 3 settle | each shard of an intent | what was kept is written | done |
| 4 forget | the highest shard written | the mark is gone | |

Who meets an intent looks for the mark. Found, it does steps 3 and 4. Else it waits for PATIENCE_S
after the intent was made, then marks the commit as undone, whereupon its commit point is refused
for ever, and removes the intent. Namespaces are made and removed so: the root's entry is shard
0's, the rest the namespace's own.

What such a commit read of shards that it does not write was so just before its first step, not
with the commit point.
"""

import secrets
from collections.abc import Mapping
from typing import Any, Final

import trio

from kvfs.base.errors import Unavailable
from kvfs.meta.redis import scripts
from kvfs.meta.redis.connecting import Server
from kvfs.meta.redis.scripts import Changes, Item, commit_arguments

PATIENCE_S: Final = 1.0
"""How long whoever made an intent may take to go on."""
_PAUSE_S: Final = 0.01


class Committer:
    """Sends commits, each under a number that grows."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.engine = secrets.token_hex(8).encode()
        self._number = 0

    async def send(
        self,
        kind: bytes,
        shard: int,
        changes: Changes,
        expected: bytes,
        end: float,
        of: tuple[bytes, bytes] = (b"", b""),
    ) -> tuple[list[Any], bytes]:
        """What COMMIT answers, and the token that stands for it when it is done. `of`: a commit of
        several shards, and what its kind needs. Raises Unavailable: then it may be done or not."""
        self._number += 1
        number = self._number
        head: list[Item] = [self.engine, number, expected, kind, *of]
        arguments = [*head, *commit_arguments(changes)]
        answer = await self._server.script(scripts.COMMIT, shard, arguments, end)
        assert answer[0] != b"late", "a shard is sent one commit at a time"
        return answer, b"%b:%d" % (self.engine, number)

    async def cross(
        self, changes: Mapping[int, Changes], expected: Mapping[int, bytes], end: float
    ) -> bool:
        """Commit in several shards; False: something that was read has changed. Raises Unavailable:
        then it may be done, or be done or undone soon."""
        written = sorted(shard for shard, each in changes.items() if each.writes)
        for shard in changes.keys() - written:
            if not await self._taken(b"check", shard, changes, expected, end):
                return False
        if not written:
            return True
        *others, last = written
        commit = secrets.token_hex(8).encode()
        kept: list[int] = []
        for shard in others:
            of = (commit, b"%d" % last)
            if not await self._taken(b"intent", shard, changes, expected, end, of):
                await self._settle(commit, kept, b"undone", end)
                return False
            kept.append(shard)
        of = (commit, b",".join(b"%d" % shard for shard in kept))
        kind = b"point" if kept else b"write"
        done = await self._taken(kind, last, changes, expected, end, of)
        await self._settle(commit, kept, b"done" if done else b"undone", end)
        if done:
            await self._forget(commit, last, kept, end)
        return done

    async def resolve(self, shard: int, intent: list[Any], end: float) -> None:
        """Have a commit that another left in `shard` done or undone; wait while it may go on.
        Raises Unavailable at `end`."""
        commit, last, age_ms = intent
        forbid = age_ms >= PATIENCE_S * 1000
        arguments: list[Item] = [commit, b"undo" if forbid else b""]
        verdict = await self._server.script(scripts.DECIDE, int(last), arguments, end)
        if not verdict:
            if trio.current_time() >= end:
                raise Unavailable(
                    f"the engine {self._server.location.shown} holds an unfinished commit of"
                    " another node: try again"
                )
            await trio.sleep(_PAUSE_S)
            return
        await self._settle(commit, [shard], verdict, end)
        if verdict == b"done":
            await self._forget(commit, int(last), [shard], end)

    async def _taken(
        self,
        kind: bytes,
        shard: int,
        changes: Mapping[int, Changes],
        expected: Mapping[int, bytes],
        end: float,
        of: tuple[bytes, bytes] = (b"", b""),
    ) -> bool:
        """One shard's part; False: conflict."""
        while True:
            answer, _ = await self.send(kind, shard, changes[shard], expected[shard], end, of)
            if answer[0] != b"busy":
                return answer[0] in (b"done", b"again")
            await self.resolve(shard, answer[1], end)

    async def _settle(self, commit: bytes, shards: list[int], verdict: bytes, end: float) -> None:
        for shard in shards:
            await self._server.script(scripts.SETTLE, shard, [commit, verdict], end)

    async def _forget(self, commit: bytes, last: int, shards: list[int], end: float) -> None:
        for shard in shards:
            await self._server.script(scripts.FORGET, last, [commit, b"%d" % shard], end)
