"""Many blocks in the store of a node that is stopped, by the transactions with which a file gets
its record and its data are recorded.

All have the content of one block that the node wrote and sealed: each data file is a link to one of
a few copies of its, so that millions of them take no room. The names follow from node and number.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index, Sealed
from kvfs.datastore.layout import Store, open_store
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Inode, namespace_of
from kvfs.node.names.peer_names import OWN_SET
from kvfs.tree import namespaces, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inode

_BATCH: Final = 4096
_MOST_LINKS: Final = 60_000
"""Of one file: ext4 allows 65,000."""


class Sample(NamedTuple):
    """The block that all are like."""

    node: int
    """The node that holds it."""
    ino: int


def name_of(node: int, number: int) -> str:
    """The name of a node's block, in 64 digits as engines name them."""
    return hashlib.blake2b(b"%d %d" % (node, number), digest_size=32).hexdigest()


def fill(root: Path, sample: Sample, first: int, count: int) -> float:
    """Makes the blocks of these numbers beside the sample; returns the seconds it took."""
    began = time.monotonic()
    store = open_store(root)
    with contextlib.closing(EmbeddedEngine(store.meta)) as engine:
        engine.node = keys.pack_node(sample.node)
        _Filler(store, engine, sample).fill(first, count)
    for own_set in root.glob(f"{OWN_SET}*"):  # it does not know them: the next start reads all
        own_set.unlink()
    return time.monotonic() - began


class _Filler:
    def __init__(self, store: Store, engine: EmbeddedEngine, sample: Sample) -> None:
        self._engine = engine
        self._index = Index(engine.database(NAME))
        self._files = DataFiles(store.data)
        self._sample = sample
        self._inode = engine.read_now(lambda t: read_inode(t, sample.ino))
        known = self._index.get(sample.ino)
        assert known is not None
        assert self._inode.checksum, "it is sealed"
        self._known = known
        self._sources = self._copies()
        self._made: set[int] = set()

    def fill(self, first: int, count: int) -> None:
        for start in range(first, first + count, _BATCH):
            numbers = range(start, min(start + _BATCH, first + count))
            names = sorted(name_of(self._sample.node, number).encode() for number in numbers)
            inos = self._engine.transact_now(lambda t: self._add(t, names))  # noqa: B023
            self._link(inos)
            sums, blocks = self._known.chunks, self._known.blocks
            self._index.store(Sealed(ino, self._inode.version, sums, blocks) for ino in inos)

    def _add(self, t: Transaction, names: Sequence[bytes]) -> range:
        parent, version = self._inode.parent, self._inode.version
        ino = namespaces.allocate_inodes(t, namespace_of(parent), len(names))
        made = range(ino, ino + len(names))
        for number, name in zip(made, names, strict=True):
            tree.add(t, parent, name, number, self._like(time.time_ns()))
            placements.hold(t, number, version)
        return made

    def _like(self, now: int) -> Inode:
        return msgspec.structs.replace(self._inode, atime_ns=now, mtime_ns=now, ctime_ns=now)

    def _link(self, inos: Sequence[int]) -> None:
        version = self._inode.version
        for ino in inos:
            path = self._files.path(ino, version)
            if ino >> 10 not in self._made:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._made.add(ino >> 10)
            os.link(next(self._sources), path)

    def _copies(self) -> Iterator[str]:
        """A file with the sample's content, again and again, until it has as many links as it
        may; then another one."""
        original = Path(self._files.path(self._sample.ino, self._inode.version))
        content = original.read_bytes()
        while True:
            copy = original.with_suffix(f".copy{time.monotonic_ns()}")
            copy.write_bytes(content)
            for _ in range(_MOST_LINKS):
                yield str(copy)
            copy.unlink()
