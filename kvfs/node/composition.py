"""The parts of a node, put together: what they are, and what each knows of others. They run in
`startup`."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvfs.base import descriptors
from kvfs.base.config import Config
from kvfs.base.control import ControlServer
from kvfs.base.descriptors import OpenFileShares
from kvfs.base.errors import Unavailable
from kvfs.base.version import KEEPS_TAGS
from kvfs.cluster.change_feed import WrittenKey
from kvfs.cluster.cluster_locks import Locks
from kvfs.cluster.coherence import Coherence
from kvfs.datastore import layout, places
from kvfs.datastore.index import NAME as INDEX_NAME
from kvfs.datastore.index import Index
from kvfs.datastore.known_directories import KnownDirectories
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.datastore.removal_reasons import GoneNames
from kvfs.datastore.tiered_files import TieredFiles, data_files
from kvfs.meta import schema
from kvfs.meta.engine import Engine, NearEngine
from kvfs.meta.lmdb.disk_usage import metadata_bytes
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import namespace_of
from kvfs.node.append_leases import AppendLeases
from kvfs.node.client_requests import LeftNotices, handlers
from kvfs.node.former_writers import FormerWriters
from kvfs.node.local_port import LocalPort, NoOthers
from kvfs.node.locate import WHERE, Whereabouts
from kvfs.node.mounts import Mounts
from kvfs.node.survivors import Survivors
from kvfs.node.tasks.cold_tier import ColdTier, connect
from kvfs.node.tasks.damaged_files import DamagedFiles
from kvfs.node.tasks.eviction.cold_offload import Releaser
from kvfs.node.tasks.eviction.evictor import Evictor
from kvfs.node.tasks.eviction.surplus_replicas import Spare
from kvfs.node.tasks.orphan_gc import Leftovers
from kvfs.node.tasks.scrubber import Scrubber
from kvfs.node.tasks.sealer import Sealer
from kvfs.node.tasks.stale_data_gc import Strays
from kvfs.node.tasks.tier_mover import Tiering
from kvfs.node.tasks.unsealer import Unsealer
from kvfs.transfer.cold.endpoint import parse
from kvfs.transfer.origins import FileOrigins
from kvfs.transfer.transfers import Transfers
from kvfs.tree.changes import Change
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.missing_data import Missing
from kvfs.vfs.quarantine import Quarantine
from kvfs.vfs.space_accounting import STORE, Accounting, NodeSpace, Space
from kvfs.vfs.volume import Volume

if TYPE_CHECKING:
    from kvfs.node.cluster_node import Clustered
    from kvfs.node.names.peer_names import PeerNames
    from kvfs.node.replication import Replicas
    from kvfs.node.siblings.peer_spares import PeerSpares

log = logging.getLogger(__name__)

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
        gone: GoneNames,
        leases: LeaseTaker,
        cluster: "Clustered | None",
    ) -> None:
        """`local`: the embedded engine itself, which in a cluster is the replica's file."""
        self.near: NearEngine = cluster.engine if cluster else local
        self.config = config
        self.store = store
        self.engine = engine
        self.local = local
        self.cluster = cluster
        self.coherence = Coherence(cluster.engine) if cluster else None
        """The coherence of a node of a cluster; a lone one believes itself."""
        self.boot = places.boot_of(store)
        self.files = data_files(store)
        self.former_writers = FormerWriters(engine, self.files)
        self.index = Index(local.database(INDEX_NAME))
        self.holders = Holders()
        self.leases = leases
        """The leases of clients on data files."""
        self.open_file_shares = OpenFileShares(descriptors.limit(), is_shared=config.allow_other)
        self.locks = _locks(cluster) if cluster else None
        """The locks of the mount's processes, in a cluster."""
        self.appends = self._append_leases(cluster) if cluster else None
        self.known = known
        self.mounts = mounts = Mounts(local, known, gone, self.holders)
        self.sealer = sealer = Sealer(
            *(engine, self.files, self.index),
            lambda ino: self.holders.writes(ino) or self._is_closed(ino),
        )
        self.volume = Volume(
            engine,
            self.files,
            self.index,
            self.holders,
            on_lost=lambda lost: mounts.remember([lost]),
            why_lost="unavailable" if cluster or config.cold else "damaged",
            published=self._published if cluster else sealer.published,
            acknowledge=self._acknowledge,
            known=cluster.engine.known if cluster else None,
            may_lag=cluster.engine.may_lag if cluster else None,
            lapses=cluster.member.lapses if cluster else None,
            sync_local=local.sync if cluster else None,
            leased=leases.held,
        )
        self.names = self._peer_names(cluster) if cluster else None
        """The names that nodes keep themselves, in a cluster."""
        self.quarantine = quarantine = Quarantine(self.files, self.index)
        self.accounting = Accounting(
            self.files.root,
            config.capacity,
            self.holders.writers,
            metadata=lambda: metadata_bytes(store.meta),
            quarantined=lambda: quarantine.used.beside,
            sealing=lambda: sealer.open_in,
            local=self._local_space if cluster else None,
            elsewhere=lambda: self.tiering.elsewhere if self.tiering else (0, 0),
            has_cold_tier=bool(config.cold),
        )
        self.cold = self._cold_tier()
        self.cold_blocks = self.names.keep_cold(self.cold) if self.names and self.cold else None
        """The cold tier as a holder of blocks, in a cluster."""
        self.evictor = Evictor(
            engine,
            self.files,
            self.index,
            self.holders,
            self.accounting,
            leases,
            on_removed=mounts.tell_evicted,
            on_evicted=mounts.remember,
            spare=Spare(cluster.member.roster.lives) if cluster else None,
            releaser=self._releaser(),
            is_kept=self._is_kept,
            spares=self._spares,
            cold_blocks=self.cold_blocks,
        )
        self.leftovers = Leftovers(engine, self.files, self.holders, self.volume.drop_later)
        self.tiering = self._tiering()
        self.transfers = Transfers(
            engine,
            self.files,
            self.index,
            self.volume,
            lambda size: self.evictor.room_for(STORE, size),
            FileOrigins(
                engine,
                self.volume,
                peers=cluster.fetches if cluster else None,
                look_again=cluster.look_again if cluster else None,
                returns=cluster.returns if cluster else lambda _nodes: False,
                cold=self.cold.fetch if self.cold else None,
                stale=self.names.finder.lost if self.names else lambda _ino: None,
                cold_names=self.cold_blocks.fetch if self.cold_blocks else None,
            ),
        )
        self.strays = Strays(engine, self.files, self.index, self.holders, leases.held)
        self.damage = DamagedFiles(
            *(engine, self.files, self.holders, self.mounts.tell_lost, self.drop),
            others=lambda: self.replicas,
        )
        self.unsealer = Unsealer(engine, self.files, self.holders.writes)
        self.missing = Missing(
            engine,
            self.files,
            self.volume.give_up,
            self.damage.found,
            self.damage.unreadable,
            lambda: self.transfers.is_possible,
            self.unsealer.is_written,
        )
        self.port = LocalPort(
            engine,
            self.index,
            self.holders,
            self.sealer,
            self.evictor,
            self.transfers,
            self.missing,
            lambda: self.accounting.capacity,
            self.changed,
            self.drop,
            self.names or NoOthers(),
        )
        if cluster is not None:
            cluster.engine.hold = self._hold
        self.notices = LeftNotices(engine, self.changed)
        self.scrubber = Scrubber(
            engine, self.files, self.index, self.damage.found, config.scrub_rate
        )
        self.whereabouts = Whereabouts(
            engine,
            self.files,
            self.transfers.share,
            self.transfers.bring,
            config.cold,
        )
        self.control = ControlServer(
            store.socket,
            {
                "scrub": self._on_scrub,
                **handlers(self.port),
                **(cluster.handlers(self.told) if cluster else {}),
                **self.whereabouts.handlers(),
            },
            self._oldest_program,
        )
        self.replicas: Replicas | None = None
        """The replication in a cluster, once it serves its peers."""
        self.recovery: dict[str, int] | None = None
        """The repairs of the start, by kind; None if there were none."""
        self.survivors: Survivors | None = None
        """The files that programs have open by a mount that outlived its daemon."""
        self.is_handed_over = False
        """Whether the mount outlives this node, and the next one goes on with its files."""
        self.ready_after_s = 0.0
        self.reports: dict[str, Report] = {"cluster": cluster.report} if cluster else {}
        """Reports of others beside the node for its status, by name."""
        self.started = time.monotonic()

    def _oldest_program(self) -> int:
        """Returns the version of the control socket from which on a program understands what it
        reads and writes beside the node: in a cluster other nodes may have changed its form."""
        keeps_tags = self.cluster is not None and self.local.read_now(schema.has_tags)
        return KEEPS_TAGS if keeps_tags else 0

    async def _hold(self, ino: int) -> None:
        """Brings a file's data here and records them. Raises what `NodePort.bring` raises."""
        while (state := await self.port.bring(ino)) != "here":
            if state == "nowhere":
                raise Unavailable("data of other nodes cannot come here")
        await self.transfers.recorded(ino)

    def _append_leases(self, cluster: "Clustered") -> AppendLeases:
        member = cluster.member
        return AppendLeases(
            self.engine, member.node, member.since, member.roster.keeps, self.is_strict
        )

    def _peer_names(self, cluster: "Clustered") -> "PeerNames":
        return cluster.keep_names(
            *(self.files, self.holders, self.volume.give_up),
            lambda ino: self.transfers.is_coming(ino),
            *(self.changed, self.config.names_everywhere, self.drop_data),
        )

    def drop_data(self, names: Sequence[tuple[int, int]]) -> None:
        """Drops data files, by number and version, whose content does not count any more; one that
        is being written here gets another version when it is closed. Raises OSError."""
        held = self.leases.held([ino for ino, _ in names])
        doomed = [
            each for each in names if not self.holders.writes(each[0]) and each[0] not in held
        ]
        for ino, version in doomed:
            self.holders.let_go(ino)
            self.files.unlink(ino, version)
        self.index.remove([ino for ino, _ in doomed])

    def _is_closed(self, ino: int) -> bool:
        """Returns whether nothing may be changed in the namespace of an inode now."""
        return self.cluster is not None and self.cluster.engine.ending.is_closed(namespace_of(ino))

    def _is_kept(self, ino: int) -> bool:
        """Returns whether another node was told of a file a moment ago and may come for it, or was
        promised that this copy stays, or nothing may be changed there now."""
        if self.names is None:
            return False
        if self._is_closed(ino):
            return True
        spares = self._spares()
        return self.names.leases.holds(ino) or (spares is not None and spares.keeps(ino))

    def _spares(self) -> "PeerSpares | None":
        siblings = self.names.siblings if self.names else None
        return siblings.spares if siblings else None

    def _cold_tier(self) -> ColdTier | None:
        """Returns the cold tier, if the settings name one. Raises NotSupported, Invalid."""
        if not self.config.cold:
            return None
        where = parse(self.config.cold)
        endpoint = connect(where, self.config.cold_endpoint)
        owner, rate = owner_of(self.store, self.cluster), self.config.cold_rate
        take = partial(self.cluster.claims.take, "cold") if self.cluster else _always
        return ColdTier(self.engine, self.files, where, endpoint, owner, rate, take)

    def _releaser(self) -> Releaser | None:
        """Returns what sends files to the cold tier in place of their eviction, if there is one."""
        if self.cold is None:
            return None
        return Releaser(self.engine, self.files, self.index, self.cold, self.holders.in_use)

    def _tiering(self) -> Tiering | None:
        """Returns the tiering, if data files lie in several places."""
        if not isinstance(self.files, TieredFiles):
            return None
        return Tiering(
            self.store,
            self.engine,
            self.files,
            self.index,
            self.holders,
            lambda: self.accounting.own_free,
            self.leases,
        )

    def keep_copies(self, cluster: "Clustered") -> "Replicas":
        """Serves peers and takes part in keeping copies; returns what is to be run for that."""
        assert self.names is not None, "the node is one of a cluster"
        siblings = self.names.keep_copies(
            *(self.files, self.holders.is_changed, self.transfers, self.index.touch),
            self.config.repair_rate,
        )
        replicas = cluster.keep_copies(
            *(self.transfers, self.index, self.evictor.evict, siblings.give),
            self.config.repair_rate,
        )
        cluster.serve(
            self.files,
            self.index,
            self.holders.is_changed,
            replicas,
            {WHERE: self.whereabouts.tell},
            self.names,
        )
        self.replicas = replicas
        self.whereabouts.join(cluster.member.node, replicas)
        return replicas

    async def _acknowledge(self, inos: Sequence[int]) -> None:
        if self.replicas is not None:
            await self.replicas.acknowledge(inos)
        if self.names is not None and self.names.siblings is not None:
            await self.names.siblings.acknowledge(inos)

    def _local_space(self) -> NodeSpace:
        coming = self.transfers
        return NodeSpace(self.index.used_bytes(), coming.coming_bytes, coming.settles)

    def _published(self, ino: int, version: int, blocks: int) -> None:
        self.sealer.published(ino, version, blocks)
        if self.replicas is not None:
            self.replicas.published(ino)

    def hand_over(self) -> None:
        """Leaves mount, store and lease to the next daemon when this node stops."""
        self._set_handed_over(True)

    def _set_handed_over(self, value: bool) -> None:
        self.is_handed_over = value
        if self.cluster is not None:
            self.cluster.member.is_handed_over = value

    def ready(self) -> None:
        """Ends the start: the node serves, and nothing is left to the next daemon any more."""
        self.ready_after_s = time.monotonic() - self.started
        self._set_handed_over(False)

    def tell_return(self, *, returns: bool) -> None:
        """Has the cluster know whether another daemon follows this one when it dies."""
        if self.cluster is not None:
            self.cluster.member.returns = returns

    async def changed(self, changes: Sequence[Change]) -> None:
        """Returns when every mount has forgotten these names, and drops each inode that lost its
        last link by it as soon as nobody holds it. Raises Unavailable."""
        await self.mounts.tell(changes)
        if not self.mounts:
            unlinked = [change.ino for change in changes if change.ino]
            await self.leftovers.drop(unlinked, before_ns=time.time_ns())

    async def drop(self, inos: Sequence[int]) -> None:
        """Drops those of these inodes that have lost their last link; one that is held goes with
        its last holder. Raises Unavailable."""
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
            await self.mounts.tell(held)

    async def told(self, written: Sequence[WrittenKey]) -> None:
        """Handles a commit of another process of this host: returns when every mount has forgotten
        the earlier state, and published files have the copies that they promise. Raises
        Unavailable."""
        if changes := self.mounts.follows(written):
            await self.mounts.tell(changes)
        if self.replicas is not None and (published := self.replicas.held(written)):
            for ino in published:
                self.replicas.published(ino)
            await self._acknowledge(published)

    def hear(self, written: Sequence[WrittenKey]) -> None:
        """Handles a commit of others that is in the replica: mounts are told soon."""
        self.transfers.outdated.applied(written)
        if self.locks is not None:
            self.locks.applied(each.key for each in written)
        if self.replicas is not None:
            self.replicas.heard(written)
        if self.appends is not None:
            self.appends.applied(each.key for each in written)
        self.unsealer.applied(each.key for each in written)
        if self.names is not None:
            self.names.heard(written)
        self.mounts.tell_soon(written)

    def is_strict(self, ino: int) -> bool:
        """Returns whether other hosts see each change in the namespace of this inode at once."""
        return self.coherence is not None and self.coherence.is_strict(namespace_of(ino))

    def own_space(self) -> Space:
        """Returns the space of the store, as this node knows it."""
        return self.local.read_now(self.accounting.census).store

    async def space(self, namespace_id: int) -> os.statvfs_result:
        """Returns the answer of statvfs(2) in a namespace (0: at the root). Raises Unavailable."""
        census = await self.engine.read(self.accounting.census)
        return census.statvfs(namespace_id, os.statvfs(self.files.root))

    async def finish(self) -> None:
        """Writes what is held in memory and leaves the store in order. To be called after the
        keepers ended."""
        self.index.flush()
        try:
            await self.volume.flush_atimes()
            await self.sealer.sync_durable()
            await self.engine.sync()
        except Unavailable as error:
            if self.cluster is None:
                raise
            log.warning("the engine was not told what this node did last: %s", error)
            await self.local.sync()
        if self.names is not None:
            self.names.close()

    async def _on_scrub(self, _params: dict[str, Any]) -> dict[str, Any]:
        self.scrubber.ask()
        return {}


def _locks(cluster: "Clustered") -> Locks:
    member, engine = cluster.member, cluster.engine
    return Locks(engine, member.node, member.since, member.roster.keeps, engine.catch_up)


async def _always() -> bool:
    """Stands in for the claim of a job where this node is the only one."""
    return True


def owner_of(store: layout.Store, cluster: "Clustered | None") -> str:
    """Returns the owner of parts that several nodes share: the cluster, or the lone store."""
    return cluster.member.cluster if cluster else store.identity.store
