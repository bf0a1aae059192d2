"""Looks for missing names on other nodes: for doors beside the node, whose records are this host's.

In a namespace whose names are each node's own (coherence `peer`) a name that is absent here may be
held elsewhere. The node knows where, and takes over what it finds; then the door looks again. So
each missing directory of a path takes one question, and so do many names of one directory.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from kvfs.base.errors import NotFound
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import ROOT_INODE, namespace_of, unpack_namespace
from kvfs.session.session import Session
from kvfs.tree import namespaces
from kvfs.tree.copies.told_names import Detail
from kvfs.vfs.names.all_names import AllNames, PageWanted
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.port import Name

T = TypeVar("T")
LOOKS: Final = 64
"""Looks for one path: each may find one directory more."""
_NAME: Final = 9
"""The offset of the name in the key of an entry."""


class NameSearch:
    """The searches of one store; any thread."""

    def __init__(self, session: Session, node: NodeClient) -> None:
        self._session = session
        self._node = node

    def found(self, look: Callable[[], T]) -> T:
        """Returns what `look` returns; while it raises NotFound for a name that other nodes may
        have, they are asked, and it looks again. Raises what it raises at last."""
        for _ in range(LOOKS):
            try:
                return look()
            except NotFound as error:
                if error.at is None or not self.find([error.at]):
                    raise
        return look()

    def listed(
        self,
        look: Callable[[Transaction], T],
        *,
        of: Callable[[Transaction], int],
        detail: Detail,
        limit: int,
        is_deep: bool,
    ) -> T:
        """Returns what `look` returns, which lists names of a namespace: those of all nodes, if
        they keep them themselves. `of` gives the namespace; `limit`: the names that it wants;
        `is_deep`: also those below directories. Raises what they raise."""
        if self._session.replica is None:
            return self._session.read(look)
        others = AllNames(detail, limit, is_deep=is_deep)

        def step(t: Transaction) -> T:
            return look(others.over(t) if namespaces.is_peer(t, of(t)) else t)

        while True:
            try:
                return self._session.read(step)
            except PageWanted as wanted:
                others.add(wanted, self._node.listed(wanted.asked, detail))

    def may_remove(self, directory: int) -> bool:
        """Returns whether no other node is known to have a file below a directory that is to be
        removed, in a namespace whose names are each node's own; True in others."""
        space = namespace_of(directory)
        is_peer = self._session.read_as_it_is(lambda t: namespaces.is_peer(t, space))
        return not is_peer or self._node.may_remove(directory)

    def find(self, entries: Iterable[bytes]) -> bool:
        """Looks for the missing names with these entries (`NotFound.at`); returns whether another
        look may find one."""
        names = [name for each in entries if (name := self._wanted(each)) is not None]
        return bool(names) and self._node.find(names)

    def may_find(self, entry: bytes | None) -> bool:
        """Returns whether other nodes may have the missing name with this entry, without asking
        them."""
        return entry is not None and self._wanted(entry) is not None

    def _wanted(self, entry: bytes) -> Name | None:
        """Returns the name of an entry, if other nodes may have it."""
        directory, name = keys.unpack_u64(entry, 1), entry[_NAME:]
        if directory == ROOT_INODE or not name or b"\0" in name:
            return None
        record = self._session.read_as_it_is(
            lambda t: t.get(keys.namespace(namespace_of(directory)))
        )
        if record is None or not unpack_namespace(record).is_peer:
            return None
        return directory, name
