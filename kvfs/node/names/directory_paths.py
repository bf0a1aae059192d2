"""Paths of directories in namespaces that are kept by their nodes. A directory there keeps its path
for life, so what was read once is remembered."""

from collections import OrderedDict
from typing import Final

from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import NAMESPACE_SHIFT, ROOT_INODE
from kvfs.tree.copies import held_names
from kvfs.tree.copies.held_names import Get

MOST: Final = 65_536
"""Directories that are remembered."""
_WITHIN: Final = (1 << NAMESPACE_SHIFT) - 1
"""The number of an inode within its namespace."""


class DirectoryPaths:
    """The paths of one node's directories; for the event loop."""

    def __init__(self, local: EmbeddedEngine) -> None:
        self._local = local
        self._known: OrderedDict[int, bytes] = OrderedDict()

    def of(self, directory: int, name: bytes, get: Get | None = None) -> bytes | None:
        """Returns the path of a name, as the engine has it, in a directory, from the root of the
        namespace on; None if the directory was removed, or the name has no path. `get` gives the
        values of keys in a transaction, which may come to nothing, so that the path is not
        remembered; None: the engine's present ones, which are committed."""
        if directory & _WITHIN == ROOT_INODE:  # the root of the namespace
            return name or None
        above = self._known.get(directory)
        if above is None:
            if get is not None:
                above = held_names.path_of(get, directory)
            else:
                above = self._local.read_now(lambda t: held_names.path_of(t.get, directory))
                self._remember(directory, above)
        return None if above is None else above + b"/" + name

    def forget(self) -> None:
        """Forgets all paths: directories of a namespace got other numbers."""
        self._known.clear()

    def _remember(self, directory: int, path: bytes | None) -> None:
        if path is not None:
            self._known[directory] = path
            if len(self._known) > MOST:
                self._known.popitem(last=False)
