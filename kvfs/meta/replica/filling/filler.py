"""Reads all of a shard from its server into the metadata replica.

HSCAN gives all that is there from its beginning to its end, in no order; what comes, changes or
goes meanwhile is in the log. Its cursor means nothing to another server, nor to this one after a
restart.

| space beside the replica | how |
|---|---|
| for all of it | all is read and sorted, then compared and written in order, then the log since |
| for less | each page is compared and written, then the log; what the server lacks goes at last |

LMDB copies a page for each key that comes in no order. Nothing is read of a replica until it is
whole, so the log may come last: its values are absolute.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta import keys
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import BEGIN, ENTRIES, MISSING, LogEntry, read_entries
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.filling.staging import StagedEntries, StagedPairs

_PAGE_KEYS: Final = 2_000
_LOADED: Final = 16_384
"""Pairs that are written in one transaction, for whose time nothing else runs."""
_LISTEN_S: Final = 0.25
"""Time between two looks at the log, which is bounded, while pairs are read and written."""
_SCANNED: Final = b"0"
"""The cursor with which a scan begins, and which says that it has ended."""
_log = logging.getLogger(__name__)


class Filler:
    """The filler of one replica. `catch_up` applies all of the log, `apply` some entries of it;
    both raise Unavailable."""

    def __init__(
        self,
        applier: Applier,
        caller: RetryingClient,
        catch_up: Callable[[], Awaitable[None]],
        apply: Callable[[Sequence[LogEntry]], Awaitable[None]],
    ) -> None:
        self._applier = applier
        self._caller = caller
        self._catch_up = catch_up
        self._apply = apply

    async def fill(self, *, is_short: bool) -> None:
        """Reads all, and marks the replica as whole. `is_short`: what the server has not is dropped
        first, since there is no space for all. Raises Unavailable, NoSpace: it is to be begun
        again."""
        applier, caller = self._applier, self._caller
        position, token = await caller.script(BEGIN)
        applier.begin(int(position), token, await self._namespaces())
        if (places := applier.places()) and (gone := await caller.script(MISSING, *places)):
            applier.drop(gone)  # of which shard a key is, is known before it comes
        if is_short:
            await self._drop_missing()
            # LMDB gives the pages that a commit freed to the second one after it.
            applier.begin(int(position), token)
        try:
            await self._read_in_order()
        except NoSpace as error:  # perhaps for want of what the sorted files take
            _log.warning("metadata are read unsorted, which takes longer: %s", error)
            await self._scan(applier.fill, self._catch_up)
            await self._drop_missing(self._catch_up)
        applier.finish()

    async def _read_in_order(self) -> None:
        """Reads all, sorts it, and writes it in the order of its keys, then the log since. Raises
        NoSpace, Unavailable."""
        directory, keep = self._applier.directory, contextlib.closing
        with contextlib.ExitStack() as closing:
            pairs = closing.enter_context(keep(StagedPairs(directory, keys.PLACE)))
            entries = closing.enter_context(keep(StagedEntries(directory)))
            listener = _Listener(self._applier, self._caller, entries)

            def take(names: Sequence[bytes], values: Sequence[bytes]) -> None:
                pairs.add(names, values)
                self._applier.filled += len(names)

            await self._scan(take, listener.listen)
            pairs.end()
            await self._load(pairs, listener)
            await listener.listen_now()
            for some in entries:
                await self._apply(some)
                await trio.lowlevel.checkpoint()
        await self._catch_up()

    async def _load(self, pairs: StagedPairs, listener: "_Listener") -> None:
        """Writes the pairs: first the places of namespaces, by which is known of which shard a key
        is. Removes what the replica has and the server has not."""
        applier, after = self._applier, b""
        if pairs.early:
            applier.load(sorted(pairs.early))
        for some in pairs.sorted():
            for first in range(0, len(some), _LOADED):
                part = some[first : first + _LOADED]
                left = applier.load(part, after)
                after = part[-1][0] + b"\0"
                await self._drop_of(left)
                await listener.listen()
                await trio.lowlevel.checkpoint()
        await self._drop_missing(listener.listen, after)

    async def _scan(
        self,
        take: Callable[[Sequence[bytes], Sequence[bytes]], None],
        follow: Callable[[], Awaitable[None]],
    ) -> None:
        """Gives `take` all that the server has, a page at a time, with `follow` after each: what
        was read is as of now, so it is only whole with all that was logged since it began."""
        caller = self._caller
        connections, cursor = caller.connections, b""
        while cursor != _SCANNED:
            options = (cursor or _SCANNED, b"COUNT", _PAGE_KEYS)
            cursor, found = await caller.call(b"HSCAN", caller.values, *options)
            if caller.connections != connections:
                raise Unavailable("the engine's server changed while all metadata were read")
            take(found[::2], found[1::2])
            await follow()

    async def _namespaces(self) -> list[tuple[bytes, bytes]]:
        """Returns the records of all namespaces that the server has: which keys of them are this
        node's own is known before these come."""
        if self._applier.shard != TOP:
            return []
        caller, found = self._caller, list[tuple[bytes, bytes]]()
        counter = await caller.call(b"HGET", caller.values, keys.counter(0))
        following = 0 if counter is None else keys.unpack_u64(counter)
        for first in range(1, following, _PAGE_KEYS):
            names = [keys.namespace(i) for i in range(first, min(first + _PAGE_KEYS, following))]
            values = await caller.call(b"HMGET", caller.values, *names)
            found += [pair for pair in zip(names, values, strict=True) if pair[1] is not None]
        return found

    async def _drop_missing(
        self, follow: Callable[[], Awaitable[None]] | None = None, start: bytes = b""
    ) -> None:
        """Removes what the replica has, from `start` on, and the server has not: of before, and
        what went while it was read, of which the log may reach back no more. `follow` is run after
        each page; None: the log is not to be applied meanwhile, there may be no space."""
        names = self._applier.names(start, _PAGE_KEYS)
        while names:
            await self._drop_of(names)
            if follow is not None:
                await follow()
            self._applier.filled += len(names)
            names = self._applier.names(names[-1] + b"\0", _PAGE_KEYS)

    async def _drop_of(self, names: Sequence[bytes]) -> None:
        """Removes those of some keys that the server has not."""
        for first in range(0, len(names), _PAGE_KEYS):
            some = names[first : first + _PAGE_KEYS]
            self._applier.drop(await self._caller.script(MISSING, *some))


class _Listener:
    """Keeps the entries of the log from where the replica stands, to be applied later."""

    def __init__(self, applier: Applier, caller: RetryingClient, kept: StagedEntries) -> None:
        self._applier = applier
        self._caller = caller
        self._kept = kept
        self._begun = mark = applier.mark
        self._last = mark.position, mark.token
        self._heard_at = trio.current_time()

    async def listen(self) -> None:
        """Does `listen_now` if it was not done for a while. Raises what that raises."""
        if trio.current_time() - self._heard_at >= _LISTEN_S:
            await self.listen_now()

    async def listen_now(self) -> None:
        """Returns when it has all entries that are there. Raises Unavailable if some are there no
        more, or somebody else has applied some: all is to be read again; NoSpace."""
        caller, is_all = self._caller, False
        while not is_all:
            if self._applier.mark is not self._begun:
                raise Unavailable("the metadata replica is being read anew: try again")
            options = (b"COUNT", ENTRIES, b"STREAMS", caller.log)
            found = await caller.call(b"XREAD", *options, b"%d-0" % self._last[0])
            entries = read_entries(found[0][1]) if found else []
            self._heard_at, is_all = trio.current_time(), len(entries) < ENTRIES
            if entries:
                self._take(entries)

    def _take(self, entries: Sequence[LogEntry]) -> None:
        first, last = entries[0], entries[-1]
        if (first.number, first.before) != (self._last[0] + 1, self._last[1]):
            raise Unavailable("the engine's log does not reach back: all metadata are read again")
        self._kept.add(entries)
        self._last = last.number, last.token
