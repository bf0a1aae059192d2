"""After a change of names is committed: the node's mount forgets them, and inodes that lost their
last link go.

| step | left by a kill before it, and its repair |
|---|---|
| 1 names changed, with a notice of it (one transaction) | nothing was changed |
| 2 the node told: kernels forgot, it drops the removed | the notice: the node, within seconds |
| 2 it does not answer: the kernel told in its place | the same |
| 3 no node: data files of the removed unlinked | orphans: the next start |
| 4 no node: their index entries and records dropped | orphans: the next start |
| 5 the notice removed, with the next change | the notice: the node, to no effect |

If no kernel knows a directory in which names changed (`datastore.known_directories`) there is
nothing to forget and no notice: the node hears of new files and of inodes to be dropped a moment
later (`deferred_notify`).
"""

import operator
import stat
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import trio

from kvfs.base.clock import file_time_ns
from kvfs.base.detach import aside
from kvfs.base.errors import KvfsError
from kvfs.datastore.known_directories import Known
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.session.session import Session
from kvfs.tree import namespaces, notices, tree
from kvfs.tree.changes import Change
from kvfs.tree.tree import Removed
from kvfs.vfs.deferred_notify import DeferredNotify
from kvfs.vfs.node_client import NodeClient, Told

T = TypeVar("T")
_parent_of: Final = operator.attrgetter("parent")
_made: Final = tuple.__new__
"""Makes a named tuple without a call of Python."""


class Changed(msgspec.Struct, eq=False):
    """Gathers, in one transaction, its changes."""

    changes: list[Change] = []
    orphans: list[tuple[int, Inode]] = []
    published: list[int] = []
    """New files."""
    size_bytes: int = 0
    """Bytes of the new files."""
    notice: bytes = b""
    """The notice's key; empty: no kernel can know what was changed."""
    links_stay: bool = False
    """Whether an inode that changed has further links, by which a kernel may know it."""

    def name(self, parent: int, name: bytes, removed: Removed | None = None) -> None:
        """Notes that this name came, went or leads elsewhere; `removed` is the inode that lost its
        link by that."""
        self.changes.append(_made(Change, (parent, name, removed.ino if removed else 0)))
        if removed is None:
            return
        if removed.inode.nlink:
            self.links_stay = True
        else:
            self.orphans.append((removed.ino, removed.inode))

    def file(self, ino: int, inode: Inode) -> None:
        """Notes that what is told of a file is another, under each of its names."""
        self.changes.append(Change(inode.parent, b"", ino))
        if inode.nlink > 1:
            self.links_stay = True

    def publish(self, ino: int, size: int) -> None:
        """Notes that a file of `size` bytes came."""
        self.published.append(ino)
        self.size_bytes += size


def _news(changed: Sequence[Changed]) -> tuple[list[Change], list[int], list[int]]:
    """Returns what the node is told of these: changes of names that a kernel may know, new files,
    and what lost its last link under a name that none knows."""
    changes: list[Change] = []
    published: list[int] = []
    dropped: list[int] = []
    for each in changed:
        published += each.published
        if each.notice:
            changes += each.changes
        else:
            dropped += [ino for ino, _ in each.orphans]
    return changes, published, dropped


def _orphans(changed: Sequence[Changed]) -> list[tuple[int, Inode]]:
    return [orphan for each in changed for orphan in each.orphans]


class Finisher:
    """Commits changes of names for one client, and does what follows; any thread."""

    def __init__(self, session: Session, node: NodeClient) -> None:
        self._session = session
        self._node = node
        self._known = Known(session.store.known)
        self._soon: DeferredNotify[Changed] = DeferredNotify(self.tell)
        self._taken: list[bytes] = []
        self.flush: Final = self._soon.flush
        """Tells the node at once of what was put off, freed space among it."""

    def _post(self, t: Transaction, changed: Changed) -> None:
        """Does step 1, last in the transaction. In a cluster, a node that commits it for us tells
        its mount by itself."""
        if changed.links_stay or self._known.any_of(map(_parent_of, changed.changes)):
            now = file_time_ns()
            changed.notice = notices.post(t, changed.changes, now)

    def clear(self, t: Transaction) -> None:
        """Takes step 5, in any transaction that writes anyway."""
        if self._taken:
            taken, self._taken = self._taken, []
            notices.remove(t, taken)

    def commit(self, fn: Callable[[Transaction, Changed], T]) -> tuple[T, Changed]:
        """Takes step 1 of what `fn` does; returns its result, and what is to be finished. `fn` may
        be run more than once. Raises what `fn` raises, NoSpace, ReadOnly, Unavailable."""

        def step(t: Transaction) -> tuple[T, Changed]:
            changed = Changed()
            if self._taken:
                self.clear(t)
            result = fn(t, changed)
            if changed.changes and not t.node:
                self._post(t, changed)
            return result, changed

        return self._session.write(step)

    def change(
        self, fn: Callable[[Transaction, Changed], T], later: list[Changed] | None = None
    ) -> T:
        """`commit` and `finish`. `later`: the node is not told, but its list is for `finish`, which
        tells of many commits in one round trip. Raises as both."""
        result, changed = self.commit(fn)
        if changed.changes:
            if later is None:
                self.finish(changed)
            else:
                later.append(changed)
        return result

    def finish(self, *changed: Changed) -> None:
        """Does steps 2 to 4, for all these at once. Raises Unavailable when the node does not
        answer and its mount may show the earlier state: the changes are committed, and the node has
        its notices."""
        if urgent := self.put_off(changed):
            self.tell(urgent)

    def put_off(self, changed: Sequence[Changed]) -> Sequence[Changed]:
        """Leaves to a thread the changes that no kernel can know. Returns those to be told now, by
        `tell`: also earlier ones, if they are many. Never waits."""
        urgent: list[Changed] = []
        rest: list[Changed] = []
        size_bytes = 0
        for each in changed:
            if each.notice:
                urgent.append(each)
            else:
                rest.append(each)
                size_bytes += each.size_bytes
        if rest:
            urgent += self._soon.add(rest, size_bytes)
        return urgent

    def tell(self, changed: Sequence[Changed]) -> None:
        """Does `finish` for the result of `put_off`."""
        told = self._node.tell(*_news(changed))
        if told is Told.NOBODY and (orphans := _orphans(changed)):
            self.drop(orphans)
        self._take(told, changed)

    async def tell_in_loop(self, changed: Sequence[Changed]) -> None:
        """Does what `tell` does, in an event loop (see `NodeClient.tell_in_loop`)."""
        told = await self._node.tell_in_loop(*_news(changed))
        if told is Told.NOBODY and (orphans := _orphans(changed)):
            await aside()
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.drop, orphans)
        self._take(told, changed)

    def _take(self, told: Told, changed: Sequence[Changed]) -> None:
        """Leaves step 5 to the next change, unless the node has yet to do its part."""
        if told is not Told.KERNEL:
            for each in changed:
                if each.notice:
                    self._taken.append(each.notice)

    def drop(self, orphans: Sequence[tuple[int, Inode]]) -> None:
        """Does steps 3 and 4. What a client has leased stays an orphan, which the node drops."""
        held = self._session.leases.held([ino for ino, _ in orphans])
        orphans = [each for each in orphans if each[0] not in held]
        inos = [ino for ino, _ in orphans]
        if self._session.read(lambda t: any(namespaces.is_durable(t, ino) for ino in inos)):
            # Else a power cut could undo what made an orphan of it, and find no data.
            self._session.sync()
        for ino, inode in orphans:
            if stat.S_ISREG(inode.mode):
                self._session.files.unlink(ino, inode.version)
        self._session.use_index(lambda index: index.remove(inos))

        def reap(t: Transaction) -> None:
            for ino in inos:
                tree.reap(t, ino)

        self._session.write(reap)

    def close(self) -> None:
        """Tells what was put off, and removes the notices that were taken; the node does the
        rest."""
        try:
            self._soon.close()
        except KvfsError:
            pass
        self._known.close()
        if not self._taken or not self._session.writable:
            return
        try:
            self._session.write(self.clear)
        except KvfsError:
            pass
