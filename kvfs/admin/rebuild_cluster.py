"""Restores a cluster's metadata in an engine that lost them, node by node.

Each stopped node adds what it has, in any order: its replica, if that is newer than those before
it, then its data files. The last one finishes, and all may start.

| step of a node | state after a kill |
|---|---|
| 1 enrolled: its number, its incarnation, the secrets | a server that knows a node; done again |
| 1b (`--replace`) shards of namespaces discarded | the mark: no node starts; done again |
| 2 its replica copied, if it is the newest | the mark of an unfinished copy; copied again |
| 3 its data files entered | the mark: no node starts; done again |
| 4 (the last one) log begun anew, mark removed | done again |

A node that was away then has its turn when it is back: its data of known files are entered.

Invariants
- Until the end the engine bears the mark of an unfinished copy and no schema version, so that no
  node takes it for empty or whole.
- The newest of several replicas counts, of each shard where namespaces have some; they lie together
  afterwards. Files that no replica knew are made from the descriptions
  of data files (`kvfs.admin.rebuild`), and never take a name from what a replica knew to be later.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

import msgspec
import trio

from kvfs.admin import rebuild
from kvfs.admin.partial_replica import check_to_replace
from kvfs.base.errors import Exists, NotFound
from kvfs.cluster import node_identity
from kvfs.cluster.node_identity import Kept
from kvfs.cluster.node_records import list_nodes
from kvfs.cluster.secrets import Secrets
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index
from kvfs.datastore.layout import Store
from kvfs.datastore.tiered_files import data_files
from kvfs.meta import engine_copy, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_copy import EnginePart
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.local_keys import peer_spaces
from kvfs.meta.records import Usage, namespace_root, pack, unpack_inode, unpack_namespace
from kvfs.meta.redis.calling import locate
from kvfs.meta.redis.restoring import Restoring
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.meta.replica.local_namespaces import marked
from kvfs.meta.replica.replica_mark import read_mark
from kvfs.meta.shards.shard_map import ShardMap
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes
from kvfs.tree.rebuilt_records import DirectoryOwner

Progress = Callable[[int], None]
_DEADLINE_S: Final = 10.0
_MARK: Final = keys.copying(0)
_PAGE: Final = 256
_NONE: Final = -1
_TOP_ALONE: Final = 0
"""The position of a namespace's replica that has no more than its top directory."""
_BEYOND: Final = 1 << 40
"""More inode numbers than a namespace has given out: it gives none twice."""


class Came(NamedTuple):
    """The contribution of one node."""

    is_newest: bool
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

    def run(
        self,
        owner: DirectoryOwner,
        progress: Progress,
        *,
        replace: bool = False,
        is_partial: bool = False,
    ) -> Came:
        """Adds what this node has. `replace`: discards the engine's content, which is older or
        another cluster's; `is_partial`: also if this node's replica does not have all namespaces.

        Raises Exists (nothing was lost), Conflict, Corrupt, Unavailable, OSError."""
        if replace and not is_partial:
            check_to_replace(self._local)
        was_known = trio.run(partial(self._enrol, replace=replace))
        node = keys.pack_node(self._me.node)
        with contextlib.closing(DirectEngine(self._url, node=node)) as engine:
            if replace:
                engine.discard_shards()
            if not was_known and not replace and engine.read_now(_is_whole):
                return self._join_late(engine)
            return self._add(engine, owner, progress, replace=replace)

    def finish(self) -> list[bytes]:
        """Ends the rebuild: every node that could has had its turn, and nodes may start. Returns
        the namespaces of which no node had all. Raises what `run` raises."""
        with contextlib.closing(DirectEngine(self._url)) as engine:
            trio.run(self._restart)
            bare = engine.read_now(_bare)
            engine.transact_now(_finish)
        return bare

    def _join_late(self, engine: DirectEngine) -> Came:
        """Enters the files here that the others know, which go on already."""
        entered = 0
        with contextlib.closing(data_files(self._store)) as files:
            names = files.scan()
            while batch := list(islice(names, _PAGE)):
                entered += engine.transact_now(partial(_hold_known, names=batch))
            lost = _drop_missing(engine, files)
        return Came(False, self.position, {"files": entered, "bytes": 0}, lost)

    async def _enrol(self, *, replace: bool) -> bool:
        me = self._me
        with contextlib.closing(Restoring(self._location, _DEADLINE_S)) as restoring:
            return await restoring.enrol(
                me.cluster,
                self._store.identity.node,
                me.node,
                me.incarnation,
                self._secrets.digests,
                max(self.position, 0),
                replace=replace,
            )

    async def _restart(self) -> None:
        with contextlib.closing(Restoring(self._location, _DEADLINE_S)) as restoring:
            await restoring.restart()

    def _add(
        self, engine: DirectEngine, owner: DirectoryOwner, progress: Progress, *, replace: bool
    ) -> Came:
        engine.transact_now(lambda t: _begin(t, replace=replace))
        shards = self._shards()
        besides = [keys.COPYING, *(each for part, _ in shards for each in part.ranges)]
        is_newest = self._fill(engine, engine_copy.whole(besides), self.position)
        for part, position in shards:
            if position == _TOP_ALONE:
                self._fill_top(engine, part)
            else:
                self._fill(engine, part, position)
        engine.transact_now(lambda t: rebuild.begin(t, owner))
        with contextlib.closing(data_files(self._store)) as files:
            index = Index(self._local.database(NAME))
            counts = rebuild.Rebuild(engine, files, index, owner, self._own(engine)).run(progress)
            lost = _drop_missing(engine, files)
        return Came(is_newest, self.position, counts, lost)

    def _shards(self) -> list[tuple[EnginePart, int]]:
        """Returns what namespaces with shards of their own have, with the positions of the
        replica, from 1 on; of those that are not followed here it is the top directory, at 0."""
        found: list[tuple[EnginePart, int]] = []
        known = ShardMap()
        self._local.read_now(known.load)
        nodes = [each.number for each in self._local.read_now(list_nodes)]
        for number in map(keys.unpack_node, known.spaces):
            mark = self._local.read_now(lambda t, number=number: read_mark(t, number))  # type: ignore[misc]
            position = _TOP_ALONE
            if mark is not None and mark.filled is None:
                position = mark.position + 1
            found.append((engine_copy.of_shard(number, nodes), position))
        return found

    def _fill(self, engine: DirectEngine, part: EnginePart, position: int) -> bool:
        """Copies a part of the replica if it is newer than the engine's; returns whether it is."""
        if position <= engine.read_now(lambda t: _filled(t, part.mark)):
            return False
        engine.transact_now(lambda t: t.put(part.mark, b""))
        engine_copy.copy(self._local, engine, part, lambda _: None)
        engine.transact_now(lambda t: t.put(part.mark, keys.pack_u64(position)))
        return True

    def _fill_top(self, engine: DirectEngine, part: EnginePart) -> None:
        """Makes a namespace empty that is not followed here, unless another node had it."""
        number = keys.parse_copying(part.mark)
        record = self._local.read_now(lambda t: t.get(keys.inode(namespace_root(number))))

        def fn(t: Transaction) -> None:
            if record is None or _filled(t, part.mark) != _NONE:
                return
            top = msgspec.structs.replace(unpack_inode(record), nlink=2)
            t.put(keys.inode(namespace_root(number)), pack(top))
            t.put(keys.usage(number), pack(Usage()))
            t.put(keys.counter(number), keys.pack_u64(namespace_root(number) + _BEYOND))
            t.put(part.mark, keys.pack_u64(_TOP_ALONE))

        engine.transact_now(fn)

    def _own(self, engine: DirectEngine) -> set[int]:
        """Returns the namespaces whose files are each node's own: their records stay where they
        are, in this node's replica."""
        known = {keys.unpack_node(space) for space in engine.read_now(peer_spaces)}
        return known | self._local.read_now(marked)


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


def _filled(t: Transaction, mark: bytes) -> int:
    """Returns the position of the replica that a part of the engine was filled from."""
    value = t.get(mark)
    return keys.unpack_u64(value) if value else _NONE


def _finish(t: Transaction) -> None:
    if t.get(keys.VERSION) is None:
        rebuild.finish(t)
        for mark, _ in list(t.scan(*keys.COPYING)):
            t.delete(mark)


def _bare(t: Transaction) -> list[bytes]:
    """Returns the names of the namespaces that no node's replica had whole."""
    numbers = [
        keys.parse_copying(mark)
        for mark, value in t.scan(*keys.COPYING)
        if mark != _MARK and value == keys.pack_u64(_TOP_ALONE)
    ]
    records = t.get_many([keys.namespace(number) for number in numbers])
    return [unpack_namespace(record).name for record in records if record is not None]


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
