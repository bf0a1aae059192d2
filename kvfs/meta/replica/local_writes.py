"""Files that this node alone knows of: they were made here, and no other node has to know yet.

Making a file and closing it would be two commits at the server. So the first is done in the
metadata replica alone: the keys of its inode, its entry, and its merges (usage, its directory's
times). Any transaction that reads or writes one of these keys later takes the whole group along to
the server: so a new file costs one round trip, when it is closed.

A file made with O_EXCL is at the server from the start, unpublished: nobody else sees it, but its
name is taken. Its first close can be private all the same.

So can another name of a published file, also while the server is being told of the file, or knows
it: the group then has what the server has (or gets), and what this node made of it. What the log
brings of such a file is taken over, and the new name laid over it again. A file whose name it takes
has its record in the group too, as an orphan's, while it has that name alone at the server.

| part | in the replica's file | at the server |
|---|---|---|
| keys of a group | their values | absent, or their earlier values, by which they are checked |
| a key into which a group merged | with all groups' operands | without: its shadow |
| an earlier name of a group | absent | absent, or the inode: then by request of this node |
| a replaced file's record | an orphan's | with the name, by which it is checked |

Invariants
- A group's keys, its record and the shadows are written in one commit, and go in the one that
  applies the entry of the log that has its inode.
- Numbers of inodes are a node's own, so nobody else ever writes those keys. Another node may write
  an entry's key: then that entry stands, and the transaction that takes the group along settles its
  name (`replica_view.Settle`).
- Others may move or remove a file that is at the server already by its name: then the names are
  theirs, and content and state this node's, until it is known. Where it has another name here
  meanwhile, that name is given up.
- A file that the server does not have at all is made, and published, only with a delegation of its
  namespace (`kvfs.meta.delegations`): so its directory stays until it is known.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from kvfs.meta import keys
from kvfs.meta.delegations import Delegated
from kvfs.meta.engine import MOVED, Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.merge_operators import merged, without
from kvfs.meta.records import namespace_of, pack, unpack_inode
from kvfs.meta.replica.private_fate import (
    Stays,
    loses_name,
    place_of,
    stays,
    with_name_of,
    without_name,
)
from kvfs.meta.replica.private_group import (
    ENTRY,
    InodeWrites,
    NotPrivate,
    Wanted,
    grown,
    has_new_name,
    inodes_among,
    is_own,
    moved,
)
from kvfs.meta.replica.private_view import PrivateView
from kvfs.meta.replica.replica_view import View

Span = tuple[bytes, bytes, int, bytes]
"""Like `Proposal.ranges`."""
_GROUPS: Final = b"\xff~g"
_SHADOWS: Final = b"\xff~s"
"""Keys in the unnamed database, beyond every key of the metadata: records of groups, by inode; and
the server's value of a key, by that."""
_USAGE: Final = keys.USAGE[0]
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_group: Final = msgspec.msgpack.Decoder(InodeWrites).decode
_decode_shadow: Final = msgspec.msgpack.Decoder(bytes | None).decode


class Committed(NamedTuple):
    """The outcome of a transaction that was to be private."""

    is_done: bool
    result: object = None
    lacks_delegation: int = 0
    """The inode with whose namespace delegated it would have been done."""
    waiting: int = 0
    """The inode of which others are to know soon now."""


class LocalWrites:
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
        self.waiting_bytes = 0
        """Bytes of the groups that others are to know of, roughly."""
        self.sent: dict[int, bool] = {}
        """Groups that were sent to the server, with unknown result: it has to hear of everything
        else that is done to them. And whether they got another name here since."""

    def load(self) -> None:
        """Loads the groups of the file. Raises Corrupt, Unavailable."""

        def fn(t: Transaction) -> None:
            for key, value in t.scan(_GROUPS, keys.after(_GROUPS)):
                self._remember(keys.unpack_u64(key, len(_GROUPS)), _decode_group(value))
            for key, value in t.scan(_SHADOWS, keys.after(_SHADOWS)):
                self.shadows[key[len(_SHADOWS) :]] = _decode_shadow(value)

        for each in (self.groups, self.owners, self.shadows, self._mergers, self._pending):
            each.clear()
        self.waiting_bytes = 0
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
        return [ino for ino in self.groups if self.is_waiting(ino)]

    def is_waiting(self, ino: int) -> bool:
        """Returns whether an inode has anything that others are to know."""
        group = self.groups.get(ino)
        return group is not None and group.is_published

    # ---- what this node does

    def commit(
        self, fn: Callable[[Transaction], object], ino: int, *, is_published: bool
    ) -> Committed:
        """Runs `fn` and commits it here (a new file as a deferred commit); returns whether that was
        possible, and the result. It is not if `fn` did more than make an inode, change a private
        one, publish one that nobody else sees, or give a published one another name (MOVED:
        whichever of this node's `fn` moved), nor without a delegation. Errors of `fn` pass through.
        Raises NoSpace, Corrupt, Unavailable."""
        is_writing = False

        def body(t: Transaction) -> tuple[object, int, InodeWrites | None]:
            nonlocal is_writing
            view = PrivateView(t, self._local.node)
            result = fn(view)
            if not view.is_needed:
                return result, 0, None
            is_private = self.owners.__contains__
            wanted = moved(t, view, is_private) if ino == MOVED else Wanted(ino, is_published)
            number = wanted.ino
            old = self.groups.get(number)
            is_sent = number in self.sent
            group = grown(t, view, wanted, old, is_sent=is_sent, is_private=is_private)
            is_writing = True
            self._write(t, view, number, group)
            return result, number, group

        is_new = ino not in self.groups and ino != MOVED and not is_published
        try:
            result, number, group = self._local.transact_now(body, is_new)
        except Delegated:
            return Committed(False)
        except NotPrivate as reason:
            return Committed(False, lacks_delegation=reason.lacks_delegation)
        except BaseException:
            if is_writing:
                self.load()
            raise
        if group is None:
            return Committed(True, result)
        old = self.groups.get(number)
        for key in old.keys - group.keys if old is not None else ():
            del self.owners[key]
        if number in self.sent:
            self.sent[number] = True
        self._remember(number, group)
        return Committed(True, result, waiting=number if group.is_published else 0)

    def named_in(self, t: Transaction, namespace_id: int) -> list[int]:
        """Returns the groups whose place must be certain before this node's delegation of their
        namespace ends: those that are published, and those whose name nobody has taken and whose
        directory is there. The others are published only by a commit that tells whether they have a
        place."""
        return [
            ino
            for ino, group in self.groups.items()
            if namespace_of(ino) == namespace_id
            and (group.is_published or (has_new_name(group, ino) and _has_directory(t, ino)))
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

    def settle(
        self,
        t: Transaction,
        written: Sequence[bytes | None],
        gone: dict[bytes, bytes],
        *,
        is_ours: bool = False,
    ) -> bool:
        """Ends the privacy of groups that the keys and values to be applied make known, except of
        names that they got since; returns whether there were any. `gone` gets names, with their
        inodes, that this node alone had given and has to give up. `is_ours`: the request under way
        wrote them, and took all of their groups along."""
        if not self.groups:
            return False
        found = [ino for ino in inodes_among(filter(None, written[::2])) if ino in self.groups]
        pairs = dict(zip(written[::2], written[1::2], strict=True)) if found else {}
        for ino in found:
            if is_ours and self.sent.get(ino) is False:
                self._settle(t, ino)
            else:
                self._hear(t, ino, pairs, gone)
        return bool(found)

    def release(self, t: Transaction, namespace_id: int) -> None:
        """Ends the privacy of all groups of a namespace whose keys are this node's own from now on:
        what they have here stays so."""
        for ino in [each for each in self.groups if namespace_of(each) == namespace_id]:
            for key in self._end(t, ino).merges:
                self._mergers.pop(key, None)
                self._pending.pop(key, None)
                if key in self.shadows:
                    del self.shadows[key]
                    t.delete(_SHADOWS + key)

    def is_new(self, key: bytes) -> bool:
        """Returns whether it is a key that the server never had."""
        ino = self.owners.get(key)
        return ino is not None and key not in self.groups[ino].before

    def put(self, t: Transaction, key: bytes, value: bytes | None) -> None:
        """Writes the server's value of a key."""
        ino = self.owners.get(key)
        if ino is not None and self._keeps(t, ino, key, value):
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

    def _keeps(self, t: Transaction, ino: int, key: bytes, value: bytes | None) -> bool:
        """Returns whether a key of a group is still private, now that the server has this value of
        it."""
        group, packed = self.groups[ino], keys.pack_u64(ino)
        if value == group.before.get(key):
            return True
        if key == keys.INODE + packed:
            self._hear(t, ino, {key: value}, {})
            return key in self.owners
        if key[0] == ENTRY and value is None and t.get(key) == packed:
            group.before.pop(key)  # the file that it replaced there lost the name
        elif key in group.earlier and value == packed:
            group.before[key] = packed
        elif is_own(key, ino) or key[0] != keys.INODE[0]:
            return False
        else:
            return self._keeps_replaced(t, ino, key, value)
        t.put(_record(ino), _encode(group))
        return True

    def _keeps_replaced(self, t: Transaction, ino: int, key: bytes, value: bytes | None) -> bool:
        """Returns whether a file is still to lose its name to the group's, now that the server has
        this record of it. Else it is none of the group's any more."""
        group, theirs = self.groups[ino], None if value is None else unpack_inode(value)
        before = unpack_inode(group.before[key])
        if theirs is None or value is None or not loses_name(before, theirs):
            self._take_out(t, group, keys.ORPHAN + key[1:], None)
            if theirs is not None and theirs.nlink > 1:
                # If it has that name still, it loses it when the group is told (`Settle`).
                self._take_out(t, group, place_of(before), key[1:])
            return False
        group.before[key] = value
        t.put(key, pack(without_name(theirs)))
        t.put(_record(ino), _encode(group))
        return True

    def _take_out(
        self, t: Transaction, group: InodeWrites, key: bytes, value: bytes | None
    ) -> None:
        """Makes a key no group's, with the server's value of it."""
        if self.owners.pop(key, None) is not None:
            group.keys.discard(key)
            group.before.pop(key, None)
            _restore(t, key, value)

    def _hear(
        self,
        t: Transaction,
        ino: int,
        written: Mapping[bytes | None, bytes | None],
        gone: dict[bytes, bytes],
    ) -> None:
        """Ends the privacy of a group as far as the server's present record of its file demands.
        `written`: the server's values, that record among them."""
        group, key = self.groups[ino], keys.inode(ino)
        before, theirs, own = (
            None if each is None else unpack_inode(each)
            for each in (group.before.get(key), written[key], t.get(key))
        )
        assert own is not None, "it has a record"
        stay = stays(before, theirs, own, group.earlier)
        if stay is Stays.TOLD:
            self._settle(t, ino)
        elif theirs is None or stay is Stays.NOTHING:
            self._give_up(t, ino, gone)
        elif stay is Stays.NAME:
            t.put(key, pack(with_name_of(theirs, own)))
            self._keep_name(t, ino, written)
        else:
            group.before[key] = written[key] or b""
            if stay is Stays.CONTENT:
                self._give_up_name(t, ino, gone)
                t.put(key, pack(with_name_of(own, theirs)))
            t.put(_record(ino), _encode(group))

    def _keep_name(
        self, t: Transaction, ino: int, written: Mapping[bytes | None, bytes | None]
    ) -> None:
        """Reduces a group to what the server has not got: the name of its file."""
        group = self.groups[ino]
        for key in list(group.keys):
            there = written[key] if key in written else group.before.get(key)
            if t.get(key) == there:
                group.keys.discard(key)
                del self.owners[key]
            if there is None or key not in group.keys:
                group.before.pop(key, None)
            else:
                group.before[key] = there
        # Times of directories that are told once more do no harm.
        for key in [key for key in group.merges if key[0] == _USAGE]:
            self._drop_merge(t, ino, key, group.merges.pop(key))
        t.put(_record(ino), _encode(group))

    def _give_up(self, t: Transaction, ino: int, gone: dict[bytes, bytes]) -> None:
        """Gives up a group: others removed its file, or gave it another name."""
        group = self.groups[ino]
        self._give_up_name(t, ino, gone)
        for key in group.keys:
            _restore(t, key, group.before.get(key))
        self._settle(t, ino)

    def _give_up_name(self, t: Transaction, ino: int, gone: dict[bytes, bytes]) -> None:
        """Restores the names that the server knows of a group's file, and the files that it
        replaced."""
        group = self.groups[ino]
        for key in [key for key in group.keys if not is_own(key, ino)]:
            before, own = group.before.pop(key, None), t.get(key)
            _restore(t, key, before)
            if key[0] == ENTRY and own not in (None, before):
                gone[key] = own or b""
            group.keys.discard(key)
            del self.owners[key]
        group.earlier.clear()

    def _write(self, t: Transaction, view: View, ino: int, group: InodeWrites) -> None:
        pairs: list[tuple[bytes, bytes]] = []
        for key, value in view.writes.items():
            if value is None:
                t.delete(key)
            else:
                pairs.append((key, value))
        for key, operand in view.merges.items():
            there = t.get(key)
            if key not in self.shadows:
                self.shadows[key] = there
                pairs.append((_SHADOWS + key, _encode(there)))
            value = merged(key, there, operand)
            if value is not None:
                pairs.append((key, value))
        pairs.append((_record(ino), _encode(group)))
        t.put_all(pairs)

    def _remember(self, ino: int, group: InodeWrites) -> None:
        old = self.groups.get(ino)
        self.groups[ino] = group
        self.waiting_bytes += _waiting(group) - _waiting(old)
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
        for key, operand in self._end(t, ino).merges.items():
            self._drop_merge(t, ino, key, operand)

    def _end(self, t: Transaction, ino: int) -> InodeWrites:
        """Ends a group, and returns it; its keys are private no more."""
        group = self.groups.pop(ino)
        self.waiting_bytes -= _waiting(group)
        self.sent.pop(ino, None)
        t.delete(_record(ino))
        for key in group.keys:
            del self.owners[key]
        return group

    def _drop_merge(self, t: Transaction, ino: int, key: bytes, operand: bytes) -> None:
        """Takes the merge of a group out of what is pending: the server has it."""
        mergers = self._mergers[key]
        mergers.discard(ino)
        if mergers:
            self._pending[key] = without(key, self._pending[key], operand)
            return
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


def _waiting(group: InodeWrites | None) -> int:
    """Returns the bytes of a group that others are to know of."""
    return group.size if group is not None and group.is_published else 0


def _has_directory(t: Transaction, ino: int) -> bool:
    value = t.get(keys.inode(ino))
    inode = None if value is None else unpack_inode(value)
    above = None if inode is None else t.get(keys.inode(inode.parent))
    return above is not None and unpack_inode(above).nlink > 0


def _record(ino: int) -> bytes:
    return _GROUPS + keys.pack_u64(ino)


def _restore(t: Transaction, key: bytes, value: bytes | None) -> None:
    if value is None:
        t.delete(key)
    else:
        t.put(key, value)
