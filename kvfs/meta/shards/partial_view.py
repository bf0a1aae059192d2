"""A view of a replica that does not have all shards whole: a namespace's keys are either all here,
or what was fetched of them for this view. Pure.

What stands for a namespace as a whole, its head (`head_keys`), is here of each, a few seconds old
where the rest is not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from kvfs.base.errors import Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root
from kvfs.meta.redis.scripts import TOP, Pair
from kvfs.meta.replica.replica_mark import is_whole
from kvfs.meta.shards.shard_map import is_own, space_of

Fetched: TypeAlias = Mapping[bytes, bytes | None]
"""Keys of one shard with their values, as of one moment."""
MOST_KEYS: Final = 1_000
"""Keys of a shard that are fetched for one view: what needs more has its namespace followed."""
_INODE: Final = keys.INODE[0]
_ENTRY: Final = keys.ENTRY[0]
_SPREAD: Final = keys.place(0)
_OF_INODE: Final = (keys.TIMES, keys.UNPUBLISHED, keys.UNSEALED)


class Lacking(Unavailable):
    """A view lacks keys of a shard, or (without any) a range of it. Who has the view fetches them,
    or the shard."""

    def __init__(self, shard: int, names: Sequence[bytes] = ()) -> None:
        super().__init__("the metadata replica of the namespace is being read: try again")
        self.shard = shard
        self.names = names


class PartialView:
    """A transaction that raises Lacking where it turns to a shard that is not whole. `has`: whether
    a shard is; `fetched`: what is known of others, by shard."""

    def __init__(
        self,
        t: Transaction,
        shard_of: Callable[[bytes], int],
        has: Callable[[int], bool],
        fetched: Mapping[int, Fetched],
    ) -> None:
        self._t = t
        self._shard_of = shard_of
        self._has = has
        self._fetched: Fetched = {
            key: value for part in fetched.values() for key, value in part.items()
        }
        self.node = t.node
        self.put, self.put_all, self.delete, self.merge = t.put, t.put_all, t.delete, t.merge

    def get(self, key: bytes, /) -> bytes | None:
        if key in self._fetched:
            return self._fetched[key]
        self._check([key])
        return self._t.get(key)

    def get_many(self, names: Sequence[bytes], /) -> list[bytes | None]:
        fetched = self._fetched
        if not fetched:
            self._check(names)
            return self._t.get_many(names)
        here = [key for key in names if key not in fetched]
        self._check(here)
        found = dict(zip(here, self._t.get_many(here), strict=True)) if here else {}
        return [fetched[key] if key in fetched else found[key] for key in names]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        self._check_range(start)
        return self._t.scan(start, end)

    def scan_keys(self, start: bytes, end: bytes, /) -> Iterator[bytes]:
        self._check_range(start)
        return self._t.scan_keys(start, end)

    def lacks(self, namespace_id: int) -> bool:
        """Returns whether a namespace's names and files are not all here."""
        shard = self._shard_of(keys.usage(namespace_id))
        return shard != TOP and not self._has(shard)

    def _check(self, names: Sequence[bytes]) -> None:
        for at, key in enumerate(names):
            shard = self._shard_of(key)
            if shard != TOP and not self._has(shard) and not self._is_of_head(key, shard):
                raise Lacking(shard, [each for each in names[at:] if self._shard_of(each) == shard])

    def _is_of_head(self, key: bytes, shard: int) -> bool:
        head = head_keys(shard)
        return key in head and self._t.get(head[0]) is not None

    def _check_range(self, start: bytes) -> None:
        shard = self._shard_of(start)
        if shard != TOP and not self._has(shard):
            raise Lacking(shard)


def head_keys(namespace_id: int) -> list[bytes]:
    """Returns the keys of a namespace's usage, of its top directory, and of that one's times."""
    top = namespace_root(namespace_id)
    return [keys.usage(namespace_id), keys.inode(top), keys.times(top)]


def with_companions(names: Sequence[bytes]) -> list[bytes]:
    """Returns the keys with those that a look-up asks for next, so that it takes two requests: the
    entry of a name as a file's and a directory's, the record of an inode with its marks."""
    found = dict.fromkeys(names)
    for key in names:
        if key[0] == _ENTRY:
            found[key.removesuffix(b"/") if key.endswith(b"/") else key + b"/"] = None
        elif key[0] == _INODE:
            found.update(dict.fromkeys(kind + key[1:] for kind in _OF_INODE))
    return list(found)


def asked_again(lacking: Lacking, fetched: dict[int, Fetched]) -> list[bytes]:
    """Takes out what was `fetched` of the shard that is lacking; returns the keys to fetch of it
    then, for one moment: these, and what is lacking. None of them: it takes the whole shard."""
    known = fetched.pop(lacking.shard, {})
    names = list(dict.fromkeys([*known, *with_companions(lacking.names)]))
    return names if lacking.names and len(names) <= MOST_KEYS else []


def beside_node(t: Transaction, fetched: Mapping[int, Fetched]) -> Transaction:
    """Returns the view that a process beside the node has of the replica in its file, and of what
    was `fetched`, by shard, of those that are not whole."""
    if t.get(_SPREAD) is None:  # no namespace has a shard of its own
        return t
    known: dict[bytes, int] = {}
    whole: dict[int, bool] = {}

    def shard_of(key: bytes) -> int:
        space = space_of(key)
        if space not in known:
            is_apart = space and is_own(t.get(keys.PLACE + space))
            known[space] = int.from_bytes(space) if is_apart else TOP
        return known[space]

    def has(shard: int) -> bool:
        if shard not in whole:
            whole[shard] = is_whole(t, shard)
        return whole[shard]

    lacking = {shard: part for shard, part in fetched.items() if not has(shard)}
    return PartialView(t, shard_of, has, lacking)
