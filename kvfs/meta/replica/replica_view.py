"""A transaction that is run on a metadata replica, to be proposed. No I/O but reading the replica.

It remembers the values and ranges that it read, which the server finds unchanged or refuses it. It
has not read the keys that it merges into.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import GatheredWrites
from kvfs.meta.merge_operators import MERGED, merged
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import Pair, digest
from kvfs.meta.replica.local_namespaces import Mixed, check_shared

Settle = Callable[[Transaction, int, float], bool]
"""Ensures that the name of a file that is to be known leads to it, and that its directory is there;
told when it was published here, as a group has it. Returns False if it lost its place."""
_ORPHAN: Final = keys.ORPHAN[0]
_OF_OTHERS: Final = frozenset({keys.INODE[0], keys.ENTRY[0]})


class Below:
    """The writes of transactions that are to be committed just before, in the same request."""

    def __init__(self) -> None:
        self._writes: dict[bytes, bytes | None] = {}
        self._merges: dict[bytes, bytes] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._writes or key in self._merges

    def add(self, view: "View") -> None:
        """Adds a transaction after the earlier ones."""
        for key, value in view.writes.items():
            self._writes[key] = value
            self._merges.pop(key, None)
        for key, operand in view.merges.items():
            if key in self._writes:
                self._writes[key] = merged(key, self._writes[key], operand)
            else:
                self._merges[key] = merged(key, self._merges.get(key, None), operand) or operand

    def over(self, key: bytes, value: bytes | None) -> bytes | None:
        """Returns the value of a key whose value in the replica is `value`."""
        if key in self._writes:
            return self._writes[key]
        return merged(key, value, self._merges[key])

    def all(self, there: Callable[[bytes], bytes | None]) -> dict[bytes, bytes | None]:
        """Returns all keys with their values afterwards; `there`: the server's value of a key."""
        written = dict(self._writes)
        for key, operand in self._merges.items():
            value = merged(key, there(key), operand)
            if value is not None:
                written[key] = value
        return written

    def within(self, start: bytes, end: bytes) -> list[bytes]:
        """Returns the keys of a range, in order."""
        return sorted(
            key for each in (self._writes, self._merges) for key in each if start <= key < end
        )


class _Range(NamedTuple):
    """The part of a range that was read: its end grows while it is read."""

    start: bytes
    end: list[bytes]
    pairs: list[Pair]


class Base(Protocol):
    """The reads beneath a view."""

    def get(self, key: bytes, /) -> bytes | None: ...

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]: ...


class UnpublishedWrites(Protocol):
    """The keys that the replica has and the server has not (`local_writes.LocalWrites`)."""

    @property
    def owners(self) -> Mapping[bytes, int]: ...

    @property
    def shadows(self) -> Mapping[bytes, bytes | None]: ...

    @property
    def groups(self) -> "Mapping[int, Carried]": ...


class Carried(Protocol):
    """A group that a transaction takes along."""

    keys: set[bytes]
    merges: dict[bytes, bytes]
    published_at: float
    before: dict[bytes, bytes]


class View(GatheredWrites):
    """Runs one function on it; `proposal` then returns what it did."""

    def __init__(
        self,
        base: Base,
        node: bytes,
        below: Below | None = None,
        privates: UnpublishedWrites | None = None,
        *,
        writable: bool = True,
        is_local: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`is_local`: whether a key is this node's own (`local_namespaces`), if any is."""
        super().__init__(writable=writable)
        self._is_local = is_local
        self.node = node
        self._base = base
        self._below = Below() if below is None else below
        self._privates = privates
        self._owners = {} if privates is None else privates.owners
        self._shadows = {} if privates is None else privates.shadows
        self.carried: dict[int, None] = {}
        """Private inodes that it read or wrote."""
        self.unplaced = 0
        """Private inodes among them that were closed here and have lost their places."""
        self.nameless: set[bytes] = set()
        """Keys of inodes, private or not, that lost their last name as private ones were carried:
        nobody has been told so."""
        self._seen: dict[bytes, bytes | None] = {}
        """Values that it read."""
        self.reads: dict[bytes, bytes | None] = {}
        """The values that the server must have of those."""
        self.merges: dict[bytes, bytes] = {}
        self.leans = False
        """Whether it read writes that are to be committed just before."""
        self._ranges: list[_Range] = []

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to be committed."""
        return bool(self.writes or self.merges or self.leans)

    def proposal(self, *, is_elsewhere: bool = False) -> Proposal:
        """Returns the reads and writes that are to be committed. `is_elsewhere`: by another
        process, which compares the ranges with its present replica."""
        ranges = [
            (
                *(each.start, each.end[0]),
                *((len(each.pairs) + 1, digest(each.pairs)) if is_elsewhere else (0, b"")),
            )
            for each in self._ranges
            if each.start < each.end[0]
        ]
        return Proposal(self.reads, ranges, self.writes, list(self.merges.items()))

    def give_up(self) -> None:
        """Gives up all that it is to change; what it read counts."""
        self.writes.clear()
        self.merges.clear()
        self.nameless.clear()
        self.unplaced = 0

    def carry(self, settle: Settle, inos: Iterable[int] = ()) -> None:
        """Takes along the private groups that it read or wrote of, and those of `inos`: first
        `settle` of each, which may read and write more."""
        if self._privates is None:
            return
        self.carried.update(dict.fromkeys(inos))
        done: dict[int, None] = {}
        orphans = self._orphans()
        while True:
            for key in self.writes:
                if key in self._owners and key not in self._below:
                    self.carried[self._owners[key]] = None
            more = [ino for ino in self.carried if ino not in done]
            if not more:
                break
            for ino in more:
                done[ino] = None
                group = self._privates.groups.get(ino)
                closed_at = 0.0 if group is None else group.published_at
                if not settle(self, ino, closed_at) and closed_at:
                    self.unplaced += 1
        self.nameless |= {keys.INODE + key[1:] for key in self._orphans() - orphans}
        for ino in done:
            group = self._privates.groups.get(ino)
            if group is not None and keys.inode(ino) not in self._below:
                self._take(group)

    def _orphans(self) -> set[bytes]:
        """Returns the keys by which it lists orphans."""
        return {
            key for key, value in self.writes.items() if key[0] == _ORPHAN and value is not None
        }

    def _take(self, group: Carried) -> None:
        """Takes a group's values, unless the transaction wrote others; existing ones stay as they
        were. Others write an entry, and the inode; all else of the group is there, or not, as the
        inode is."""
        for key in group.keys:
            if key not in self.writes:
                self.writes[key] = self._base.get(key)
            if key[0] in _OF_OTHERS or key in group.before:
                self.reads[key] = group.before.get(key)
        for key, operand in group.merges.items():
            if key not in self.writes:
                own = self.merges.get(key)
                self.merges[key] = operand if own is None else merged(key, own, operand) or own

    def left_nameless(self) -> list[tuple[bytes, bytes | None, bytes | None]]:
        """Returns the `nameless`, with their records before and after."""
        return [(key, self._base.get(key), self.writes.get(key)) for key in sorted(self.nameless)]

    def get(self, key: bytes, /) -> bytes | None:
        if key in self.writes:
            return self.writes[key]
        value = self._read(key)
        if key in self.merges:
            return merged(key, value, self.merges[key])
        return value

    def get_many(self, names: Sequence[bytes], /) -> list[bytes | None]:
        return [self.get(key) for key in names]

    def put(self, key: bytes, value: bytes, /) -> None:
        super().put(key, value)
        self.merges.pop(key, None)

    def delete(self, key: bytes, /) -> bool:
        found = super().delete(key)
        self.merges.pop(key, None)
        return found

    def merge(self, key: bytes, operand: bytes, /) -> None:
        self._check(key)
        if self._is_local is not None and self._is_local(key):
            raise Mixed(key)
        if key in self.writes:
            super().merge(key, operand)
        elif key in self.merges:
            self.merges[key] = merged(key, self.merges[key], operand) or operand
        else:
            self.merges[key] = operand

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        if start >= end:
            return
        read = _Range(start, [start], [])
        self._ranges.append(read)
        own = sorted(
            {key for each in (self.writes, self.merges) for key in each if start <= key < end}
        )
        taken = 0
        for pair in self._scan_below(start, end):
            while taken < len(own) and own[taken] < pair[0]:
                read.end[0] = own[taken] + b"\0"
                yield from self._present(own[taken])
                taken += 1
            self._record(read, pair)
            read.end[0] = pair[0] + b"\0"
            if taken < len(own) and own[taken] == pair[0]:
                taken += 1
                yield from self._present(pair[0])
            else:
                yield pair
        for key in own[taken:]:
            read.end[0] = key + b"\0"
            yield from self._present(key)
        read.end[0] = end

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        return (key for key, _ in self.scan(start, end))

    def _check(self, key: bytes) -> None:
        super()._check(key)
        if self._is_local is not None:
            check_shared(key, self._is_local)

    def _present(self, key: bytes) -> Iterator[Pair]:
        """Yields a pair of its own."""
        value = self.get(key)
        if value is not None:
            yield key, value

    def _read(self, key: bytes) -> bytes | None:
        if key in self._seen:
            return self._seen[key]
        value = self._base.get(key)
        if key in self._below:
            self.leans = True
            value = self._below.over(key, self._shadows.get(key, value))
            self._expect(key, value)
        elif key in self._owners:
            self.carried[self._owners[key]] = None
        else:
            self._expect(key, self._shadows.get(key, value))
        self._seen[key] = value
        return value

    def _expect(self, key: bytes, value: bytes | None) -> None:
        """Notes that the server must have it; a merged key changes all the time."""
        if key[0] not in MERGED and (self._is_local is None or not self._is_local(key)):
            self.reads[key] = value

    def _record(self, read: _Range, pair: Pair) -> None:
        """Records what the server must have there."""
        key, value = pair
        if key in self._below:
            read.pairs.append(pair)
        elif key in self._owners:
            ino = self._owners[key]
            self.carried[ino] = None
            was = None if self._privates is None else self._privates.groups[ino].before.get(key)
            if was is not None:
                read.pairs.append((key, was))
        else:
            there = self._shadows.get(key, value)
            if there is not None:
                read.pairs.append((key, there))

    def _scan_below(self, start: bytes, end: bytes) -> Iterator[Pair]:
        """Yields the replica's pairs, with those of the transactions before."""
        below = self._below.within(start, end)
        self.leans = self.leans or bool(below)
        taken = 0
        for key, value in self._base.scan(start, end):
            while taken < len(below) and below[taken] < key:
                yield from self._over(below[taken], None)
                taken += 1
            if taken < len(below) and below[taken] == key:
                taken += 1
                yield from self._over(key, self._shadows.get(key, value))
            else:
                yield key, value
        for key in below[taken:]:
            yield from self._over(key, None)

    def _over(self, key: bytes, value: bytes | None) -> Iterator[Pair]:
        found = self._below.over(key, value)
        if found is not None:
            yield key, found
