"""Restores a cluster's metadata in an engine that lost them, node by node.

Each stopped node adds what it has, in any order: its replica, if that is newer than those before
it, then its data files. The last one finishes, and all may start.

| step of a node | state after a kill |
|---|---|
| 1 enrolled: its number, its incarnation, the secrets | a server that knows a node; done again |
| 2 its replica copied, if it is the newest | the mark of an unfinished copy; copied again |
| 3 its data files entered | the mark: no node starts; done again |
| 4 (the last one) log begun anew, mark removed | done again |

A node that was away then has its turn when it is back: its data of known files are entered.

Invariants
- Until the end the engine bears the mark of an unfinished copy and no schema version, so that no
  node takes it for empty or whole.
- The newest of several replicas counts. Files that no replica knew are made from the descriptions
  of data files (`kvfs.admin.rebuild`), and never take a name from what a replica knew to be later.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import trio

from kvfs.admin import rebuild
from kvfs.base.errors import Exists, NotFound
from kvfs.cluster import node_identity
from kvfs.cluster.node_identity import Kept
from kvfs.cluster.secrets import Secrets
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index
from kvfs.datastore.layout import Store
from kvfs.datastore.tiered_files import data_files
from kvfs.meta import engine_copy, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.restoring import Restoring
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.meta.replica.replica_mark import read_mark
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.tree.rebuilt_records import DirectoryOwner

Progress = Callable[[int], None]
_DEADLINE_S: Final = 10.0
_MARK: Final = keys.copying(0)
_PAGE: Final = 256
_NONE: Final = -1


class Came(NamedTuple):
    """The contribution of one node."""

    mirror: bool
    """Whether its replica is the engine's present content."""
    position: int
    """The position of its replica; -1: it has none that is whole."""
    counts: dict[str, int]
    """The counts of `rebuild.Rebuild`."""
    lost: int
    """Files that it was recorded to have, and has not."""


class Rebuilding:
    """One node's turn. The store is locked, and `local` the engine in it."""

    def __init__(self, store: Store, local: EmbeddedEngine, url: str, secrets: Secrets) -> None:
        """Raises NotFound if the store never joined a cluster, Invalid, NotSupported."""
        found = node_identity.which_node(store)
        if found is None:
            raise NotFound(
                f"the store {store.root} is of no cluster: without --engine, `kvfs rebuild` makes"
                " the metadata of a lone node anew"
            )
        self._store = store
        self._me: Kept = found
        self._local = local
        self._url = url
        self._secrets = secrets
        self._location = locate(url)
        mark = local.read_now(read_mark)
        is_whole = mark is not None and mark.filled is None and mark.cluster == found.cluster
        self.position = mark.position if mark is not None and is_whole else _NONE

    def run(self, owner: DirectoryOwner, progress: Progress, *, replace: bool = False) -> Came:
        """Adds what this node has. `replace`: discards the engine's content, which is older or
        another cluster's.

        Raises Exists (nothing was lost), Conflict, Corrupt, Unavailable, OSError."""
        was_known = trio.run(partial(self._enrol, replace=replace))
        engine = DirectEngine(self._url, node=keys.pack_node(self._me.node))
        try:
            if not was_known and not replace and engine.read_now(_is_whole):
                return self._join_late(engine)
            return self._add(engine, owner, progress, replace=replace)
        finally:
            engine.close()

    def finish(self) -> None:
        """Ends the rebuild: every node that could has had its turn, and nodes may start. Raises
        what `run` raises."""
        engine = DirectEngine(self._url)
        try:
            trio.run(self._restart)
            engine.transact_now(_finish)
        finally:
            engine.close()

    def _join_late(self, engine: DirectEngine) -> Came:
        """Enters the files here that the others know, which go on already."""
        files, entered = data_files(self._store), 0
        try:
            names = files.scan()
            while batch := list(islice(names, _PAGE)):
                entered += engine.transact_now(partial(_hold_known, names=batch))
            lost = _drop_missing(engine, files)
        finally:
            files.close()
        return Came(False, self.position, {"files": entered, "bytes": 0}, lost)

    async def _enrol(self, *, replace: bool) -> bool:
        me, restoring = self._me, Restoring(self._location, _DEADLINE_S)
        try:
            return await restoring.enrol(
                me.cluster,
                self._store.identity.node,
                me.node,
                me.incarnation,
                self._secrets.digests,
                max(self.position, 0),
                replace=replace,
            )
        finally:
            restoring.close()

    async def _restart(self) -> None:
        restoring = Restoring(self._location, _DEADLINE_S)
        try:
            await restoring.restart()
        finally:
            restoring.close()

    def _add(
        self, engine: DirectEngine, owner: DirectoryOwner, progress: Progress, *, replace: bool
    ) -> Came:
        engine.transact_now(lambda t: _begin(t, replace=replace))
        is_newest = self.position > engine.read_now(_filled)
        if is_newest:
            engine.transact_now(lambda t: t.put(_MARK, b""))
            engine_copy.copy(self._local, engine, engine_copy.whole(), lambda _: None)
            filled = keys.pack_u64(self.position)
            engine.transact_now(lambda t: t.put(_MARK, filled))
        engine.transact_now(lambda t: rebuild.begin(t, owner))
        files = data_files(self._store)
        try:
            index = Index(self._local.database(NAME))
            counts = rebuild.Rebuild(engine, files, index, owner).run(progress)
            lost = _drop_missing(engine, files)
        finally:
            files.close()
        return Came(is_newest, self.position, counts, lost)


def _begin(t: Transaction, *, replace: bool) -> None:
    if t.get(keys.VERSION) is not None and not replace:
        raise Exists(
            "the engine has its metadata: start the nodes. Where it went back to older ones than"
            " the nodes know, and these are to be given up, add --replace at the first node"
        )
    if t.get(keys.VERSION) is not None or t.get(_MARK) is None:
        t.delete(keys.VERSION)
        t.put(_MARK, b"")


def _is_whole(t: Transaction) -> bool:
    return t.get(keys.VERSION) is not None


def _hold_known(t: Transaction, names: list[tuple[int, int]]) -> int:
    """Records that this node has these data files; returns for how many there are records of that
    version."""
    entered = 0
    inodes = read_inodes(t, [ino for ino, _ in names])
    for (ino, version), inode in zip(names, inodes, strict=True):
        if inode is not None and inode.version == version:
            placements.hold(t, ino, version)
            entered += 1
    return entered


def _filled(t: Transaction) -> int:
    """Returns the position of the replica that the engine was filled from."""
    value = t.get(_MARK)
    return keys.unpack_u64(value) if value else _NONE


def _finish(t: Transaction) -> None:
    if t.get(keys.VERSION) is None:
        rebuild.finish(t)
        t.delete(_MARK)


def _drop_missing(engine: DirectEngine, files: DataFiles) -> int:
    """Withdraws records of data files that are not here; returns how many."""
    after = missing = 0
    while inos := engine.read_now(partial(_held, after=after)):
        after = inos[-1]
        inodes = engine.read_now(partial(read_inodes, inos=inos))
        gone = [
            ino
            for ino, inode in zip(inos, inodes, strict=True)
            if inode is None or not files.has(ino, inode.version)
        ]
        engine.transact_now(partial(_let_go, inos=gone))
        missing += len(gone)
    return missing


def _held(t: Transaction, after: int) -> list[int]:
    return placements.held_by(t, t.node, after, _PAGE)


def _let_go(t: Transaction, inos: list[int]) -> None:
    pairs = ((keys.placement(ino, t.node), keys.held(t.node, ino)) for ino in inos)
    t.get_many([key for pair in pairs for key in pair])  # in one round trip
    for ino in inos:
        placements.let_go(t, ino, t.node)
