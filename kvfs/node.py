"""A node, put together: what is started in which order, and stopped in the reverse.

| step of the start | what a kill after it leaves |
|---|---|
| 1 store made or opened, locked | an empty store, or the old one; the lock goes with the process |
| 2 engine opened (after a power cut rebuilt), first namespaces made | no `clean` marker |
| 3 marker taken, what the last process left is mended (`recover`) | it is mended again |
| 4 keepers (dropper, sealer, evictor) and control socket in a nursery | a dead socket, replaced |

In a cluster step 2 joins it (`clustered`), and waits until its engine answers.

The stop runs backwards: keepers end, what they hold in memory is flushed, the engine is synced and
closed, the marker written, the lock given back. This module does not know the front doors: they use
a Node, and register with it.
"""

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from kvfs.background.accounting import STORE, Accounting, Space
from kvfs.background.cold import ColdTier, connect
from kvfs.background.damage import Damage
from kvfs.background.evictor import Evictor
from kvfs.background.leftovers import Leftovers
from kvfs.background.persist import Persistence
from kvfs.background.releasing import Releaser
from kvfs.background.scrubber import Scrubber
from kvfs.background.sealer import Sealer
from kvfs.background.spare import Spare
from kvfs.background.strays import Strays
from kvfs.background.tiering import Tiering
from kvfs.borrowing import Borrowing
from kvfs.bringing import Bringing
from kvfs.changes import Change
from kvfs.cluster.kept import which_node
from kvfs.coherence import Coherence
from kvfs.cold.endpoint import parse
from kvfs.config import Config
from kvfs.control import ControlServer
from kvfs.errors import Conflict, Corrupt, Unavailable
from kvfs.hearing import Written, heard
from kvfs.holders import Holders
from kvfs.locks import Locks
from kvfs.meta import boot, keys
from kvfs.meta.copying import refuse_unfinished
from kvfs.meta.embedded import EmbeddedEngine
from kvfs.meta.interface import Engine, Transaction
from kvfs.meta.mirror.mark import refuse_mirror
from kvfs.namespace import spaces
from kvfs.namespace.inodes import read_inodes
from kvfs.namespace.lifecycle import Evicted
from kvfs.recover import recover
from kvfs.requests import Requests
from kvfs.store import layout, places
from kvfs.store.index import NAME as INDEX_NAME
from kvfs.store.index import Index
from kvfs.store.known import KnownDirectories
from kvfs.store.probe import filesystem_type
from kvfs.store.tiers import TieredFiles, data_files
from kvfs.version import VERSION
from kvfs.volume import Volume
from kvfs.whereabouts import WHERE, Whereabouts

if TYPE_CHECKING:
    from kvfs.clustered import Clustered
    from kvfs.replicas import Replicas

FIRST_NAMESPACES: Final = ((b"cache", "cache"), (b"models", "durable"))
"""Name and kind of the namespaces that a new store begins with."""
_BLOCK: Final = 4096
"""The block size of statvfs: clients choose O_DIRECT by it."""
log = logging.getLogger(__name__)


Changed = Callable[[Sequence[Change]], Awaitable[None]]
Report = Callable[[], Awaitable[dict[str, Any]]]


class Node:
    """The parts of a running node. Made by `open_node`."""

    def __init__(
        self,
        config: Config,
        store: layout.Store,
        engine: Engine,
        local: EmbeddedEngine,
        known: KnownDirectories,
        cluster: "Clustered | None",
    ) -> None:
        """`local`: the embedded engine itself, which in a cluster is the mirror's file."""
        self.config = config
        self.store = store
        self.engine = engine
        self.local = local
        self.cluster = cluster
        self.coherence = Coherence(cluster.engine) if cluster else None
        """Of a node of a cluster; a lone one believes itself."""
        self.boot = boot.boot_id()
        self.files = data_files(store)
        self.index = Index(local.database(INDEX_NAME))
        self.holders = Holders()
        self.locks = _locks(cluster) if cluster else None
        """In a cluster: those of the mount's processes."""
        self.known = known
        self.volume = Volume(engine, self.files, self.index, self.holders)
        self.invalidators: list[Changed] = []
        """Of the mounts: each makes its kernel forget what has changed, and returns when it has."""
        self.replaced: list[Callable[[int], None]] = []
        """Of the mounts, told at once: this inode's data are others now."""
        self._heard: list[Change] = []
        self._hearing = trio.Event()
        self.accounting = Accounting(self.files.root, config.capacity, self.holders.writers)
        self.evictor = Evictor(
            engine, self.files, self.index, self.holders, self.accounting, self._forget_evicted
        )
        self.sealer = Sealer(engine, self.files, self.index, self.holders.writes)
        self.volume.on_published = self.sealer.published
        self.leftovers = Leftovers(engine, self.files, self.holders, self.volume.drop_later)
        self.cold = self._cold_tier()
        self.tiering = self._tiering()
        self.bringing = Bringing(
            engine,
            self.files,
            self.index,
            self.volume,
            lambda size: self.evictor.room_for(STORE, size),
        )
        self.borrowing = Borrowing(engine, self.files)
        if self.cold is not None:
            self.bringing.cold = self.cold.fetch
        if cluster is not None:
            self.bringing.fetch = self.borrowing.fetch = cluster.fetch
            self.bringing.look_again = cluster.look_again
            self.evictor.spare = Spare(cluster.member.roster.lives)
            self.accounting.local = lambda: (
                self.index.used_bytes(),
                self.bringing.coming_bytes,
            )
        self.strays = Strays(engine, self.files, self.index, self.holders)
        self.requests = Requests(
            engine,
            self.index,
            self.sealer,
            self.evictor,
            self.bringing,
            self.borrowing,
            self._capacity,
            self.changed,
            self.drop,
        )
        self.damage = Damage(engine, self.files, self.holders, self._forget_evicted, self.drop)
        self.scrubber = Scrubber(
            engine, self.files, self.index, self.damage.found, config.scrub_rate
        )
        self.whereabouts = Whereabouts(
            engine,
            self.files,
            self.bringing.share,
            self.bringing.bring,
            config.cold,
        )
        self.control = ControlServer(
            store.socket,
            {
                "status": self._on_status,
                "scrub": self._on_scrub,
                **self.requests.handlers(),
                **(cluster.handlers(self.told) if cluster else {}),
                **self.whereabouts.handlers(),
            },
        )
        self.replicas: Replicas | None = None
        """In a cluster, once it serves its peers."""
        self.recovery: dict[str, int] | None = None
        """What the start had to mend, by kind; None where nothing was."""
        self.ready_after_s = 0.0
        self.reports: dict[str, Report] = {"cluster": cluster.report} if cluster else {}
        """What others beside the node say of themselves in its status, by name."""
        self._mount: dict[str, Any] | None = None
        self._started = time.monotonic()

    def _cold_tier(self) -> ColdTier | None:
        """Where the settings name one. Raises NotSupported, Invalid."""
        if not self.config.cold:
            return None
        where = parse(self.config.cold)
        endpoint = connect(where, self.config.cold_endpoint)
        owner, rate = _owner(self.store, self.cluster), self.config.cold_rate
        tier = ColdTier(self.engine, self.files, where, endpoint, owner, rate)
        if self.cluster is not None:
            tier.may_collect = partial(self.cluster.claims.take, "cold")
        self.accounting.has_cold_tier = True
        self.evictor.releaser = Releaser(
            self.engine, self.files, self.index, tier, self.holders.in_use
        )
        return tier

    def _tiering(self) -> Tiering | None:
        """Where data files lie in several places."""
        if not isinstance(self.files, TieredFiles):
            return None
        tiering = Tiering(
            self.store,
            self.engine,
            self.files,
            self.index,
            self.holders,
            lambda: self.accounting.own_free,
        )
        self.accounting.elsewhere = lambda: tiering.elsewhere
        return tiering

    def keep_copies(self, cluster: "Clustered") -> "Replicas":
        """Serve peers and take part in keeping copies; returns what is to be run for that."""
        # A mount says so, and there may be another one later.
        cluster.serve(self.files, self.index, lambda ino: self.holders.is_changed(ino))
        replicas = cluster.keep_copies(
            self.bringing, self.index, self.evictor.evict, self.config.repair_rate
        )
        self.replicas = self.damage.others = replicas
        self.volume.on_published = self._published
        self.volume.acknowledge = replicas.acknowledge
        self.volume.may_lag = cluster.may_lag
        self.whereabouts.join(cluster.member.node, replicas)
        assert cluster.server is not None, "it was just made"
        cluster.server.methods[WHERE] = self.whereabouts.tell
        return replicas

    def _published(self, ino: int, version: int, blocks: int) -> None:
        self.sealer.published(ino, version, blocks)
        if self.replicas is not None:
            self.replicas.published(ino)

    def ready(self) -> None:
        """The node serves: the start ends here."""
        self.ready_after_s = time.monotonic() - self._started

    @contextlib.contextmanager
    def mounted(
        self, changed: Changed, replaced: Callable[[int], None]
    ) -> Iterator[Callable[[object], None]]:
        """While it lasts, a mount hears of changes: let it begin before the mount's first reply,
        which the kernel may remember. `replaced` is told at once of inodes whose content others
        replaced. What it yields takes what describes the mount (a msgspec Struct), once that is
        known."""
        self.invalidators.append(changed)
        self.replaced.append(replaced)
        try:
            yield self._describe_mount
        finally:
            self.invalidators.remove(changed)
            self.replaced.remove(replaced)
            self._mount = None

    def _describe_mount(self, info: object) -> None:
        self._mount = msgspec.to_builtins(info)

    async def changed(self, changes: Sequence[Change]) -> None:
        """Every mount has forgotten these names when it returns, and drops what lost its last link
        by it as soon as nobody holds it. Raises Unavailable."""
        await self._tell_mounts(changes)
        if not self.invalidators:
            unlinked = [change.ino for change in changes if change.ino]
            await self.leftovers.drop(unlinked, before_ns=time.time_ns())

    async def drop(self, inos: Sequence[int]) -> None:
        """Of these, what has lost its last link goes; what somebody holds, with its last holder.
        Raises Unavailable."""
        inodes = await self.engine.read(lambda t: read_inodes(t, inos))
        held = []
        for ino, inode in zip(inos, inodes, strict=True):
            if inode is None or inode.nlink:
                continue
            if self.holders.keep(ino):
                held.append(Change(ino, b"", ino))
            else:
                self.holders.let_go(ino)
                self.volume.drop_later(ino, inode.version)
        if held:
            await self._tell_mounts(held)

    async def told(self, written: Sequence[Written]) -> None:
        """Another process of this host had this committed; every mount has forgotten what was there
        when it returns, and what was published by it has the copies that it promises. Raises
        Unavailable."""
        if changes := self._hear(written):
            await self._tell_mounts(changes)
        if self.replicas is not None and (published := self.replicas.held(written)):
            for ino in published:
                self.replicas.published(ino)
            await self.replicas.acknowledge(published)

    def hear(self, written: Sequence[Written]) -> None:
        """Others committed this, and it is in the mirror: mounts are told soon."""
        self.bringing.applied(written)
        if self.locks is not None:
            self.locks.applied(each.key for each in written)
        if changes := self._hear(written):
            self._heard += changes
            self._hearing.set()

    def _hear(self, written: Sequence[Written]) -> list[Change]:
        """What mounts have to be told."""
        found = self.local.read_now(
            lambda t: heard(t, written, self.known.__contains__, self.holders.keep)
        )
        for ino in found.contents:
            self.holders.let_go(ino)
            if self.holders.keep(ino):
                for replaced in self.replaced:
                    replaced(ino)
        return found.changes

    async def _tell_heard(self) -> None:
        """Tell mounts what was heard, until cancelled."""
        telling = Persistence(log.warning, "a mount may show what others changed, for a while")
        while True:
            await self._hearing.wait()
            self._hearing = trio.Event()
            changes, self._heard = self._heard, []
            await telling.attempt(partial(self._tell_mounts, changes), pause_s=0)

    async def _tell_mounts(self, changes: Sequence[Change]) -> None:
        for invalidate in list(self.invalidators):
            await invalidate(changes)

    def _capacity(self) -> int:
        disk = os.statvfs(self.files.root)
        own = self.config.capacity.of(disk.f_blocks * disk.f_frsize)
        return own + self.accounting.elsewhere()[1]

    def _own_space(self) -> Space:
        return self.local.read_now(self.accounting.census).store

    async def _forget_evicted(self, evicted: Sequence[Evicted]) -> None:
        await self._tell_mounts(
            [Change(parent, name, each.ino) for each in evicted for parent, name in each.names]
        )

    async def space(self, namespace_id: int) -> os.statvfs_result:
        """What statvfs(2) says in a namespace (0: at the root): the truth within the limit there.

        The size is what is used and what is free: space that others on the disk took is neither.
        """
        census = await self.engine.read(self.accounting.census)
        space = census.space(namespace_id)
        within = list(census.namespaces.values())
        if namespace_id in census.namespaces:
            within = [census.namespaces[namespace_id]]
        return _as_statvfs(space, sum(each.inodes for each in within), os.statvfs(self.files.root))

    async def status(self) -> dict[str, Any]:
        """Everything that `kvfs status` shows, in JSON's types; sizes in bytes."""
        listed, census = await self.engine.read(
            lambda t: (spaces.list_all(t), self.accounting.census(t))
        )
        disk = os.statvfs(self.files.root)
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "start_s": self.ready_after_s,
            "uptime_s": time.monotonic() - self._started,
            "rss_bytes": _resident_bytes(),
            "mount": self._mount,
            "store": {
                "path": str(self.store.root),
                "filesystem": filesystem_type(self.store.root),
                "id": self.store.identity.store,
                "used_bytes": census.store.used,
                "free_bytes": census.store.free,
                "capacity_bytes": census.store.capacity,
                "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            },
            "engine": {
                "name": "LMDB",
                "journal_failure": self.local.failure,
                "durability": _durability(self.local),
                **(self.cluster.describe() if self.cluster else {}),
            },
            "recovery": self.recovery,
            "namespaces": [
                _describe(each, census.namespaces[each.id].space.used) for each in listed
            ],
            "scrub": self.scrubber.report(),
            "replicas": self.replicas.report() if self.replicas else None,
            "cold": self._describe_cold(),
            "tiers": self.tiering.describe() if self.tiering else [],
            "counters": {
                **self.evictor.counters,
                **self.sealer.counters,
                **self.scrubber.counters,
                **self.bringing.counters,
                **self.damage.counters,
                **(self.cluster.counters if self.cluster else {}),
                **(self.replicas.counters if self.replicas else {}),
                **(self.locks.counters if self.locks else {}),
                **(self.cold.counters if self.cold else {}),
                **(self.tiering.counters if self.tiering else {}),
            },
            **{name: await report() for name, report in self.reports.items()},
        }

    def _describe_cold(self) -> dict[str, Any] | None:
        if self.cold is None:
            return None
        return {"place": self.config.cold, "answers": not self.cold.is_away}

    async def finish(self) -> None:
        """Write what is held in memory and leave the store in order. Call after the keepers
        ended."""
        self.index.flush()
        try:
            await self.volume.flush_atimes()
            await self.engine.sync()
        except Unavailable as error:
            if self.cluster is None:
                raise
            log.warning("the engine was not told what this node did last: %s", error)
            await self.local.sync()

    async def _on_scrub(self, params: dict[str, Any]) -> dict[str, Any]:
        self.scrubber.ask()
        return {}

    async def _on_status(self, params: dict[str, Any]) -> dict[str, Any]:
        return await self.status()


@contextlib.asynccontextmanager
async def open_node(config: Config) -> AsyncIterator[Node]:
    """A running node: it answers requests on its control socket while the block lasts.

    Raises Invalid (somebody else's directory), Busy (another node has the store), ReadOnly,
    NoSpace, Corrupt, NotSupported. Cancelled: the node stops in order, as at the end of the block.
    """
    store = layout.create_store(config.store)
    store.lock()
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(store.unlock)
        local = EmbeddedEngine(store.meta)
        closing.callback(local.close)
        known = layout.guarded(store.root, lambda: KnownDirectories(store.known))
        closing.callback(known.close)
        ears: list[Callable[[Sequence[Written]], object]] = []
        engine, cluster = await _open_engine(config, store, local, closing, ears)
        await engine.transact(_first_start)
        if cluster is not None:
            await cluster.share_key()
        places.prepare(store, [*config.tier, *config.shared], _owner(store, cluster))
        node = Node(config, store, engine, local, known, cluster)
        closing.callback(node.files.close)
        ears.append(node.hear)
        node.files.keep_spares()
        node.recovery = await recover(
            store,
            engine,
            node.files,
            node.index,
            boot=node.boot,
            now=time.time_ns(),
            clean=store.take_clean(),
            restored=local.restored,
        )
        if node.recovery:
            log.info("mended what the last process left: %s", node.recovery)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.volume.run)
            nursery.start_soon(node.index.run)
            nursery.start_soon(node.sealer.run)
            nursery.start_soon(node.evictor.run)
            nursery.start_soon(node.requests.run)
            nursery.start_soon(node.leftovers.run)
            nursery.start_soon(node.bringing.run)
            nursery.start_soon(node.borrowing.run)
            nursery.start_soon(node.whereabouts.run)
            if node.cluster is not None:
                nursery.start_soon(node.strays.run)
            if node.locks is not None:
                nursery.start_soon(node.locks.run)
            nursery.start_soon(node.scrubber.run)
            if node.cold is not None:
                await nursery.start(node.cold.run)
            if node.tiering is not None:
                await node.evictor.sample()
                await nursery.start(node.tiering.run)
            if cluster is not None:
                nursery.start_soon(node.keep_copies(cluster).run)
                nursery.start_soon(node._tell_heard)
                await nursery.start(cluster.run, node._own_space, node._forget_evicted)
            await nursery.start(node.control.serve)
            yield node
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            if node.tiering is not None:
                node.tiering.ended()
            await node.finish()
            engine.close()
            local.close()
            store.mark_clean()


def _locks(cluster: "Clustered") -> Locks:
    member, engine = cluster.member, cluster.engine
    return Locks(engine, member.node, member.incarnation, member.roster.lives, engine.catch_up)


def _owner(store: layout.Store, cluster: "Clustered | None") -> str:
    """Of what several nodes share."""
    return cluster.member.cluster if cluster else store.identity.store


async def _open_engine(
    config: Config,
    store: layout.Store,
    local: EmbeddedEngine,
    closing: contextlib.AsyncExitStack,
    ears: Sequence[Callable[[Sequence[Written]], object]],
) -> tuple[Engine, "Clustered | None"]:
    """What the node's metadata are in: its own engine, or a mirror of its cluster's, which `ears`
    are told of. Raises Conflict where the store is the other kind of node's, Corrupt where there
    are data and nothing says what they are."""
    if not config.engine:
        refuse_mirror(local)
        if (member := which_node(store)) is not None:
            raise Conflict(
                f"the store {store.root} is node {member.node} of the cluster {member.cluster}:"
                " start it with --engine URL"
            )
        _refuse_lost_metadata(local, store)
        return local, None
    from kvfs.clustered import joined_cluster  # brings the Redis client

    def applied(written: Sequence[Written]) -> None:
        for hear in ears:
            hear(written)

    cluster = await closing.enter_async_context(joined_cluster(config, store, local, applied))
    return cluster.engine, cluster


def _refuse_lost_metadata(engine: EmbeddedEngine, store: layout.Store) -> None:
    """Raises Corrupt where there are data and nothing that says what they are."""
    if engine.read_now(lambda t: t.get(keys.VERSION)) is not None:
        return
    files = data_files(store)
    try:
        if next(files.scan(), None) is not None:
            raise Corrupt(
                f"the metadata of the store {store.root} have gone, its data are there: "
                f"`kvfs rebuild --store {store.root}` makes them anew from these"
            )
    finally:
        files.close()


def _first_start(t: Transaction) -> None:
    """Make what a new store begins with; nothing in an old one."""
    if t.get(keys.VERSION) is not None:
        spaces.check_format(t)
        return
    refuse_unfinished(t)
    now, uid, gid = time.time_ns(), os.geteuid(), os.getegid()
    spaces.format(t, now, uid, gid)
    for name, kind in FIRST_NAMESPACES:
        spaces.create(t, name, kind=kind, uid=uid, gid=gid, now=now)


def _describe(listed: spaces.Listed, used_bytes: int) -> dict[str, Any]:
    return {
        "name": listed.namespace.name.decode(errors="backslashreplace"),
        "kind": listed.namespace.kind,
        "capacity_bytes": listed.namespace.capacity,
        "eviction": listed.namespace.eviction,
        "used_bytes": used_bytes,
        "inodes": listed.usage.inodes,
    }


def _as_statvfs(space: Space, inodes: int, disk: os.statvfs_result) -> os.statvfs_result:
    used, free = -(-space.used // _BLOCK), space.free // _BLOCK
    sizes = (_BLOCK, _BLOCK, used + free, free, free)
    return os.statvfs_result(
        (*sizes, inodes + disk.f_favail, disk.f_favail, disk.f_favail, 0, spaces.MAX_NAME)
    )


def _durability(engine: EmbeddedEngine) -> str:
    if engine.failure:
        return f"a power cut may lose what is written from now on: {engine.failure}"
    return "a kill loses nothing; its journal makes what was synced safe against a power cut"


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
