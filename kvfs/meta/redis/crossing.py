"""Commits of several shards, all or nothing, even if their maker dies on the way. No I/O:
generators yield requests to shards, and are sent the answers.

| step | in | leaves there | without a next step |
|---|---|---|---|
| 1 intent | each shard written but the highest | what to write; nothing else commits | undone |
| 2 point | the highest shard written | it is written; a mark names the intents' shards | done |
| 3 settle | each shard of an intent | the kept writes are written | done |
| 4 forget | the highest shard written | the mark is gone | |

A process that meets an intent looks for the mark. If it is there, the process does steps 3 and 4.
Else it waits for PATIENCE_S after the intent was made, then marks the commit as undone, whereupon
its commit point is refused for ever, and removes the intent.

Values that such a commit read of shards that it does not write were valid just before its first
step, not with the commit point.

Nodes have one log today, in one shard, and commit there (`kvfs.meta.redis.log`). This is the
protocol for a log of each namespace.
"""

import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from kvfs.meta.redis.crossing_scripts import COMMIT, DECIDE, FORGET, PENDING, SETTLE
from kvfs.meta.redis.scripts import Item, Pair, Script, digest

T = TypeVar("T")
PATIENCE_S: Final = 1.0
"""Time that the maker of an intent may take to go on."""
NOWHERE: Final = b"?"
"""No commit's token: everything read is compared."""


class ShardChanges(NamedTuple):
    """The checks and writes of a commit in one shard."""

    reads: Sequence[tuple[bytes, bytes | None]]
    scans: Sequence[tuple[bytes, bytes, Sequence[Pair]]]
    """Start, end, and the pairs between them."""
    puts: Sequence[Pair]
    deletes: Sequence[bytes]

    @property
    def is_written(self) -> bool:
        return bool(self.puts or self.deletes)


class ShardRequest(NamedTuple):
    """A request to a shard: its answer is sent to the generator."""

    shard: int
    script: Script
    arguments: Sequence[Item]


class Pause(NamedTuple):
    """Another process may go on: to be resumed a moment later."""


Steps = Generator[ShardRequest | Pause, Any, T]


class Committer:
    """Commits under numbers that grow. A shard is sent one at a time, so that a commit whose answer
    was lost is recognized by its number when it is sent again."""

    def __init__(self) -> None:
        self.engine = secrets.token_hex(8).encode()
        self._number = 0

    def commit(
        self, changes: Mapping[int, ShardChanges], expected: Mapping[int, bytes]
    ) -> Steps[bool]:
        """Commits in all these shards; False: something that was read has changed. `expected`: the
        token at which each shard was read, or NOWHERE. Left in the middle: those who meet it do or
        undo it."""
        written = sorted(shard for shard, each in changes.items() if each.is_written)
        for shard in changes.keys() - written:
            if not (yield from self._taken(b"check", shard, changes, expected)):
                return False
        if not written:
            return True
        *others, last = written
        commit = secrets.token_hex(8).encode()
        kept: list[int] = []
        for shard in others:
            of = (commit, b"%d" % last)
            if not (yield from self._taken(b"intent", shard, changes, expected, of)):
                yield from _settle(commit, kept, b"undone")
                return False
            kept.append(shard)
        of = (commit, b",".join(b"%d" % shard for shard in kept))
        kind = b"point" if kept else b"write"
        done = yield from self._taken(kind, last, changes, expected, of)
        yield from _settle(commit, kept, b"done" if done else b"undone")
        if done:
            yield from _forget(commit, last, kept)
        return done

    def _taken(
        self,
        kind: bytes,
        shard: int,
        changes: Mapping[int, ShardChanges],
        expected: Mapping[int, bytes],
        of: tuple[bytes, bytes] = (b"", b""),
    ) -> Steps[bool]:
        """Does one shard's part; False: conflict. `of`: the commit, and what its kind needs."""
        while True:
            self._number += 1
            head: list[Item] = [self.engine, self._number, expected[shard], kind, *of]
            answer = yield ShardRequest(shard, COMMIT, [*head, *commit_arguments(changes[shard])])
            assert answer[0] != b"late", "a shard is sent one commit at a time"
            if answer[0] != b"busy":
                return answer[0] in (b"done", b"again")
            yield from _resolve(shard, answer[1])


def resolve(shard: int) -> Steps[None]:
    """Does or undoes what others left in `shard`, so that it can be read; waits while they may go
    on."""
    while intent := (yield ShardRequest(shard, PENDING, ())):
        yield from _resolve(shard, intent)


def commit_arguments(changes: ShardChanges) -> list[Item]:
    """Returns COMMIT's lists."""
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


def _resolve(shard: int, intent: Sequence[Any]) -> Steps[None]:
    commit, last, age_ms = intent
    forbid = age_ms >= PATIENCE_S * 1000
    verdict = yield ShardRequest(int(last), DECIDE, (commit, b"undo" if forbid else b""))
    if not verdict:
        yield Pause()
        return
    yield from _settle(commit, [shard], verdict)
    if verdict == b"done":
        yield from _forget(commit, int(last), [shard])


def _settle(commit: bytes, shards: Sequence[int], verdict: bytes) -> Steps[None]:
    for shard in shards:
        yield ShardRequest(shard, SETTLE, (commit, verdict))


def _forget(commit: bytes, last: int, shards: Sequence[int]) -> Steps[None]:
    for shard in shards:
        yield ShardRequest(last, FORGET, (commit, b"%d" % shard))


def _counted(items: Iterable[bytes]) -> list[Item]:
    listed = list(items)
    return [len(listed), *listed]
