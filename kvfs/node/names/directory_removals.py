"""Removals of directories in namespaces that are kept by their nodes.

| on other nodes, below the directory | its removal here | the directory there |
|---|---|---|
| no file, as far as they answer | goes on | goes with the tombstone, if empty |
| files, all of which were removed here | goes on | goes, once it has heard of these |
| other files | refused: not empty | stays |
| files that come later, or of a node that did not answer | goes on | stays, and is found again |

A tombstone of a directory hides what was changed last before it: a directory that its holder has
something in when it hears of the removal is changed by that.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvfs.base.errors import NotEmpty
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of
from kvfs.node.names.name_lister import NameLister
from kvfs.node.names.name_protocol import MOST_PATH_BYTES
from kvfs.node.names.tombstones import Tombstone, Tombstones, directory_of, of_directory
from kvfs.tree import name_escaping, tree
from kvfs.tree.changes import Change
from kvfs.tree.copies import peer_directories
from kvfs.tree.copies.told_names import AskedPage
from kvfs.tree.inodes import read_inode, stamp

_PAGE: Final = 256


class DirectoryRemovals:
    """The removals of directories that users of one node ask for."""

    def __init__(
        self,
        me: int,
        lister: NameLister,
        stones: Tombstones,
        may_be_elsewhere: Callable[[int, bytes], bool],
        tell: Callable[[Sequence[Tombstone]], None],
    ) -> None:
        """`may_be_elsewhere`: whether other nodes may have a path of a namespace. `tell` has them
        told."""
        self._me = me
        self._lister = lister
        self._stones = stones
        self._may_be_elsewhere = may_be_elsewhere
        self._tell = tell

    async def prepare(self, directory: int, path: bytes) -> None:
        """Lets a directory that is empty here go on the other nodes, before its user removes it
        here. Raises NotEmpty if others have names in it, KvfsError."""
        space = namespace_of(directory)
        is_told = len(of_directory(path)) <= MOST_PATH_BYTES
        if not is_told or not self._may_be_elsewhere(space, path):
            return
        changed_ns, start = 0, b""
        while True:
            asked = AskedPage(space, path, start, _PAGE)
            (page,) = await self._lister.pages([asked], "names", hides=False)
            if page.names:
                raise NotEmpty("the directory is not empty: other nodes have files in it")
            changed_ns = max(changed_ns, page.changed_ns)
            start = page.following
            if not start:
                break
        least = changed_ns + 1
        removed_ns = max(self._stones.now_ns(), least)
        stone = Tombstone(space, of_directory(path), removed_ns, self._me, least)
        made = self._stones.take([stone])
        self._stones.keep(made)
        self._tell(made)


def remove(t: Transaction, stone: Tombstone, now: int) -> Change | None:
    """Removes the directory that another node removed, if it is empty; otherwise it is changed.
    None: there is none, it was made since, or it stays."""
    path = directory_of(stone.path)
    found = peer_directories.all_along(t, stone.namespace_id, path) if path else None
    if not path or not found:
        return None
    ino = found[-1][0]
    inode = read_inode(t, ino)
    if inode.btime_ns >= stone.removed_ns:
        return None
    name = name_escaping.shown(t, inode.parent, path.rpartition(b"/")[2] + b"/")
    if name is None:
        return None
    try:
        tree.rmdir(t, inode.parent, name, now, lambda _ino: True)
    except NotEmpty:
        stamp(t, ino, inode, max(now, stone.removed_ns + 1))
        return None
    return Change(inode.parent, name, ino)
