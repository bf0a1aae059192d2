"""Writes the log's entries into the metadata replica.

Invariants
- Entries are applied whole, in their order, each once; with them, in the same commit, goes the mark
  that says how far the replica has come.
- Entries applied to a replica that is not whole may be of keys that were not read yet.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import chain, groupby, islice, takewhile
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec
import trio

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.lmdb_transactions import WriteTransaction
from kvfs.meta.merge_operators import MERGED
from kvfs.meta.redis.log import LogEntry, Writes
from kvfs.meta.redis.scripts import TOP
from kvfs.meta.replica.local_namespaces import LocalNamespaces
from kvfs.meta.replica.local_writes import LocalWrites
from kvfs.meta.replica.replica_mark import ReplicaMark, drop_mark, read_mark, write_mark
from kvfs.meta.shards.shard_map import OWN, ShardMap, position_of, space_of

_NAMESPACE = keys.NAMESPACE[0]
_PLACE = keys.PLACE[0]
_NOTED = frozenset((_NAMESPACE, _PLACE))
"""First bytes of the keys that are taken notice of."""
_PAGE_KEYS: Final = 10_000
_END = b"\xff"
"""Beyond every key of the metadata."""


_made: Final = tuple.__new__
"""Makes a named tuple without a call of Python for each key."""


class Applied(NamedTuple):
    """A key that another process changed."""

    key: bytes
    old: bytes | None
    new: bytes | None


class Applier:
    """The applier of one replica. `is_ours`: whether a token is that of a commit which this node is
    making just now, so that it need not be told."""

    def __init__(
        self,
        local: EmbeddedEngine,
        mark: ReplicaMark,
        is_ours: Callable[[bytes], bool],
        on_applied: Callable[[Sequence[Applied]], None],
        privates: LocalWrites,
        locals_: LocalNamespaces,
        shards: ShardMap,
        shard: int = TOP,
        on_filled: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_applied` is told what others changed; `on_filled`, that more may have changed than it
        was told."""
        self._on_filled = on_filled
        self._shards = shards
        self.shard = shard
        self._local = local
        self._privates = privates
        self._locals = locals_
        self._layer = locals_.layer
        self._is_ours = is_ours
        self._on_applied = on_applied
        self.mark = mark
        self._answered = trio.lowlevel.ParkingLot()
        self._is_ended = False
        self.filled = 0
        """Pairs that were filled in since the start, looked at or written, and keys that
        were compared."""
        self.brought_back: set[int] = set()
        """The namespaces that may come back from shards of their own: all that they had is here."""
        self.is_overtaken = False
        """Whether one came back of which not all is here: all is to be read anew."""
        self.refusal: str | None = None
        """The reason why the local file did not take the log's entries, the last time."""
        self.is_short = False
        """Whether that was a lack of space."""

    @property
    def directory(self) -> Path:
        """The directory of the replica's file."""
        return self._local.path

    def follows(self, entries: Sequence[LogEntry]) -> bool:
        """Returns whether entries, of which some may be applied already, continue the applied
        ones."""
        new = [each for each in entries if each.number > self.mark.position]
        return not new or (
            new[0].number == self.mark.position + 1 and new[0].before == self.mark.token
        )

    def returning(self, entries: Sequence[LogEntry]) -> set[int]:
        """Returns the namespaces that come back from shards of their own by new entries."""
        spaces = self._shards.spaces
        if self.shard != TOP or not spaces:
            return set()
        return {
            keys.unpack_node(key[1:])
            for each in entries
            if each.number > self.mark.position
            for writes in each.writes
            for key, value in _pairs(writes)
            if key[0] == _PLACE and value is None and key[1:] in spaces
        }

    async def has_or_makes(self, position: int, token: bytes) -> bool:
        """Returns whether the replica holds the entry of this position, or the request under way
        made it, which has this token; its answer, or the log's, is waited for."""
        while self.mark.position < position and self._is_ours(token):
            await self._answered.park()
        return self.mark.position >= position

    async def until_woken(self) -> None:
        """Returns at the next `wake_waiting`."""
        await self._answered.park()

    def wake_waiting(self) -> None:
        """Wakes those who wait for what the request under way did: it is here, or it failed."""
        self._answered.unpark_all()

    def apply(self, entries: Sequence[LogEntry]) -> bool:
        """Applies the new entries, which must follow; returns whether there were any. Raises
        NoSpace, Unavailable, Corrupt of the local file."""
        new = [each for each in entries if each.number > self.mark.position]
        if not new:
            return False
        if self.shard == TOP and self._shards.spaces:
            back = set[bytes]()
            new = [each._replace(writes=self._of_top(each.writes, back)) for each in new]
        last = new[-1]
        mark = msgspec.structs.replace(self.mark, position=last.number, token=last.token)
        told: list[Applied] = []

        def fn(t: Transaction) -> None:
            assert isinstance(t, WriteTransaction), "it writes"
            gone: dict[bytes, bytes] = {}
            for is_ours, group in groupby(new, lambda each: self._is_ours(each.token)):
                entries = [each.writes for each in group]
                self._apply(t, entries, None if is_ours else told, gone)
            told.extend(Applied(key, old, t.get(key)) for key, old in gone.items())
            write_mark(t, _unfilled(mark) if self.is_overtaken else mark, self.shard)

        self._commit(fn, mark)
        if self.is_overtaken:
            self.mark = _unfilled(mark)
        if told:
            self._on_applied(told)
        return True

    def _of_top(self, writes: list[Writes], back: set[bytes]) -> list[Writes]:
        """Returns an entry of TOP without what a namespace began with (`intention`), where its own
        log has brought more since. `back`: the namespaces that came back by entries before it."""
        names = [key for each in writes for key in each[::2] if key]
        shards = {self._shards.shard_of(key) for key in names} - {TOP}
        if any(self._shards.is_followed(shard) for shard in shards):
            writes = [
                [part for pair in _pairs(each) if not self._is_past(pair[0], back) for part in pair]
                for each in writes
            ]
        for key, value in chain.from_iterable(map(_pairs, writes)):
            if key[0] == _PLACE and value is None:
                back.add(key[1:])
        return writes

    def _is_past(self, key: bytes, back: set[bytes]) -> bool:
        return self._shards.is_followed(self._shards.shard_of(key)) and space_of(key) not in back

    def begin(
        self, position: int, token: bytes, records: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Begins to read the replica anew, as of this entry or later. `records`: those of all
        namespaces, where it is the shard that has them."""
        self._locals.forget_records()
        self.is_overtaken = False
        mark = msgspec.structs.replace(self.mark, position=position, token=token, filled=b"")

        def fn(t: Transaction) -> None:
            if self.shard == TOP:
                self._locals.begin_anew(t, records)
            write_mark(t, mark, self.shard)

        self._commit(fn, mark)

    def fill(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Fills in pairs that the server has."""

        def fn(t: Transaction) -> None:
            for key, value in zip(names, values, strict=True):
                if key >= _END or not self._shards.may_have(self.shard, key):
                    continue
                if self._is_kept(t, key):
                    continue
                if self._layer.stages and self._layer.is_above(key):
                    self._layer.put(t, key, value)
                    continue
                if t.get(key) != value or key in self._privates.owners:
                    self._note(t, key, value)
                    self._privates.settle(t, (key, value), {})
                    self._privates.put(t, key, value)

        self._commit(fn, self.mark)
        self.filled += len(names)

    def load(self, pairs: Sequence[tuple[bytes, bytes]], start: bytes | None = None) -> list[bytes]:
        """Fills in pairs that the server has, in the order of their keys. Returns the keys from
        `start` to the last of them that the replica has beside them; None: they do not matter."""
        end, left = pairs[-1][0] + b"\0", list[bytes]()
        if start is not None:
            left = self._besides(pairs, start, end)
        if self._privates.groups or self._layer.stages:
            self._fill_in(pairs)
            return left
        own = self._locals.local_key
        if own is not None:
            self._fill_in([pair for pair in pairs if own(pair[0])])
            pairs = [pair for pair in pairs if not own(pair[0])]
        if self.shard != TOP or self._shards.spaces:
            may_have = self._shards.may_have
            pairs = [pair for pair in pairs if may_have(self.shard, pair[0])]
        pairs = pairs[: bisect_left(pairs, (_END,))]

        def fn(t: Transaction) -> None:
            assert isinstance(t, WriteTransaction), "it writes"
            names = [key for key, _ in pairs]
            self._note_among(t, names, dict(pairs))
            before = zip(pairs, t.get_many(names), strict=True)
            new = [pair for pair, old in before if pair[1] != old]
            # LMDB halves a page that overflows, so what comes in order leaves all of them half
            # empty; three of five keys, and then the others, leave them almost full.
            t.put_many([pair for at, pair in enumerate(new) if at % 5 < 3])
            t.put_many([pair for at, pair in enumerate(new) if at % 5 >= 3])

        self._commit(fn, self.mark)
        self.filled += len(pairs)
        return left

    def _besides(
        self, pairs: Sequence[tuple[bytes, bytes]], start: bytes, end: bytes
    ) -> list[bytes]:
        """Returns the keys from `start` on, before `end`, that the server may have beside these."""
        names = {key for key, _ in pairs}
        left: list[bytes] = []
        while found := self.names(start, _PAGE_KEYS, end):
            left += (key for key in found if key not in names)
            start = found[-1] + b"\0"
        return left

    def _fill_in(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self.fill([key for key, _ in pairs], [value for _, value in pairs])

    def names(self, start: bytes, limit: int, end: bytes = _END) -> list[bytes]:
        """Returns the first keys from `start` on, before `end`, that the server may have."""

        def fn(t: Transaction) -> list[bytes]:
            is_local = self._locals.is_local
            there: Iterator[bytes] = (
                key
                for key in self._shards.names(t, self.shard, start, end)
                if not (self._privates.is_new(key) or is_local(key))
            )
            if self.shard == TOP:
                above = takewhile(lambda key: key < end, self._layer.names(t, start))
                there = merge(there, above)
            return list(islice(there, limit))

        return self._local.read_now(fn)

    def places(self) -> list[bytes]:
        """Returns the places of namespaces, of TOP, that the server may have."""
        return self._shards.places() if self.shard == TOP else []

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes keys that the server has not."""
        is_overtaken = self.is_overtaken

        def fn(t: Transaction) -> None:
            for key in names:
                self._note(t, key, None)
                if self._layer.stages and self._layer.is_above(key):
                    self._layer.put(t, key, None)
                else:
                    self._privates.put(t, key, None)

        self._commit(fn, self.mark)
        self.is_overtaken = is_overtaken  # places that are missing belong to what is read

    def finish(self) -> None:
        """Marks it as whole."""
        mark = msgspec.structs.replace(self.mark, filled=None)

        def fn(t: Transaction) -> None:
            # Groups that ended while it was filled may have merged into keys that came before.
            for key, value in list(self._privates.shadows.items()):
                self._privates.put(t, key, value)
            if self.shard == TOP:  # which has their records, that it may not have whole before
                self._locals.note_all(t)
            write_mark(t, mark, self.shard)

        self._commit(fn, mark)
        self._on_filled()

    def end(self) -> None:
        """Applies nothing from now on, whatever is on its way: others may write what it wrote."""
        self._is_ended = True

    def _commit(self, fn: Callable[[Transaction], None], mark: ReplicaMark) -> None:
        if self._is_ended:
            raise Unavailable("the namespace is followed no more: try again")
        try:
            self._local.transact_now(fn)
        except BaseException as error:
            self._privates.load()
            self._locals.load()
            self.refusal, self.is_short = str(error), isinstance(error, NoSpace)
            raise
        if mark.filled is None:  # else it is not known yet whether all finds space
            self.refusal, self.is_short = None, False
        self.mark = mark
        self.wake_waiting()

    def _apply(
        self,
        t: WriteTransaction,
        entries: Sequence[list[Writes]],
        told: list[Applied] | None,
        gone: dict[bytes, bytes],
    ) -> None:
        """Writes entries: together what is nobody's here. Each change of a key is told, but of what
        is merged; names that this node alone had given and that end with it are added to `gone`."""
        owners, together = self._privates.owners, dict[bytes, bytes | None]()
        for writes in chain.from_iterable(entries):
            names = [key for key in writes[::2] if key is not None]
            is_private = not owners.keys().isdisjoint(names)
            is_again = not together.keys().isdisjoint(names) and names[0][0] not in MERGED
            if is_private or is_again:
                self._write_all(t, together, told)
                together.clear()
            if is_private:
                was_private = self._privates.settle(t, writes, gone, is_ours=told is None)
                self._write(t, writes, told, is_there=was_private)
            else:
                together.update(_pairs(writes))
        self._write_all(t, together, told)

    def _write_all(
        self,
        t: WriteTransaction,
        written: dict[bytes, bytes | None],
        told: list[Applied] | None,
    ) -> None:
        """Writes keys of which none is a private group's."""
        names = sorted(written)
        self._note_among(t, names, written)
        if self._layer.stages:
            above = {key for key in names if self._layer.is_above(key)}
            for key in above:
                self._layer.put(t, key, written.pop(key))
            names = [key for key in names if key not in above]
        if told is not None:
            before = zip(names, t.get_many(names), strict=True)
            told += [
                _made(Applied, (key, old, new))
                for key, old in before
                if (new := written[key]) != old
            ]
        for key in self._privates.shadows.keys() & written.keys():
            self._privates.put(t, key, written.pop(key))
            names.remove(key)
        for key in names:
            if written[key] is None:
                t.delete(key)
        t.put_many([(key, value) for key in names if (value := written[key]) is not None])

    def _write(
        self,
        t: Transaction,
        writes: Writes,
        told: list[Applied] | None,
        *,
        is_there: bool,
    ) -> None:
        """Writes pairs. `is_there`: most of them are as they are here already, and a look costs
        less than a write."""
        for key, value in _pairs(writes):
            if key[0] in _NOTED:
                self._note(t, key, value)
            if self._layer.stages and self._layer.is_above(key):
                self._layer.put(t, key, value)
                continue
            if told is not None:
                old = t.get(key)
                if old != value:
                    told.append(Applied(key, old, value))
            if not is_there or t.get(key) != value or key in self._privates.shadows:
                self._privates.put(t, key, value)

    def _note_among(
        self, t: Transaction, names: Sequence[bytes], written: Mapping[bytes, bytes | None]
    ) -> None:
        for kind in (keys.PLACE, keys.NAMESPACE):
            for key in islice(names, bisect_left(names, kind), None):
                if key[0] != kind[0]:
                    break
                self._note(t, key, written[key])

    def _note(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        """Takes notice of a namespace's place, or record; of a record, while the replica is read
        anew, only when it is whole: until then its keys are the server's, whatever the node had of
        them before."""
        if key[0] == _PLACE:
            self._note_place(t, key, value)
        elif key[0] != _NAMESPACE:
            return
        elif self.mark.filled is None:
            self._locals.note(t, key, value)
        elif value is not None:
            self._locals.note_filling(t, key, value)
        else:
            self._locals.forget_records()

    def _note_place(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        space, shard = key[1:], keys.unpack_node(key[1:])
        is_moved = value == OWN and space in self._shards.shut
        if value is None and shard != TOP:
            is_back = self.mark.filled is not None or space in self._shards.spaces
            if is_back and shard not in self.brought_back:
                self.is_overtaken = True
            drop_mark(t, shard)
            self._shards.kept.discard(space)
        elif is_moved and self.mark.filled is None and read_mark(t, shard) is None:
            # All that it has was here when its own log began, unless it had come back unheard.
            filled = b"" if self.is_overtaken else None
            begun = {"position": position_of(t.get(key)), "token": b"", "filled": filled}
            write_mark(t, msgspec.structs.replace(self.mark, **begun), shard)
            self._shards.kept.add(space)
        self._shards.note(key, value)

    def _is_kept(self, t: Transaction, key: bytes) -> bool:
        """Returns whether the replica's own value of a key counts, not the server's."""
        return (
            self._locals.is_local(key)
            and t.get(key) is not None
            and not (self._layer.stages and self._layer.is_above(key))
        )


def _unfilled(mark: ReplicaMark) -> ReplicaMark:
    """Returns the mark of a replica that is to be read anew."""
    return msgspec.structs.replace(mark, filled=b"")


def _pairs(writes: Writes) -> Iterator[tuple[bytes, bytes | None]]:
    """Returns the keys with their values."""
    each = iter(writes)
    return cast("Iterator[tuple[bytes, bytes | None]]", zip(each, each, strict=True))
