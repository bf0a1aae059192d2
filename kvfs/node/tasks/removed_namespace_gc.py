"""The keeper that drops what this node has of removed namespaces whose names are each node's own:
nobody else knows of these files (`kvfs.meta.replica.local_namespaces`).

| step, for up to 256 files | state after a kill |
|---|---|
| 1 data files unlinked | records without data, which the next round finds |
| 2 their index entries and records dropped | the rest of the files |
| 3 when no file is left: all other keys, the namespace's mark last | the rest of the keys |
"""

import logging
import stat
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

import trio

from kvfs.base.retry import Persistence
from kvfs.datastore.batch_unlink import unlink_each
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Inode, namespace_root, unpack_inode

PERIOD_S: Final = 5.0
_BATCH: Final = 256
_KEYS: Final = 2_000
"""Keys dropped in one commit: some milliseconds."""
log = logging.getLogger(__name__)


class LocalEngine(Engine, Protocol):
    """An engine with such namespaces."""

    def local_remains(self) -> list[int]:
        """Returns the namespaces that were removed and of which local keys are left here. Raises
        Unavailable."""

    def drop_local_inodes(self, inos: Sequence[int]) -> None:
        """Drops the records of inodes, whose data files have gone. Raises NoSpace, ReadOnly,
        Unavailable."""

    def drop_local(self, namespace_id: int, limit: int) -> bool:
        """Drops up to `limit` keys; returns whether that was all. Raises NoSpace, ReadOnly,
        Unavailable."""


class NamespaceRemoval:
    """The removal on one node."""

    def __init__(
        self,
        engine: LocalEngine,
        files: DataFiles,
        index: Index,
        begins: Callable[[int], None] = lambda _namespace_id: None,
    ) -> None:
        """`begins` is called before anything is dropped of a namespace."""
        self._engine = engine
        self._begins = begins
        self._files = files
        self._index = index

    async def run(self) -> None:
        """Drops until cancelled."""
        clearing = Persistence(log.warning, "files of a removed namespace are not dropped yet")
        await clearing.repeat(self.clear, PERIOD_S)

    async def clear(self) -> None:
        """Drops what is left of all removed namespaces. Raises Unavailable, NoSpace, ReadOnly,
        OSError (a data file that the disk does not give up; the others have gone)."""
        for namespace_id in self._engine.local_remains():
            self._begins(namespace_id)
            await self._clear(namespace_id)
            log.info("namespace %d was removed: nothing is left of it here", namespace_id)

    async def _clear(self, namespace_id: int) -> None:
        refused: OSError | None = None
        after = namespace_root(namespace_id)
        while found := await self._engine.read(lambda t, after=after: _inodes(t, after)):  # type: ignore[misc]
            after = found[-1][0]
            names = [(ino, inode.version) for ino, inode in found if stat.S_ISREG(inode.mode)]
            failed = await unlink_each(self._files, names)
            kept = {ino for ino, _ in failed}
            gone = [ino for ino, _ in found if ino not in kept]
            self._index.remove(gone)
            self._engine.drop_local_inodes(gone)
            refused = next(iter(failed.values()), refused)
        if refused is not None:
            raise refused
        while not self._engine.drop_local(namespace_id, _KEYS):
            await trio.lowlevel.checkpoint()


def _inodes(t: Transaction, after: int) -> list[tuple[int, Inode]]:
    """Returns the next inodes of the namespace of `after`."""
    end = keys.after(keys.INODE + keys.pack_u64(after)[:2])
    found = islice(t.scan(keys.inode(after + 1), end), _BATCH)
    return [(keys.unpack_u64(key, 1), unpack_inode(value)) for key, value in found]
