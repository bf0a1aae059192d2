"""Inodes without a link that are still held: the mount's part in their end.

A file goes with its last name, or later with its last holder: the kernel, by look-ups that it has
not given back, or an open file.
"""

from collections.abc import Callable

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of
from kvfs.tree import namespaces, tree
from kvfs.tree.tree import Removed
from kvfs.vfs.volume import Volume


class Orphans:
    """The orphans of one mount."""

    def __init__(self, volume: Volume, let_go: Callable[[int], object]) -> None:
        """`let_go` notes that no name leads to a file any more (`OpenTable.let_go`)."""
        self._volume = volume
        self._let_go = let_go
        self.held: dict[int, int] = {}
        """The data version of each inode that has no name. Other modules only read it."""

    def removed(self, removed: Removed | None) -> None:
        """Handles the removal of an inode's last link: drops the inode now, or when its last holder
        lets go."""
        if removed is None or removed.dropped or removed.inode.nlink:
            return
        self._let_go(removed.ino)
        if self._volume.holders.keep(removed.ino):
            self.held[removed.ino] = removed.inode.version
        else:
            self._volume.drop_later(removed.ino, removed.inode.version)

    def made(self, ino: int) -> None:
        """Notes that a file was made without a name."""
        self.held[ino] = 0

    def lost_place(self, ino: int, version: int) -> None:
        """Notes that an open file has no name any more, as turned out when it was closed."""
        self._let_go(ino)
        self.held[ino] = version

    def named(self, ino: int) -> None:
        """Notes that a file has a name (again) and goes with that."""
        self.held.pop(ino, None)

    def renamed(self, ino: int, version: int) -> None:
        """Notes that the data file of an open file has this version from now on."""
        if ino in self.held:
            self.held[ino] = version

    def __contains__(self, ino: int) -> bool:
        """Returns whether the inode has no name and is held."""
        return ino in self.held

    def let_go(self, ino: int) -> None:
        """Drops the inode if it is an orphan and the holder that let go was its last."""
        if ino in self.held and not self._volume.holders.keep(ino):
            self._volume.drop_later(ino, self.held.pop(ino))

    def let_all_go(self) -> None:
        """Notes that nobody holds anything any more."""
        for ino in list(self.held):
            self.let_go(ino)

    async def lost_link(self, ino: int) -> bool:
        """Handles a link that another process removed. Returns whether it was the inode's last:
        then the inode goes with its last holder. Raises Unavailable."""

        def find(t: Transaction) -> tuple[Inode | None, bool]:
            # Of what this node has no data of, other nodes have them, and drop it.
            is_ours = (
                not t.node
                or t.get(keys.placement(ino, t.node)) is not None
                or namespaces.is_peer(t, namespace_of(ino))  # nobody else has this record
            )
            return tree.read_inodes(t, [ino])[0], is_ours

        inode, is_ours = await self._volume.engine.read(find)
        if inode is not None and is_ours:
            self.removed(Removed(ino, inode, False))
        return inode is None or not inode.nlink
