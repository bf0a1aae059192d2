"""Names that were removed, of namespaces that are kept by their nodes: so that no copy of another
node brings them back.

A tombstone has the time of the removal, which is later than the last change of what it removed,
and hides every copy of the name that was changed last before it. The time is by the clock of files'
times: so what is written after it, wherever that is, counts as no earlier. Who writes the name anew
renews it: the copy that is made then says which removal it came after, and is told with that; so it
counts even where the clock of its host is late.

A host's clock may be hours ahead. So of a time that lies in the future only a minute is believed:
a tombstone hides what was changed up to a minute after it came here, and in any case what it
removed, and any earlier copy (`least_ns`). Days pass by the clock that all nodes have in common, so
that a host whose own is wrong refuses no removals of others, nor they its own.

| event | tombstone here | copy here |
|---|---|---|
| a name is removed by users, or renamed | made: the later of now and its last change | goes |
| a file leaves a name that no other node can know | none | goes |
| the name is written here | renewed | stays, and is told with that |
| a tombstone comes | the latest counts | goes, unless it is newer, or renews that removal |
| another node tells of one | renewed, if it renews it or is newer | taken over then; else a miss |
| a file is evicted or lost | none: it is no removal | goes here alone |
| a day has passed | dropped | - |

Invariants
- The tombstones of all nodes become the same: of one name the latest removal counts everywhere.
- One that was made here is in the commit of its removal (`write`, `written`).
- One that came is kept in the file (`keep`) after the copy here has gone: a node that was killed
  between finds that it lacks one, and asks for it.
- What cannot be written now (the disk is full) counts all the same, and is written later (`save`).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

from kvfs.base.clock import file_time_ns
from kvfs.base.errors import KvfsError
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

HOUR_NS: Final = 3600 * 1_000_000_000
KEPT_NS: Final = 24 * HOUR_NS
AHEAD_NS: Final = 60 * 1_000_000_000
"""How far ahead of this host's clock the time of a removal is believed."""
MOST: Final = 1 << 20
"""Tombstones that are kept; more make the oldest go before their day has passed."""
_HEARD_EVERY_NS: Final = 60_000_000_000
_HEARD: Final = b"\xff~h"
_STONE: Final = b"\xff~r"
"""Keys in the unnamed database, beyond every key of the metadata."""
_DIRECTORY: Final = b"/\0"
"""The end of the paths of directories, which no file's path has."""


class Tombstone(msgspec.Struct, array_like=True, frozen=True):
    """A removal of a name."""

    namespace_id: int
    path: bytes
    removed_ns: int
    """Time of the removal, by the clock of the host where it happened, or later."""
    origin: int
    """The node where it happened."""
    least_ns: int = 0
    """A moment after the last change of what was removed, and after the removal that this renewed:
    what a right clock could not have been behind; 0: not known."""

    @property
    def name(self) -> tuple[int, bytes]:
        return self.namespace_id, self.path

    @property
    def sum(self) -> int:
        """64 bits of it, for the comparison of sets."""
        fields = self.namespace_id, self.path, self.removed_ns, self.origin
        return xxhash.xxh3_64_intdigest(_encode(fields))

    def reach_ns(self, now_ns: int) -> int:
        """Returns up to which change it hides a copy, where it has become known now."""
        if not self.least_ns:
            return self.removed_ns
        return min(self.removed_ns, max(self.least_ns, now_ns + AHEAD_NS))


class _Heard(NamedTuple):
    """A moment by both clocks."""

    cluster_ns: int
    own_ns: int


class _Kept(msgspec.Struct, array_like=True):
    """A tombstone as the file has it."""

    stone: Tombstone
    renewed_ns: int
    reach_ns: int = 0
    """0: it is all believed."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Kept).decode


def is_hidden(reach_ns: int, changed_ns: int, renews_ns: int) -> bool:
    """Returns whether a removal that reaches so far hides a copy (`Tombstones.hides`). Not one of
    the same time: the clock stands still for milliseconds, and a write is not to be lost."""
    return reach_ns > max(changed_ns, renews_ns)


class Tombstones:
    """The tombstones that one node knows; for the event loop."""

    def __init__(
        self,
        local: EmbeddedEngine,
        clock_ns: Callable[[], int] = file_time_ns,
        *,
        cluster_ns: Callable[[], int] | None = None,
    ) -> None:
        """`clock_ns`: this host's clock. `cluster_ns`: that of all nodes, where it is another one.
        Raises Unavailable, Corrupt."""
        self._local = local
        self._clock_ns = clock_ns
        self._cluster_ns = cluster_ns or clock_ns
        self._stones: OrderedDict[tuple[int, bytes], Tombstone] = OrderedDict()
        self._renewed: dict[tuple[int, bytes], int] = {}
        """The removals after which a name was written anew."""
        self._reach: dict[tuple[int, bytes], int] = {}
        """How far removals reach whose time is not all believed."""
        self._sums: dict[int, dict[int, tuple[int, int]]] = {}
        """Number and sum of the tombstones of each origin, by the hour of the removal."""
        self._unwritten: dict[bytes, bytes | None] = {}
        """Changes that the file lacks yet, by key; None: a tombstone that was dropped."""
        self.on_news: Callable[[Tombstone], object] = lambda _stone: None
        """Told of each that is known from now on."""
        self._heard: _Heard | None = None
        """When another node was heard last, as far as is remembered; None: never."""
        self._heard_written_ns = 0
        """The same, as the file has it."""
        local.read_now(self._load)

    def __len__(self) -> int:
        return len(self._stones)

    def __contains__(self, name: tuple[int, bytes]) -> bool:
        return name in self._stones

    def hides(self, namespace_id: int, path: bytes, changed_ns: int, renews_ns: int = 0) -> bool:
        """Returns whether a copy that was changed last at that time is one that was removed.
        `renews_ns`: the removal after which it was written."""
        stone = self._stones.get((namespace_id, path))
        return stone is not None and is_hidden(self.reach_ns(stone), changed_ns, renews_ns)

    def reach_ns(self, stone: Tombstone) -> int:
        """Returns up to which change a tombstone that is known hides copies."""
        return self._reach.get(stone.name, stone.removed_ns)

    def renews(self, namespace_id: int, path: bytes) -> int:
        """Returns the time of the removal that the copy here came after; 0: none is known."""
        return self._renewed.get((namespace_id, path), 0)

    def now_ns(self) -> int:
        """Returns the time of a removal: this host's, but never one by which its day is over soon,
        however late the clock is."""
        return max(self._clock_ns(), self._cluster_ns() - KEPT_NS // 2)

    def removed(self, names: Iterable[tuple[int, bytes, int]], origin: int) -> list[Tombstone]:
        """Returns the tombstones of names (namespace, path, time of the last change) that are
        removed here; none for what was removed before."""
        now = self.now_ns()
        made: dict[tuple[int, bytes], Tombstone] = {}
        for namespace_id, path, changed_ns in names:
            renews_ns = self.renews(namespace_id, path)
            if not self.hides(namespace_id, path, changed_ns, renews_ns):
                earlier = self._stones.get((namespace_id, path))
                least = max(changed_ns, renews_ns) + 1
                latest = max(now, least, earlier.removed_ns + 1 if earlier else 0)
                made[namespace_id, path] = Tombstone(namespace_id, path, latest, origin, least)
        return list(made.values())

    def renewed(self, names: Iterable[tuple[int, bytes]]) -> list[Tombstone]:
        """Returns the tombstones of names that are written anew."""
        return [stone for name in names if (stone := self._stones.get(name)) is not None]

    def write(
        self, t: Transaction, made: Iterable[Tombstone], renewed: Iterable[Tombstone]
    ) -> None:
        """Writes tombstones that were made, or renewed, in the commit that did so."""
        now = self._clock_ns()
        for each in made:
            t.put(_key(each.name), _packed(each, self.renews(*each.name), each.reach_ns(now)))
        for each in renewed:
            t.put(_key(each.name), _packed(each, each.removed_ns, self.reach_ns(each)))

    def written(self, made: Iterable[Tombstone], renewed: Iterable[Tombstone]) -> None:
        """Notes that what `write` wrote is committed."""
        now = self._clock_ns()
        for each in made:
            self._put(each, each.reach_ns(now))
            self._unwritten.pop(_key(each.name), None)
        for each in renewed:
            self._renewed[each.name] = each.removed_ns
            self._unwritten.pop(_key(each.name), None)
        self._write([], self._drop_surplus())

    def is_news(self, stone: Tombstone) -> bool:
        """Returns whether a tombstone is later than what is known of its name, and its day has not
        passed."""
        if stone.removed_ns <= self._cluster_ns() - KEPT_NS:
            return False
        known = self._stones.get(stone.name)
        if known is None:
            return True
        return (stone.removed_ns, stone.origin) > (known.removed_ns, known.origin)

    def take(self, stones: Iterable[Tombstone]) -> list[Tombstone]:
        """Takes those that are news, and returns them: they hide copies from now on. Once these
        have gone, `keep` them; otherwise `forget` them."""
        news, now = [each for each in stones if self.is_news(each)], self._clock_ns()
        for each in news:
            self._put(each, each.reach_ns(now))
        return news

    def keep(self, stones: Sequence[Tombstone]) -> None:
        """Keeps in the file what was taken."""
        self._write(stones, self._drop_surplus())

    def forget(self, stones: Iterable[Tombstone]) -> None:
        """Forgets what was taken and is not kept: it is asked for again."""
        for each in stones:
            if self._stones.get(each.name) == each:
                self._drop(each.name)

    def renew(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Notes that these names were written anew, as a copy tells, elsewhere."""
        renewed = self.renewed(names)
        for each in renewed:
            self._renewed[each.name] = each.removed_ns
        self._write(renewed, [])

    def expire(self) -> None:
        """Drops those whose day has passed."""
        oldest = self._cluster_ns() - KEPT_NS
        old = [name for name, each in self._stones.items() if each.removed_ns <= oldest]
        self._write([], [self._drop(name) for name in old])

    def save(self) -> None:
        """Writes what could not be written before. Raises what `transact_now` raises."""
        if not self._unwritten:
            return
        changes = self._unwritten

        def fn(t: Transaction) -> None:
            for key, value in changes.items():
                if value is None:
                    t.delete(key)
                else:
                    t.put(key, value)

        self._local.transact_now(fn)
        self._unwritten = {}

    def all(self) -> list[Tombstone]:
        """Returns all of them, the earliest known first."""
        return list(self._stones.values())

    def origins(self) -> list[int]:
        """Returns the nodes that removed something."""
        return [origin for origin, hours in self._sums.items() if hours]

    def of(self, origin: int) -> list[Tombstone]:
        """Returns those of a node."""
        return [each for each in self._stones.values() if each.origin == origin]

    def compared_since(self) -> int:
        """Returns the time from which on nodes compare their tombstones: that of an hour which no
        node drops soon, whatever its clock says within an hour."""
        return ((self._cluster_ns() - KEPT_NS) // HOUR_NS + 2) * HOUR_NS

    def sum_of(self, origin: int, since_ns: int = 0) -> tuple[int, int]:
        """Returns the number of the tombstones of a node from an hour on, and a sum of them."""
        first, count, total = since_ns // HOUR_NS, 0, 0
        for hour, (its_count, its_sum) in self._sums.get(origin, {}).items():
            if hour >= first:
                count, total = count + its_count, total ^ its_sum
        return count, total

    def may_lack_some(self) -> bool:
        """Returns whether no other node was heard for so long that removals may have been missed:
        a day by both clocks, since one of them may have been set by days."""
        if self._heard is None:
            return False
        by_own = self._clock_ns() - self._heard.own_ns
        return min(by_own, self._cluster_ns() - self._heard.cluster_ns) > KEPT_NS

    def heard(self) -> None:
        """Notes that another node was heard, in the file once a minute."""
        now = self._cluster_ns()
        self._heard = _Heard(now, self._clock_ns())
        if not 0 <= now - self._heard_written_ns <= _HEARD_EVERY_NS:
            self._heard_written_ns = now
            self._unwritten[_HEARD] = b"".join(map(keys.pack_u64, self._heard))
            self._try_to_save()

    # ---- inside

    def _put(self, stone: Tombstone, reach_ns: int) -> None:
        self._drop(stone.name, is_replaced=True)
        self._stones[stone.name] = stone
        if reach_ns < stone.removed_ns:
            self._reach[stone.name] = reach_ns
        self._count(stone, 1)
        self.on_news(stone)

    def _drop_surplus(self) -> list[bytes]:
        doomed: list[bytes] = []
        while len(self._stones) > MOST:
            doomed.append(self._drop(next(iter(self._stones))))
        return doomed

    def _drop(self, name: tuple[int, bytes], *, is_replaced: bool = False) -> bytes:
        stone = self._stones.pop(name, None)
        self._reach.pop(name, None)
        if not is_replaced:
            self._renewed.pop(name, None)
        if stone is not None:
            self._count(stone, -1)
        return _key(name)

    def _count(self, stone: Tombstone, by: int) -> None:
        hours = self._sums.setdefault(stone.origin, {})
        hour = stone.removed_ns // HOUR_NS
        count, total = hours.pop(hour, (0, 0))
        if count + by:
            hours[hour] = count + by, total ^ stone.sum

    def _load(self, t: Transaction) -> None:
        if (heard := t.get(_HEARD)) is not None:
            cluster_ns = self._heard_written_ns = keys.unpack_u64(heard)
            self._heard = _Heard(cluster_ns, keys.unpack_u64(heard, len(heard) - 8))
        found = [_decode(value) for _, value in t.scan(_STONE, keys.after(_STONE))]
        for each in sorted(found, key=lambda each: each.stone.removed_ns):
            self._put(each.stone, each.reach_ns or each.stone.removed_ns)
            if each.renewed_ns:
                self._renewed[each.stone.name] = each.renewed_ns

    def _write(self, stones: Sequence[Tombstone], doomed: Sequence[bytes]) -> None:
        if not stones and not doomed:
            return
        self._unwritten.update((key, None) for key in doomed)
        for each in stones:
            if self._stones.get(each.name) == each:
                packed = _packed(each, self.renews(*each.name), self.reach_ns(each))
                self._unwritten[_key(each.name)] = packed
        self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self.save()
        except KvfsError:  # `save` is called again, and says so
            pass


def of_directory(path: bytes) -> bytes:
    """Returns what stands for a directory in place of the path of a file."""
    return path + _DIRECTORY


def directory_of(path: bytes) -> bytes | None:
    """Returns the directory that it stands for; None if it is a file's path."""
    return path.removesuffix(_DIRECTORY) if path.endswith(_DIRECTORY) else None


def _packed(stone: Tombstone, renewed_ns: int, reach_ns: int) -> bytes:
    if reach_ns == stone.removed_ns:
        return _encode((stone, renewed_ns))
    return _encode(_Kept(stone, renewed_ns, reach_ns))


def _key(name: tuple[int, bytes]) -> bytes:
    return _STONE + keys.pack_u16(name[0]) + xxhash.xxh3_128_digest(name[1])
