"""A node's start and its end: its parts start in this order, and stop in the reverse.

| step of the start | state after a kill |
|---|---|
| 1 store made or opened, locked | an empty store, or the old one; the lock goes with the process |
| 2 engine opened (after a power cut rebuilt), first namespaces made | no `clean` marker |
| 3 marker taken, files still written by a mount from before parted, or held | it is done again |
| 4 what the last process left is repaired (`recover`) | it is repaired again |
| 5 keepers (dropper, sealer, evictor) and control socket in a nursery | a dead socket, replaced |

In a cluster step 2 joins it (`cluster_node`), and waits until its engine answers.

The stop runs backwards: keepers end, their memory is flushed, the engine is synced and closed, the
marker written, the lock given back. This module does not know the front doors: they use a Node, and
register with it.
"""

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import trio

from kvfs.base.config import Config
from kvfs.base.errors import Conflict, Corrupt
from kvfs.cluster.change_feed import WrittenKey
from kvfs.cluster.node_identity import which_node
from kvfs.datastore import layout, places
from kvfs.datastore.known_directories import KnownDirectories
from kvfs.datastore.leases.taker import LeaseTaker
from kvfs.datastore.removal_reasons import made_ready
from kvfs.datastore.tiered_files import data_files
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.engine_copy import refuse_unfinished
from kvfs.meta.lmdb.boot import boot_id
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.reserve import give_up_where_full
from kvfs.meta.replica.replica_mark import refuse_replica
from kvfs.node.composition import Node, owner_of
from kvfs.node.recover import recover
from kvfs.node.status import status_of
from kvfs.node.survivors import Survivors
from kvfs.node.tasks.removed_namespace_gc import NamespaceRemoval
from kvfs.tree import namespaces

if TYPE_CHECKING:
    from kvfs.meta.replica.local_namespaces import OnLocal, Then
    from kvfs.meta.replica.local_transaction import LocalChange
    from kvfs.node.cluster_node import Clustered

FIRST_NAMESPACES: Final = ((b"cache", "cache"), (b"models", "durable"))
"""Name and kind of the namespaces that a new store begins with."""
Inherit = Callable[[layout.Store], Survivors | None]
log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_node(config: Config, inherit: Inherit | None = None) -> AsyncIterator[Node]:
    """Runs a node: it answers requests on its control socket while the block lasts. `inherit`, once
    the store is locked, returns what programs have open by a mount that the caller goes on with;
    None: there is no such mount.

    Raises Invalid (another program's directory), Busy (another node has the store), ReadOnly,
    NoSpace, Corrupt, NotSupported. Cancelled: the node stops in order, as at the end of the
    block.
    """
    store = layout.create_store(config.store)
    give_up_where_full(store.meta)
    store.lock()
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(store.unlock)
        survivors = inherit(store) if inherit is not None else None
        local = EmbeddedEngine(store.meta)
        closing.callback(local.close)
        known = layout.guarded(
            store.root, lambda: KnownDirectories(store.known, goes_on=survivors is not None)
        )
        closing.callback(known.close)
        gone = made_ready(store.gone)
        closing.callback(gone.close)
        leases = layout.guarded(store.root, lambda: LeaseTaker.of_node(store.run))
        closing.callback(leases.close)
        ears: list[Callable[[Sequence[WrittenKey]], object]] = []
        local_ears: list[OnLocal] = []
        goes_on = survivors is not None
        engine, cluster = await _open_engine(
            config, store, local, closing, ears, local_ears, goes_on=goes_on
        )
        if await engine.transact(_first_start) and cluster is None:
            local.rotate_now()  # what all else hangs on is in the base, not in a journal alone
        if cluster is None and not local.upgrade_now():
            log.warning(
                "the metadata stay in the form of the version before: a program that runs uses them"
                " too, perhaps of that version; they are upgraded at the next start without one"
            )
        if cluster is not None:
            await cluster.share_key()
        before = _boots_before(store)
        places.prepare(store, [*config.tier, *config.shared], owner_of(store, cluster))
        if survivors is not None:
            closing.callback(survivors.close)
            with contextlib.closing(data_files(store)) as files:
                survivors.hold_drafts(files)
        node = Node(config, store, engine, local, known, gone, leases, cluster)
        if survivors is not None:
            node.hand_over()  # unless it comes to serve
        closing.callback(node.files.close)
        ears.append(node.hear)
        if node.names is not None:
            local_ears.append(node.names.on_local)
        if cluster is not None:
            await _settle_closed(node, cluster)
        node.files.keep_spares()
        clean = store.take_clean()
        if survivors is not None:
            await survivors.hold(node.engine, node.files, node.holders)
        elif not clean and store.recovered_boot() in before:
            await node.former_writers.part(at_once=False)
        node.recovery = await recover(
            store,
            engine,
            node.files,
            node.index,
            boot=node.boot,
            before=before,
            now=time.time_ns(),
            clean=clean,
            restored=local.restored,
            leased=leases.held,
            alive=survivors.alive if survivors is not None else (),
        )
        node.survivors = survivors
        if node.recovery:
            log.info("mended what the last process left: %s", node.recovery)
        await node.quarantine.look()

        async def answer_status(_params: dict[str, Any]) -> dict[str, Any]:
            return await status_of(node)

        async with trio.open_nursery() as nursery:
            await _start_keepers(node, nursery)
            node.control.handlers["status"] = answer_status
            await nursery.start(node.control.serve)
            yield node
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            if node.tiering is not None:
                node.tiering.ended()
            await node.finish()
            engine.close()
            local.close()
            if not node.is_handed_over:
                _mark_clean(store)


async def _settle_closed(node: Node, cluster: "Clustered") -> None:
    """Settles what the last run left closed, before the recovery writes there. Raises KvfsError."""
    from kvfs.node.coherence import peer_ender  # brings the Redis client

    await peer_ender.settle(cluster.engine, node.drop_data)


def _mark_clean(store: layout.Store) -> None:
    try:
        give_up_where_full(store.meta)
        store.mark_clean()
    except OSError as error:  # on a full disk, for one: the next start looks for what is to mend
        log.warning("the store could not be marked as left in order: %s", error)


def _boots_before(store: layout.Store) -> set[int]:
    """Returns the boots that the store's last process took for the running one, if its disks were
    there all the time: those of its places as given then, or, for an earlier version, the kernel's
    id alone."""
    boots = set()
    with contextlib.suppress(Corrupt):
        boots.add(places.boot_of(store))
    if store.recovered_boot() == boot_id():
        boots.add(boot_id())
    return boots


async def _start_keepers(node: Node, nursery: trio.Nursery) -> None:
    """Starts the node's background tasks."""
    nursery.start_soon(node.volume.run)
    nursery.start_soon(node.former_writers.run)
    nursery.start_soon(node.index.run)
    nursery.start_soon(node.sealer.run)
    nursery.start_soon(node.evictor.run)
    nursery.start_soon(node.notices.run)
    nursery.start_soon(node.leftovers.run)
    nursery.start_soon(node.quarantine.run)
    nursery.start_soon(node.transfers.run)
    nursery.start_soon(node.whereabouts.run)
    if node.cluster is not None and node.names is not None:
        nursery.start_soon(node.strays.run)
        nursery.start_soon(node.unsealer.run)
        removal = NamespaceRemoval(
            *(node.cluster.engine, node.files, node.index), node.names.namespace_removed
        )
        nursery.start_soon(removal.run)
    if node.locks is not None:
        nursery.start_soon(node.locks.run)
    if node.appends is not None:
        nursery.start_soon(node.appends.run)
    nursery.start_soon(node.scrubber.run)
    if node.cold is not None:
        await nursery.start(node.cold.run)
    if node.tiering is not None:
        await node.evictor.sample()
        await nursery.start(node.tiering.run)
    if node.cluster is not None:
        nursery.start_soon(node.keep_copies(node.cluster).run)
        nursery.start_soon(node.mounts.run)
        if node.names is not None:
            nursery.start_soon(node.names.run)
        await nursery.start(node.cluster.run, node.own_space, node.mounts.tell_lost)


async def _open_engine(
    config: Config,
    store: layout.Store,
    local: EmbeddedEngine,
    closing: contextlib.AsyncExitStack,
    ears: Sequence[Callable[[Sequence[WrittenKey]], object]],
    local_ears: Sequence["OnLocal"],
    *,
    goes_on: bool,
) -> tuple[Engine, "Clustered | None"]:
    """Returns the engine of the node's metadata: its own, or a replica of its cluster's, of whose
    commits `ears` are told, and `local_ears` of what is this host's alone. `goes_on`: with what its
    last process had open and leased in its cluster. Raises Conflict if the
    store is the other kind of node's, Corrupt if there are data and nothing that says what they
    are."""
    if not config.engine:
        refuse_replica(local)
        if (member := which_node(store)) is not None:
            raise Conflict(
                f"the store {store.root} is node {member.node} of the cluster {member.cluster}:"
                " start it with --engine URL"
            )
        _refuse_lost_metadata(local, store)
        return local, None
    from kvfs.node.cluster_node import joined_cluster  # brings the Redis client

    def applied(written: Sequence[WrittenKey]) -> None:
        for hear in ears:
            hear(written)

    def changing(t: Transaction, changes: Sequence["LocalChange"]) -> "Then":
        if len(local_ears) == 1:
            return local_ears[0](t, changes)
        heard = [hear(t, changes) for hear in local_ears]

        def committed() -> None:
            for then in heard:
                then()

        return committed

    cluster = await closing.enter_async_context(
        joined_cluster(config, store, local, applied, changing, goes_on=goes_on)
    )
    return cluster.engine, cluster


def _refuse_lost_metadata(engine: EmbeddedEngine, store: layout.Store) -> None:
    """Raises Corrupt if there are data and nothing that says what they are."""
    if engine.read_now(lambda t: t.get(keys.VERSION)) is not None:
        return
    with contextlib.closing(data_files(store)) as files:
        if next(chain(files.scan(), files.quarantined()), None) is not None:
            raise Corrupt(
                f"the metadata of the store {store.root} have gone, its data are there: "
                f"`kvfs rebuild --store {store.root}` makes them anew from these"
            )


def _first_start(t: Transaction) -> bool:
    """Makes the first namespaces of a new store; nothing in an old one. Returns whether it was
    new."""
    if t.get(keys.VERSION) is not None:
        namespaces.check_format(t)
        return False
    refuse_unfinished(t)
    now, uid, gid = time.time_ns(), os.geteuid(), os.getegid()
    namespaces.format(t, now, uid, gid)
    for name, kind in FIRST_NAMESPACES:
        namespaces.create(t, name, kind=kind, uid=uid, gid=gid, now=now)
    return True
