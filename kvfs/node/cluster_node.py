"""The parts that a node of a cluster has and a lone one has not, put together: see `composition`
for the rest.

| step of the start | state after a kill |
|---|---|
| 1 the peers' port is bound | nothing |
| 2 joined: number, incarnation, lease (`membership`) | a lease that the next start takes over |
| 3 the replica is whole and follows the engine | a replica that goes on where it was |
| 4 the key of S3's secrets is here | nothing |
| 5 peers are served, the record is entered | the same record, of a node that is away |

Steps 2 and 3 wait for the engine for as long as it takes, and say so once. Only nodes of a cluster
import this module, which needs the Redis client.
"""

import base64
import contextlib
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from kvfs.base.clock import now
from kvfs.base.config import PEER_PORT, Address, Config, PeerTlsMode, Transport
from kvfs.base.control import Handler
from kvfs.base.encryption import KEY_NAME, open_key
from kvfs.base.errors import Busy, Invalid, KvfsError, Unavailable
from kvfs.base.retry import Persistence
from kvfs.cluster.change_feed import WrittenKey, audible
from kvfs.cluster.cluster_requests import ClusterRequests
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.membership import About, Measured, Membership, joined
from kvfs.cluster.node_records import NodeRecord
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress, PeerIdentity
from kvfs.cluster.peer_server import Method, PeerServer
from kvfs.cluster.shared_key import share_key
from kvfs.cluster.tls.peer_tls import PeerTls
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME as INDEX_NAME
from kvfs.datastore.index import Index
from kvfs.datastore.layout import Store
from kvfs.datastore.replica_clock import HeardWriter
from kvfs.http.api import listen
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.node_leases import Lost
from kvfs.meta.records import NAMESPACE_SHIFT, Inode, namespace_of
from kvfs.meta.redis.location import EngineLocation, parse
from kvfs.meta.replica import process_transactions
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.local_namespaces import OnLocal
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.meta.replica.replica_mark import refuse_lone
from kvfs.node.names.peer_names import PeerNames
from kvfs.node.replication import Replicas
from kvfs.node.tasks.copier import Brings
from kvfs.node.tasks.drainer import Evict, Offer
from kvfs.node.tasks.lease_renewer import Renewal
from kvfs.node.tasks.removed_node_gc import Forget, Removal
from kvfs.transfer.chunk_provider import ChunkProvider
from kvfs.transfer.peer_fetches import PeerFetches
from kvfs.transfer.rdma.rdma_transport import Rdma
from kvfs.transfer.rdma.transfer_process import require
from kvfs.tree.changes import Change
from kvfs.tree.private_files import NameState, is_late, settle
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.space_accounting import Space

Told = Callable[[Sequence[WrittenKey]], Awaitable[None]]
_RETRY_S: Final = 1.0
_TELL_S: Final = 0.25
_SPREADING: Final = "spread"
"""The job of giving namespaces shards."""
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104
log = logging.getLogger(__name__)


class _Propose(msgspec.Struct):
    transaction: str
    """A transaction packed by `process_transactions.pack`, in base64."""


class _InNamespace(msgspec.Struct):
    namespace: int
    """The namespace in which a directory is to be removed, or files are to be made."""


class _PerhapsInNamespace(msgspec.Struct):
    namespace: int = 0
    """The namespace that is to be known as well; a process of the version before names none."""
    reading: bool = False
    """Whether it is only read, so that an older state will do where the engine is away."""


class _Keys(msgspec.Struct):
    keys: list[str]
    """Keys of one namespace, in base64."""


class _Job(msgspec.Struct):
    job: str
    """A job that only one node at a time may do."""


class Clustered:
    """A node's part in its cluster. Made by `joined_cluster`."""

    def __init__(
        self,
        member: Membership,
        engine: ReplicaEngine,
        store: Store,
        url: str,
        at: PeerAddress,
        listeners: Sequence[socket.socket],
        look: Callable[[], Awaitable[None]],
        transport: Transport,
        peer_tls: PeerTlsMode,
    ) -> None:
        """`look` is `Renewal.look`."""
        self._look = look
        self._store = store
        self._url = url
        self.member = member
        self.engine = engine
        self.identity = PeerIdentity(member.party, lambda: member.secrets, at)
        roster = member.roster
        self.tls = PeerTls(peer_tls, lambda: member.secrets, member.node, roster.speaks_tls)
        self.peers = PeerClient(self.identity, self.tls)
        self.rdma = Rdma(at.host, self.peers) if transport == "rdma" else None
        """The transport of this name, if it is in use."""
        self.fetches: Final = PeerFetches(
            self.peers,
            member.node,
            self.address,
            lambda: member.holds_lease,
            self.rdma.taking if self.rdma else None,
        )
        self.replicas: Replicas | None = None
        self.names: PeerNames | None = None
        self.server: PeerServer | None = None
        """The server of peers, once there is something to serve."""
        self.claims = Claims(member, engine)
        """Claims of jobs that only one node at a time may do."""
        self._requests = ClusterRequests(
            member, engine, engine.raise_layout, self._fence, engine.follow_all
        )
        self._listeners = listeners

    def handlers(self, told: Told) -> dict[str, Handler]:
        """Returns the methods that its node's control socket serves besides; `told` is given the
        commits of other processes of this host, and returns when mounts have forgotten the earlier
        state."""

        async def propose(params: dict[str, Any]) -> bool:
            asked = msgspec.convert(params, _Propose)
            proposal = process_transactions.unpack(base64.b64decode(asked.transaction))
            if not await self.engine.propose(proposal):
                return False
            reads = proposal.reads
            await told(
                [WrittenKey(key, reads.get(key), new) for key, new in proposal.writes.items()]
            )
            return True

        async def recall(params: dict[str, Any]) -> None:
            await self.engine.recall(msgspec.convert(params, _InNamespace).namespace)

        async def take_numbers(params: dict[str, Any]) -> None:
            await self.engine.take_numbers(msgspec.convert(params, _InNamespace).namespace)

        async def catch_up(params: dict[str, Any]) -> None:
            asked = msgspec.convert(params, _PerhapsInNamespace)
            if asked.reading:
                await self.engine.readable(asked.namespace)
                return
            await self.engine.catch_up()
            if self.engine.shard(asked.namespace):
                await self.engine.catch_up(asked.namespace)

        async def fetch(params: dict[str, Any]) -> list[str | None]:
            names = [base64.b64decode(each) for each in msgspec.convert(params, _Keys).keys]
            found = await self.engine.fetch(names)
            return [None if each is None else base64.b64encode(each).decode() for each in found]

        async def sync(_params: dict[str, Any]) -> None:
            await self.engine.sync()

        async def spread(_params: dict[str, Any]) -> list[str]:
            async with self._spreading():
                moved = await self.engine.spread()
            return self._names_of(moved)

        async def gather(params: dict[str, Any]) -> list[str]:
            number = msgspec.convert(params, _PerhapsInNamespace).namespace
            async with self._spreading():
                moved = await self.engine.gather(number or None)
            return self._names_of(moved)

        async def claim(params: dict[str, Any]) -> bool:
            return await self.claims.take(msgspec.convert(params, _Job).job)

        own: dict[str, Handler] = {"propose": propose, "recall": recall}
        own |= {"take_numbers": take_numbers, "catch_up": catch_up, "spread": spread}
        own |= {"fetch": fetch, "gather": gather}
        return {**own, "sync": sync, "claim": claim, **self._requests.handlers()}

    @contextlib.asynccontextmanager
    async def _spreading(self) -> AsyncIterator[None]:
        """Keeps other nodes from moving namespaces between servers meanwhile. Raises Busy,
        Unavailable."""
        await self.engine.catch_up()  # the node before may have ended just now
        if not await self.claims.take(_SPREADING):
            raise Busy("another node spreads or gathers the namespaces just now")
        try:
            yield
        finally:
            await self.claims.drop(_SPREADING)

    def _names_of(self, numbers: Iterable[int]) -> list[str]:
        found = [self.engine.namespace(each) for each in numbers]
        return [each.name.decode(errors="backslashreplace") for each in found if each]

    async def report(self) -> dict[str, object]:
        """Returns the cluster's part of the node's status."""
        rdma = self.rdma.report() if self.rdma else None
        names = self.names.report() if self.names else None
        told = {"rdma": rdma, "names": names, "tls": self.tls.report()}
        return {**await self._requests.report(), **told}

    @property
    def counters(self) -> dict[str, int]:
        """The counters of traffic to and from other nodes."""
        return {
            **self.fetches.counters,
            **(self.server.counters if self.server else {}),
            **(self.rdma.counters if self.rdma else {}),
            **(self.names.counters if self.names else {}),
        }

    def describe(self) -> dict[str, object]:
        """Returns the engine's part of the node's status."""
        engine = self.engine
        return {
            "name": f"LMDB, a replica of {parse(self._url).shown}",
            "server": engine.server,
            "position": engine.position,
            "round_trips": engine.round_trips,
            "unplaced_files": engine.unplaced,
            "is_full": engine.is_full,
            "mirror_refusal": engine.refusal,
            "silent_s": engine.silent_s,
            "is_away": engine.is_away,
            "loss": engine.loss,
            "shards": [{**each, "name": self._name_of(each)} for each in engine.shards()],
        }

    async def _fence(self, removed: Sequence[NodeRecord]) -> None:
        """Keeps removed nodes from joining, and from committing in any shard; idempotent. Raises
        Unavailable when it was done in all shards that could be reached."""
        for each in removed:
            await self.member.fence(each.number, each.store)
        await self.engine.fence([each.number for each in removed])

    def _name_of(self, shard: dict[str, object]) -> str:
        """Returns the name of a shard's namespace; empty: it was removed."""
        record = self.engine.namespace(int(str(shard["namespace"])))
        return "" if record is None else record.name.decode(errors="backslashreplace")

    async def share_key(self) -> None:
        """Puts the cluster's key of secrets into the store: step 4. Raises what `share_key`
        raises."""
        await share_key(self.engine, self._store.root / KEY_NAME, self.member.secrets)

    def address(self, node: int) -> PeerAddress | None:
        """Returns the address at which its peers reach a living node."""
        found = self.member.roster.get(node)
        if found is None or not found.alive or not found.peer:
            return None
        host, _, port = found.peer.rpartition(":")
        return PeerAddress(node, host.removeprefix("[").removesuffix("]"), int(port))

    def returns(self, nodes: Sequence[int]) -> bool:
        """Returns whether one of these nodes is about to be back if its daemon has just died."""
        found = [self.member.roster.get(node) for node in nodes]
        return any(each is not None and each.alive and each.returns for each in found)

    async def look_again(self, nodes: Sequence[int]) -> bool:
        """Looks which nodes are there now, before these are believed to be away; returns whether
        one of them has come, or has another address than was known. Raises KvfsError."""
        before = [self.address(node) for node in nodes]
        await self._look()
        return [self.address(node) for node in nodes] != before

    def serve(
        self,
        files: DataFiles,
        index: Index,
        is_changed: Callable[[int], bool],
        replicas: Replicas,
        methods: Mapping[str, Method],
        names: PeerNames,
    ) -> PeerServer:
        """Returns the server of this node's data; `run` starts it. `is_changed`: as for
        `ChunkProvider`. `methods`: further ones for peers; `names` has those that need no
        lease."""
        shelf = ChunkProvider(files, index, self.fetches, is_changed)
        own = self.rdma.methods if self.rdma else {}
        self.server = PeerServer(
            self.identity,
            shelf,
            lambda: self.member.holds_lease,
            replicas.demanded,
            {**own, **replicas.methods, **methods, **names.methods},
            self.rdma.lending if self.rdma else None,
            unleased={*names.methods, *own},
            is_own=names.is_kept,
            tls=self.tls,
        )
        return self.server

    def keep_names(
        self,
        files: DataFiles,
        holders: Holders,
        give_up: Callable[[int, Inode], Awaitable[object]],
        is_coming: Callable[[int], bool],
        forget: Callable[[Sequence[Change]], Awaitable[None]],
        most_names: int,
        drop_data: Callable[[Sequence[tuple[int, int]]], object],
    ) -> PeerNames:
        """Returns this node's part in names that nodes keep themselves; whoever has it runs it."""
        self.names = PeerNames(
            *(self.engine, self.member, self.peers, files, holders, give_up),
            *(is_coming, forget, self._store.root),
            lambda: open_key(self._store.root / KEY_NAME).derived(b"fingerprints of names"),
            *(self.claims, most_names, drop_data),
        )
        return self.names

    def keep_copies(
        self, brings: Brings, index: Index, evict: Evict, offer: Offer, bytes_per_s: int
    ) -> Replicas:
        """This node's part in keeping copies; whoever has it runs it."""
        self.replicas = Replicas(
            self.engine, self.member, self.peers, brings, index, evict, offer, bytes_per_s
        )
        return self.replicas

    async def run(
        self,
        space: Callable[[], Space],
        forget: Forget,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serves and asks peers, until cancelled; started when this node's record is entered.
        Raises NotSupported if the transport does not start.

        Others are told the `space` of the store. `forget` makes mounts forget files that were
        evicted with a removed node."""
        assert self.server is not None, "serve comes first"
        try:
            async with trio.open_nursery() as nursery:
                if self.rdma is not None:
                    await nursery.start(self.rdma.run)
                await nursery.start(self.fetches.run)
                await nursery.start(self.server.serve, self._listeners)
                await self.member.announce(self.engine, lambda: _measured(space(), self.replicas))
                nursery.start_soon(Removal(self.engine, self.claims, forget, self._fence).run)
                task_status.started()
                nursery.start_soon(self._tell_heard)
                await trio.sleep_forever()
        finally:
            self.peers.close()

    async def _tell_heard(self) -> None:
        """Tells other processes of the host how new the replica is."""
        telling = Persistence(log.warning, "how new the metadata replica is cannot be told")

        async def tell() -> None:
            heard.tell(self.engine.heard_at(), self.engine.heard_apart())

        with contextlib.closing(HeardWriter(self._store.heard)) as heard:
            await telling.repeat(tell, _TELL_S)


@contextlib.asynccontextmanager
async def joined_cluster(
    config: Config,
    store: Store,
    local: EmbeddedEngine,
    on_applied: Callable[[Sequence[WrittenKey]], None],
    on_local: OnLocal,
    *,
    goes_on: bool,
) -> AsyncIterator[Clustered]:
    """Makes this node a member of the cluster of `config.engine`, whose metadata `local`
    replicates, as long as the block lasts. `on_local` is told what this host changes in namespaces
    whose names are each node's own.

    `goes_on`: as for `membership.joined`. Raises what that raises, except Unavailable, and what
    `ReplicaEngine.run` raises; Busy, Invalid (the peers' port), NotSupported (the transport). While
    the block runs: Fenced, when this node was removed from its cluster.
    """
    location = parse(config.engine)
    refuse_lone(local)
    if config.transport == "rdma":
        require()
    async with contextlib.AsyncExitStack() as stack:
        listeners = await trio.to_thread.run_sync(_listen, config, location)
        for each in listeners:
            stack.callback(each.close)
        host, port = _advertised(config, location, listeners[0].getsockname()[1])
        disk = os.statvfs(store.data)
        capacity = config.capacity.of(disk.f_blocks * disk.f_frsize)
        about = About(
            name=config.node_name,
            peer=str(Address(host, port)),
            zone=config.zone,
            rack=config.rack,
            media=_media(config),
            capacity_bytes=capacity,
            tls=config.peer_tls != "off",
        )
        member = await _join(stack, config, store, about, goes_on=goes_on)

        def heard(applied: Sequence[Applied]) -> None:
            written = audible(applied)
            on_applied(written)
            if any(each.key[:1] == keys.NODES for each in written):
                renewal.wake()

        engine = ReplicaEngine(
            local,
            config.engine,
            node=member.node,
            incarnation=member.incarnation,
            cluster=member.cluster,
            on_applied=heard,
            settle=_settle,
            is_alive=member.roster.lives,
            on_local=on_local,
            must_follow=_kept(config, local),
        )
        renewal = Renewal(member, engine)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(renewal.run)
        await nursery.start(engine.run)
        try:
            at = PeerAddress(member.node, host, port)
            yield Clustered(
                *(member, engine, store, config.engine, at, listeners, renewal.look),
                *(config.transport, config.peer_tls),
            )
        finally:
            with trio.CancelScope(shield=True), contextlib.suppress(KvfsError):
                await engine.leave()
            nursery.cancel_scope.cancel()


def _kept(config: Config, local: EmbeddedEngine) -> Callable[[int], bool]:
    """Returns which namespaces this node follows, used or not: all if it has a cold tier, of which
    it may be the one that clears it up; else those of which it has data files."""
    index = Index(local.database(INDEX_NAME))

    def must_follow(namespace_id: int) -> bool:
        first = namespace_id << NAMESPACE_SHIFT
        return bool(config.cold) or any(
            namespace_of(ino) == namespace_id for ino, _ in index.entries(first, 1)
        )

    return must_follow


async def _join(
    stack: contextlib.AsyncExitStack,
    config: Config,
    store: Store,
    about: About,
    *,
    goes_on: bool,
) -> Membership:
    secret_file = Path(config.secret_file) if config.secret_file else None
    complained = False
    while True:
        try:
            return await stack.enter_async_context(
                joined(
                    *(store, config.engine, about),
                    secret_file=secret_file,
                    founds=config.found,
                    goes_on=goes_on,
                )
            )
        except Lost:
            raise
        except Unavailable as error:
            if not complained:
                log.warning("%s; it is tried again until it answers", error)
            complained = True
            await trio.sleep(_RETRY_S)


def _settle(t: Transaction, ino: int, closed_at: float) -> bool:
    state = settle(t, ino, time.time_ns(), yields=is_late(closed_at, now()))
    return state is NameState.OWN


def _media(config: Config) -> tuple[str, ...]:
    """Returns the media that this node lends."""
    return tuple(sorted({"ssd", *(each.medium for each in (*config.tier, *config.shared))}))


def _listen(config: Config, location: EngineLocation) -> list[socket.socket]:
    """Returns listeners for peers: by default at the address by which this host reaches the engine,
    so that a node whose engine is on its own host serves no other host. Raises Busy, Invalid."""
    where = config.peer
    if not isinstance(where, Address):
        where = Address(_own_address(location), PEER_PORT)
    try:
        return listen(where.host, where.port)
    except socket.gaierror as error:
        raise Invalid(f"peer {where}: {error.strerror}") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise Invalid(f"peer {where}: {error.strerror}") from error
        if config.peer == "auto":
            return listen(where.host, 0)
        raise Busy(f"another program listens at {where}: choose another port (--peer)") from error


def _advertised(config: Config, location: EngineLocation, port: int) -> tuple[str, int]:
    """Returns host and port by which others reach `port` here."""
    if config.advertise:
        host, colon, named = config.advertise.rpartition(":")
        if colon and "]" not in named:
            return host.removeprefix("[").removesuffix("]"), int(named)
        return config.advertise.removeprefix("[").removesuffix("]"), port
    if isinstance(config.peer, Address) and config.peer.host not in _EVERYWHERE:
        return config.peer.host, port
    return _own_address(location), port


def _own_address(location: EngineLocation) -> str:
    """Returns the address by which this host reaches the engine, as the one by which others most
    likely reach this host. With a socket of this host, all nodes are on it."""
    for address in location.addresses:
        if address.path:
            return "127.0.0.1"
        with contextlib.suppress(OSError):
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, where = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
    return "127.0.0.1"


def _measured(space: Space, replicas: Replicas | None) -> Measured:
    load = min(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1.0)
    if replicas is None:
        return Measured(space.free, space.capacity, load)
    return Measured(space.free, space.capacity, load, replicas.lacking, replicas.obstacle)
