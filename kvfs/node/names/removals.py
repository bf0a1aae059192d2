"""Removals of names, here and elsewhere, in namespaces that are kept by their nodes: they become
tombstones (`tombstones`), and are done to what this node has under such a name.

Invariant
- A removal and its tombstone are one commit, as are a file and the note that it was written after
  a removal: no kill comes between.
- A file gets another name or other attributes only where its data are: its other copies go, or say
  nothing of it, and a record without data is forgotten.
"""

import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import (
    Flag,
    Inode,
    namespace_of,
    unpack_inode,
)
from kvfs.meta.replica.local_namespaces import NotHeld, Then, nothing
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.node.names import directory_removals
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_protocol import MOST_PATH_BYTES
from kvfs.node.names.tombstones import Tombstone, Tombstones
from kvfs.tree import entries, lifecycle, namespaces, tree
from kvfs.tree.changes import Change
from kvfs.tree.copies import held_names, placements

_INODE: Final = keys.INODE[0]
_BATCH: Final = 256


class _Removed(NamedTuple):
    """A name that was removed by its users, and when its file was changed last."""

    parent: int
    name: bytes
    changed_ns: int
    is_renamed: bool


class Removals:
    """The removals that one node knows of."""

    def __init__(
        self,
        engine: Engine,
        me: int,
        paths: DirectoryPaths,
        stones: Tombstones,
        may_be_elsewhere: Callable[[int, bytes], bool],
        tell: Callable[[Sequence[Tombstone]], None],
        forget: Callable[[Sequence[Change]], Awaitable[None]],
    ) -> None:
        """`may_be_elsewhere`: whether other nodes may have a path of a namespace. `tell` has other
        nodes told. `forget` makes mounts forget names, and drops their files once nobody here holds
        them."""
        self._engine = engine
        self._me = me
        self._paths = paths
        self._stones = stones
        self._may_be_elsewhere = may_be_elsewhere
        self._tell = tell
        self._forget = forget
        self.is_closed: Callable[[int], bool] = lambda _namespace_id: False
        """Returns whether nothing may be changed in a namespace now: removals there are heard of
        again later."""

    def on_local(self, t: Transaction, changes: Sequence[LocalChange]) -> Then:
        """Notes, in its transaction, a change of this node's own keys. Raises NotHeld."""
        removed: list[_Removed] = []
        written: list[tuple[int, bytes]] = []
        is_empty = not len(self._stones)
        for key, old, new in changes:
            if key[0] != _INODE or new is None or (old is None and is_empty):
                continue
            before, after = None if old is None else unpack_inode(old), unpack_inode(new)
            if before is not None and _is_named(before):
                is_moved = before.parent != after.parent or before.name != after.name
                is_changed = after.nlink and (is_moved or before.ctime_ns != after.ctime_ns)
                if is_changed and t.get(keys.PLACEMENT + key[1:] + t.node) is None:
                    raise NotHeld(keys.unpack_u64(key, 1))
                # By its users: what was evicted or lost is not removed.
                if is_moved if after.nlink else lifecycle.reason_of(after) is None:
                    name = before.parent, before.name
                    removed.append(_Removed(*name, before.ctime_ns, bool(after.nlink)))
                if before.version == after.version and not is_moved:
                    continue
            if not is_empty and _is_named(after):
                path = self._paths.of(after.parent, after.name, t.get)
                name = namespace_of(after.parent), path or b""
                if name in self._stones and held_names.is_held(t, keys.unpack_u64(key, 1)):
                    written.append(name)
        if not removed and not written:
            return nothing
        made = self._stones.removed(self._names(t, removed, changes), self._me) if removed else []
        renewed = self._stones.renewed(written)
        if not made and not renewed:
            return nothing
        self._stones.write(t, made, renewed)

        def committed() -> None:
            self._stones.written(made, renewed)
            if made:
                self._tell(made)

        return committed

    async def take(self, stones: Iterable[Tombstone]) -> list[Tombstone]:
        """Does here what was removed elsewhere, and returns what was news. What was not done when
        this raises is news the next time. Raises KvfsError."""
        wanted = [each for each in stones if not self.is_closed(each.namespace_id)]
        news: list[Tombstone] = []
        for start in range(0, len(wanted), _BATCH):
            part = self._stones.take(wanted[start : start + _BATCH])
            try:
                gone = await self._engine.transact(lambda t: self._remove(t, part))  # noqa: B023
            except BaseException:
                self._stones.forget(part)
                raise
            self._stones.keep(part)
            news += part
            if gone:
                await self._forget(gone)
        return news

    async def give_up(self, namespace_id: int) -> None:
        """Evicts all that is held in a namespace: this node was away for so long that it does not
        know what was removed meanwhile. Raises KvfsError."""
        now, after = time.time_ns(), 0

        def evict(t: Transaction) -> list[Change]:
            if not namespaces.is_peer(t, namespace_id):
                return []
            gone = [each for ino in inos if (each := lifecycle.evict(t, ino, now, "unavailable"))]
            return [Change(*name, each.ino) for each in gone for name in each.names]

        while inos := await self._engine.read(
            lambda t: placements.held_within(t, t.node, namespace_id, after, _BATCH)  # noqa: B023
        ):
            changes = await self._engine.transact(evict)
            if changes:
                await self._forget(changes)
            after = inos[-1]

    # ---- inside

    def _names(
        self, t: Transaction, removed: Sequence[_Removed], changes: Sequence[LocalChange]
    ) -> list[tuple[int, bytes, int]]:
        """Returns those that other nodes have to be told of: namespace, path, time of the last
        change."""
        get = _before(t, changes)
        found: list[tuple[int, bytes, int]] = []
        for each in removed:
            if t.get(keys.file_entry(each.parent, each.name)) is not None:
                continue  # another file has taken the name
            path = self._paths.of(each.parent, each.name, get)
            if path is None or len(path) > MOST_PATH_BYTES:
                continue  # nobody asks for it, or is told of it
            name = namespace_of(each.parent), path
            if not each.is_renamed or self._may_be_elsewhere(*name):
                found.append((*name, each.changed_ns))
        return found

    def _remove(self, t: Transaction, stones: Sequence[Tombstone]) -> list[Change]:
        """Removes names that other nodes removed after what is here was written."""
        now, changes = time.time_ns(), []
        for each in stones:
            is_peer = namespaces.is_peer(t, each.namespace_id)
            if is_peer and (change := directory_removals.remove(t, each, now)) is not None:
                changes.append(change)
            found = _found(t, each.namespace_id, each.path) if is_peer else None
            if found is None:
                continue
            parent, name, ino, inode = found
            renews = self._stones.renews(each.namespace_id, each.path)
            if self._stones.hides(each.namespace_id, each.path, inode.ctime_ns, renews):
                tree.unlink(t, parent, name, now, _keep)
                changes.append(Change(parent, name, ino))
                pruned = entries.prune(t, parent, now, _keep)
                changes += [Change(gone.parent, gone.name, gone.removed.ino) for gone in pruned]
        return changes


def _keep(_ino: int) -> bool:
    return True


def _is_named(inode: Inode) -> bool:
    return bool(inode.flags & Flag.PUBLISHED and inode.nlink) and stat.S_ISREG(inode.mode)


def _before(t: Transaction, changes: Sequence[LocalChange]) -> Callable[[bytes], bytes | None]:
    """Returns what gives the values of keys as they were before a transaction: a directory may go
    with the last file in it."""

    def get(key: bytes) -> bytes | None:
        for name, old, _ in changes:  # of a key that was changed twice the first
            if name == key:
                return old
        return t.get(key)

    return get


def _found(t: Transaction, namespace_id: int, path: bytes) -> tuple[int, bytes, int, Inode] | None:
    """Returns the published file of a path: directory, name, number, record."""
    ino = held_names.named(t, namespace_id, path)
    value = t.get(keys.inode(ino)) if ino else None
    if value is None:
        return None
    inode = unpack_inode(value)
    return (inode.parent, inode.name, ino, inode) if _is_named(inode) else None
