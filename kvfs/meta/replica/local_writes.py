"""Files that this node alone knows of: they were made here, and no other node has to know yet.

Making a file and closing it would be two commits at the server. So the first is done in the
metadata replica alone: the keys of its inode, its entry, and its merges (usage, its directory's
times). Any transaction that reads or writes one of these keys later takes the whole group along to
the server: so a new file costs one round trip, when it is closed.

A file made with O_EXCL is at the server from the start, unpublished: nobody else sees it, but its
name is taken. Its first close can be private all the same.

| part | in the replica's file | at the server |
|---|---|---|
| keys of a group | their values | absent, or their earlier values, by which they are checked |
| a key into which a group merged | with all groups' operands | without: its shadow |

Invariants
- A group's keys, its record and the shadows are written in one commit, and go in the one that
  applies the entry of the log that has its inode.
- Numbers of inodes are a node's own, so nobody else ever writes those keys. Another node may write
  an entry's key: then that entry stands, and the transaction that takes the group along settles its
  name (`Settle`).
- Others may move or remove a file that is at the server already by its name: then the names are
  theirs, and content and state this node's, until it is known.
- A file that the server does not have at all is made, and published, only with a delegation of its
  namespace (`kvfs.meta.delegations`): so its directory stays until it is known.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from kvfs.base.clock import now
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.merge_operators import merged, without
from kvfs.meta.records import Flag, namespace_of, pack, unpack_inode
from kvfs.meta.replica.replica_view import View

Settle = Callable[[Transaction, int, float], None]
"""Ensures that the name of a file that is to be known leads to it, and that its directory is there;
told when it was published here, as a group has it."""
Span = tuple[bytes, bytes, int, bytes]
"""Like `Proposal.ranges`."""
_GROUPS: Final = b"\xff~g"
_SHADOWS: Final = b"\xff~s"
"""Keys in the unnamed database, beyond every key of the metadata: records of groups, by inode; and
the server's value of a key, by that."""
_OF_INODE: Final = frozenset(b"iouwxpr")
_ENTRY: Final = keys.ENTRY[0]
_HELD: Final = keys.HELD[0]
_INODE: Final = keys.INODE[0]


class InodeWrites(msgspec.Struct, array_like=True):
    """The private keys of one inode."""

    keys: set[bytes]
    """The keys that are there, in the replica alone."""
    merges: dict[bytes, bytes]
    is_published: bool = False
    """Whether others are to know of it, as soon as possible."""
    published_at: float = 0.0
    """Time when it was published here alone, in seconds since this host's boot; 0: it was not."""
    before: dict[bytes, bytes] = {}
    """The server's values of keys that are there too. Those without a value are deleted here."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_group: Final = msgspec.msgpack.Decoder(InodeWrites).decode
_decode_shadow: Final = msgspec.msgpack.Decoder(bytes | None).decode


class _NotPrivate(Exception):
    """Others have to know at once."""

    lacks_delegation = False


class _Undelegated(_NotPrivate):
    lacks_delegation = True


class Committed(NamedTuple):
    """The outcome of a transaction that was to be private."""

    is_done: bool
    result: object = None
    lacks_delegation: bool = False
    """Whether it would have been done with one."""


class Privates:
    """The private groups of one replica. They are remembered as its file has them; after an error,
    `load` it again."""

    def __init__(self, local: EmbeddedEngine) -> None:
        self._local = local
        self.groups: dict[int, InodeWrites] = {}
        self.owners: dict[bytes, int] = {}
        """The inode of each key of a group."""
        self.shadows: dict[bytes, bytes | None] = {}
        """The server's values of keys that groups merged into."""
        self._mergers: dict[bytes, set[int]] = {}
        """Groups that merged into these keys."""
        self._pending: dict[bytes, bytes] = {}
        """The merges of all of them, as one operand."""
        self.sent: set[int] = set()
        """Groups that were sent to the server, with unknown result: it has to hear of everything
        else that is done to them."""

    def load(self) -> None:
        """Loads the groups of the file. Raises Corrupt, Unavailable."""

        def fn(t: Transaction) -> None:
            for key, value in t.scan(_GROUPS, keys.after(_GROUPS)):
                self._remember(keys.unpack_u64(key, len(_GROUPS)), _decode_group(value))
            for key, value in t.scan(_SHADOWS, keys.after(_SHADOWS)):
                self.shadows[key[len(_SHADOWS) :]] = _decode_shadow(value)

        for each in (self.groups, self.owners, self.shadows, self._mergers, self._pending):
            each.clear()
        self._local.read_now(fn)

    def forget(self) -> None:
        """Forgets the groups of another node: it was removed, and its files with it."""

        def fn(t: Transaction) -> None:
            for prefix in (_GROUPS, _SHADOWS):
                for key in [key for key, _ in t.scan(prefix, keys.after(prefix))]:
                    t.delete(key)

        if self.groups or self.shadows:
            self._local.transact_now(fn)
            self.load()

    def published(self) -> list[int]:
        """Returns the groups that are to be known."""
        return [ino for ino, group in self.groups.items() if group.is_published]

    # ---- what this node does

    def commit(
        self, fn: Callable[[Transaction], object], ino: int, *, is_published: bool
    ) -> Committed:
        """Runs `fn` and commits it here; returns whether that was possible, and the result. It is
        not if `fn` did more than make an inode, change a private one, or publish one that nobody
        else sees, nor without a delegation. Errors of `fn` pass through. Raises NoSpace, Corrupt,
        Unavailable."""

        def body(t: Transaction) -> tuple[object, InodeWrites]:
            if ino in self.sent or not self._may_be(t, ino, is_published):
                raise _NotPrivate
            view = View(t, self._local.node)
            result = fn(view)
            group = self._changed(t, view, ino, is_published)
            binds = not group.before and (is_published or ino not in self.groups)
            if binds and not delegations.is_held(t, namespace_of(ino)):
                raise _Undelegated
            self._write(t, view, ino, group)
            return result, group

        try:
            result, group = self._local.transact_now(body)
        except _NotPrivate as reason:
            return Committed(False, lacks_delegation=reason.lacks_delegation)
        except BaseException:
            self.load()
            raise
        old = self.groups.get(ino)
        for key in old.keys - group.keys if old is not None else ():
            del self.owners[key]
        self._remember(ino, group)
        return Committed(True, result)

    def named_in(self, t: Transaction, namespace_id: int) -> list[int]:
        """Returns the groups whose place must be certain before this node's delegation of their
        namespace ends: those that are published, and those whose name nobody has taken and whose
        directory is there. The others are published only by a commit that tells whether they have a
        place."""
        return [
            ino
            for ino, group in self.groups.items()
            if namespace_of(ino) == namespace_id
            and (group.is_published or (_has_new_name(group) and _has_directory(t, ino)))
        ]

    def touched(self, names: Iterable[bytes], ranges: Iterable[Span]) -> set[int]:
        """Returns the groups of which a caller that does not know that they are private read or
        wrote anything."""
        found = set[int]()
        if not self.groups:
            return found
        for key in names:
            if key in self.owners:
                found.add(self.owners[key])
            found.update(self._mergers.get(key, ()))
        for start, end, *_ in ranges:
            found.update(ino for key, ino in self.owners.items() if start <= key < end)
        return found

    # ---- what the log says

    def settle(self, t: Transaction, written: Sequence[bytes | None]) -> bool:
        """Ends the privacy of groups that the keys and values to be applied make known; returns
        whether there were any."""
        found = False
        if not self.groups:
            return found
        for ino in inodes_among(key for key in written[::2] if key is not None):
            group = self.groups.get(ino)
            if group is not None and (not group.before or _publishes(written, ino)):
                self._settle(t, ino)
                found = True
        return found

    def is_new(self, key: bytes) -> bool:
        """Returns whether it is a key that the server never had."""
        ino = self.owners.get(key)
        return ino is not None and key not in self.groups[ino].before

    def put(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        """Writes the server's value of a key."""
        ino = self.owners.get(key)
        if ino is not None and self._stays(t, ino, key, value):
            return
        if key in self.owners:
            ino = self.owners.pop(key)
            group = self.groups[ino]
            group.keys.discard(key)
            group.before.pop(key, None)
            t.put(_record(ino), _encode(group))
        if key in self.shadows:
            self.shadows[key] = value
            t.put(_SHADOWS + key, _encode(value))
            value = self._with_pending(key, value)
        if value is None:
            t.delete(key)
        else:
            t.put(key, value)

    # ---- inside

    def _may_be(self, t: Transaction, ino: int, is_published: bool) -> bool:
        """Returns whether a transaction on this inode may be private."""
        if ino in self.groups or t.get(keys.inode(ino)) is None:
            return True
        return is_published and t.get(keys.unpublished(ino)) == self._local.node

    def _stays(self, t: Transaction, ino: int, key: bytes, value: bytes | None) -> bool:
        """Returns whether a key of a group is still private, now that the server has this value of
        it."""
        group = self.groups[ino]
        if key not in group.before:
            return False
        if value == group.before[key]:
            return True
        if key[0] != _INODE:
            return False
        # Dropped, with all that hangs on it; or known by a request whose answer was lost.
        if value is None or unpack_inode(value).flags & Flag.PUBLISHED:
            self._settle(t, ino)
            return False
        group.before[key] = value
        t.put(key, _renamed(t.get(key) or b"", value))
        t.put(_record(ino), _encode(group))
        return True

    def _changed(self, t: Transaction, view: View, ino: int, is_published: bool) -> InodeWrites:
        """Returns the group as it will be. Raises _NotPrivate."""
        old = self.groups.get(ino, InodeWrites(set(), {}))
        names, packed = set(old.keys), keys.pack_u64(ino)
        before = dict(old.before)
        if before or (ino not in self.groups and t.get(keys.inode(ino)) is not None):
            for key in view.writes.keys() - names:
                there = t.get(key)
                if there is not None and _is_of(key, packed):
                    before[key] = there
        for key, value in view.writes.items():
            if key in before:
                names.add(key)
            elif value is None:
                if key not in names and t.get(key) is not None:
                    raise _NotPrivate
                names.discard(key)
            elif (
                key in names
                or _is_of(key, packed)
                or (key[0] == _ENTRY and value == packed and t.get(key) is None)
            ):
                names.add(key)
            else:
                raise _NotPrivate
        if keys.inode(ino) not in names:
            raise _NotPrivate
        merges = dict(old.merges)
        for key, operand in view.merges.items():
            merges[key] = merged(key, merges.get(key), operand) or operand
        published_at = now() if is_published else old.published_at
        is_published = is_published or old.is_published
        return InodeWrites(names, merges, is_published, published_at, before)

    def _write(self, t: Transaction, view: View, ino: int, group: InodeWrites) -> None:
        for key, value in view.writes.items():
            if value is None:
                t.delete(key)
            else:
                t.put(key, value)
        for key, operand in view.merges.items():
            there = t.get(key)
            if key not in self.shadows:
                self.shadows[key] = there
                t.put(_SHADOWS + key, _encode(there))
            value = merged(key, there, operand)
            if value is not None:
                t.put(key, value)
        t.put(_record(ino), _encode(group))

    def _remember(self, ino: int, group: InodeWrites) -> None:
        old = self.groups.get(ino)
        self.groups[ino] = group
        for key in group.keys:
            self.owners[key] = ino
        for key, operand in group.merges.items():
            if old is not None and key in old.merges:
                self._pending[key] = without(key, self._pending[key], old.merges[key])
            pending = self._pending.get(key)
            both = None if pending is None else merged(key, pending, operand)
            self._pending[key] = operand if both is None else both
            self._mergers.setdefault(key, set()).add(ino)

    def _settle(self, t: Transaction, ino: int) -> None:
        group = self.groups.pop(ino)
        self.sent.discard(ino)
        t.delete(_record(ino))
        for key in group.keys:
            del self.owners[key]
        for key, operand in group.merges.items():
            mergers = self._mergers[key]
            mergers.discard(ino)
            if mergers:
                self._pending[key] = without(key, self._pending[key], operand)
                continue
            del self._mergers[key], self._pending[key]
            value = self.shadows.pop(key)
            t.delete(_SHADOWS + key)
            if value is None:
                t.delete(key)
            else:
                t.put(key, value)

    def _with_pending(self, key: bytes, value: bytes | None) -> bytes | None:
        changed = merged(key, value, self._pending[key])
        return value if changed is None else changed


def _has_new_name(group: InodeWrites) -> bool:
    """Returns whether it has a name that the server has not."""
    return any(key[0] == _ENTRY and key not in group.before for key in group.keys)


def _has_directory(t: Transaction, ino: int) -> bool:
    value = t.get(keys.inode(ino))
    inode = None if value is None else unpack_inode(value)
    above = None if inode is None else t.get(keys.inode(inode.parent))
    return above is not None and unpack_inode(above).nlink > 0


def inodes_among(names: Iterable[bytes]) -> list[int]:
    """Returns the inodes whose records are among these keys."""
    return [keys.unpack_u64(name, 1) for name in names if name[0] == _INODE]


def _publishes(written: Sequence[bytes | None], ino: int) -> bool:
    """Returns whether these keys and values publish an inode, or drop it."""
    mark = keys.unpublished(ino)
    return any(
        key == mark and value is None
        for key, value in zip(written[::2], written[1::2], strict=True)
    )


def _renamed(own: bytes, theirs: bytes) -> bytes:
    """Returns a record that this node published, with what others did to its names."""
    inode, other = unpack_inode(own), unpack_inode(theirs)
    inode.nlink, inode.parent, inode.name = other.nlink, other.parent, other.name
    inode.ctime_ns = max(inode.ctime_ns, other.ctime_ns)
    return pack(inode)


def _record(ino: int) -> bytes:
    return _GROUPS + keys.pack_u64(ino)


def _is_of(key: bytes, packed: bytes) -> bool:
    """Returns whether it is a key of an inode's own."""
    if key[0] in _OF_INODE:
        return key[1:9] == packed
    return key[0] == _HELD and key[3:11] == packed
