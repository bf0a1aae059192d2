"""A node's part in namespaces that are kept by their nodes (coherence `peer`), put together.

What needs memory, and numpy, is made with the first such namespace, or with the first message about
one: a cluster without any pays nothing.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trio

from kvfs.base.errors import KvfsError, NotEmpty
from kvfs.base.retry import Persistence
from kvfs.cluster import placement_view
from kvfs.cluster.handshake import Party
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.membership import Membership
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_server import Method
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.boot import boot_of
from kvfs.meta.records import Inode, namespace_of
from kvfs.meta.replica.local_namespaces import Then
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.coherence.coherence_changer import CoherenceChanger
from kvfs.node.coherence.peer_ender import PeerEnder
from kvfs.node.coherence.peer_teller import PeerTeller
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.directory_removals import DirectoryRemovals
from kvfs.node.names.name_finder import Learn, NameFinder
from kvfs.node.names.name_holder import NameHolder
from kvfs.node.names.name_leases import NameLeases
from kvfs.node.names.name_lister import NameLister
from kvfs.node.names.name_members import COLD
from kvfs.node.names.name_protocol import (
    ASK,
    ASK_HOMES,
    ASK_REMOVED,
    CONFIRM,
    LIST,
    TELL,
    News,
)
from kvfs.node.names.name_questions import NameQuestions
from kvfs.node.names.removals import Removals
from kvfs.node.names.tombstones import Tombstones
from kvfs.node.names.usage_reporter import UsageReporter
from kvfs.node.siblings.block_copies import BlockCopies
from kvfs.node.siblings.copy_taker import CopyBrings
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.tasks.cold_tier import ColdTier
from kvfs.policy.answers_ahead import KEPT_S
from kvfs.tree.changes import Change
from kvfs.tree.copies import held_names
from kvfs.tree.copies.peer_directories import access, along
from kvfs.vfs.inode_holders import Holders

if TYPE_CHECKING:
    from kvfs.node.homes.home_protocol import ToldHolders
    from kvfs.node.names.name_sets import NameSets
    from kvfs.node.siblings.cold_blocks import ColdBlocks

log = logging.getLogger(__name__)
_ENTRY: Final = keys.ENTRY[0]
OWN_SET: Final = "names."
_COLD_SET: Final = "cold-"
_LISTED: Final = 65_536
"""Listed paths that are remembered until their nodes' announcements come."""
_LOOK_S: Final = 1.0
"""Time after which a node without such a namespace looks whether there is one now."""


class PeerNames:
    """The names that one node keeps, and those that it finds on others."""

    def __init__(
        self,
        engine: ReplicaEngine,
        member: Membership,
        peers: PeerClient,
        files: DataFiles,
        holders: Holders,
        give_up: Callable[[int, Inode], Awaitable[object]],
        is_coming: Callable[[int], bool],
        forget: Callable[[Sequence[Change]], Awaitable[None]],
        store: Path,
        secret: Callable[[], bytes],
        jobs: Claims,
        most_names: int,
        drop_data: Callable[[Sequence[tuple[int, int]]], object],
    ) -> None:
        """`most_names`: those of which each node knows who holds them. `store`: the directory of
        the file that remembers what this node announced. `secret`: one that all nodes have, and
        nobody else. `drop_data` drops data files by number and version. `give_up` forgets a record
        whose data nobody has. `is_coming`: whether data of an inode are on their way here. `forget`
        makes mounts forget names, and drops files that lost their last one."""
        self._engine = engine
        self._member = member
        self._peers = peers
        self._store = store
        self._secret = secret
        self._jobs = jobs
        self._most_names = most_names
        self._differing = DifferingNames()
        self._is_in_use, self._forget = holders.in_use, forget
        self._sets: NameSets | None = None
        self._nursery: trio.Nursery | None = None
        self._telling = Persistence(log.warning, "other nodes are not told what changed here")
        self._has_missed = False
        """Whether names changed while there were no sets: the file of an earlier run lacks that."""
        self._paths = DirectoryPaths(engine.local)
        self._stones = Tombstones(engine.local, cluster_ns=member.clock)
        self._removals = Removals(
            *(engine, member.node, self._paths, self._stones, self._may_be_elsewhere),
            *(lambda made: self.sets.removal_exchange.tell(made), forget),
        )
        self._removals.is_closed = engine.ending.is_closed
        self.leases: Final = NameLeases(trio.current_time)
        self._holder = NameHolder(
            *(engine, files, holders, self.leases),
            self._stones.renews,
            lambda *name: self.sets.announcer.denied(*name),
            lambda *paths: self.sets.announcer.told(*paths),
        )
        self._questions = NameQuestions(self._call, peers.ahead.wanted)
        self.usage: Final = UsageReporter(engine)

        def is_in_use(ino: int) -> bool:
            return holders.keep(ino) or not holders.is_recorded(ino) or is_coming(ino)

        self.siblings: BlockCopies | None = None
        """The copies of blocks, once they are kept."""
        self.cold: ColdBlocks | None = None
        """The cold tier as a holder of blocks, on a node that has one."""
        self.finder: Final = NameFinder(
            *(engine, member.node, is_in_use, self._paths, self._claims, self._learn),
            self._questions,
            lambda *asked: self._lister.pages(*asked),
            *(self._stones, give_up),
        )
        self.finder.until_open = self._until_open
        self._changer = CoherenceChanger(
            *(engine, jobs, lambda: self.sets, member.roster.lives, is_in_use, self.finder.fade)
        )
        self._ender = PeerEnder(
            *(engine, jobs, member.roster.lives),
            PeerTeller(engine, self._stones, self._differing),
            *(drop_data, self._ended),
        )
        self._listed: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        """Paths that were listed before this node knew that they are held, and their holders."""
        self.find: Final = self.finder.find
        self._lister = NameLister(
            self._holders_below,
            *(self._claims, self._questions, self._call, self._stones),
            *(self._heard_of, lambda *path: engine.read_now(lambda t: access(along(t, *path)))),
        )
        self._directory_removals = DirectoryRemovals(
            *(member.node, self._lister, self._stones, self._may_be_elsewhere),
            lambda made: self.sets.removal_exchange.tell(made),
        )
        self.listed: Final = self._lister.pages
        self._methods: Final[Mapping[str, Method]] = {
            CONFIRM: self._holder.confirm,
            LIST: self._holder.list_names,
            TELL: self._told,
            ASK: self._asked,
            ASK_REMOVED: self._asked_removed,
            ASK_HOMES: self._asked_homes,
        }

    def keep_copies(
        self,
        files: DataFiles,
        is_changed: Callable[[int], bool],
        brings: CopyBrings,
        touch: Callable[[int], None],
        bytes_per_s: int,
    ) -> BlockCopies:
        """Has copies of blocks kept where their namespaces want that, and spare ones go first;
        comes before `run`. See `BlockCopies`."""
        self.siblings = BlockCopies(
            *(self._engine, self._member, self._call, files, is_changed, lambda: self._sets),
            *(self._stones, self.finder.fade, self._differing, self._is_in_use, self._forget),
            *(brings, touch, self._paths),
            bytes_per_s,
        )
        return self.siblings

    def keep_cold(self, tier: ColdTier) -> "ColdBlocks | None":
        """Returns the cold tier as a holder of blocks, where names are found from now on; None if
        there is no number for the names that this node sends there."""
        if self._member.node >= COLD:
            return None
        from kvfs.node.siblings.cold_blocks import ColdBlocks  # brings numpy

        cold = ColdBlocks(
            *(self._engine, self._member.node, tier, lambda: self.sets, self._stones),
            self._differing,
        )
        self._stones.on_news = lambda stone: cold.removed([stone])
        self.cold = self.finder.cold = cold
        return cold

    @property
    def methods(self) -> Mapping[str, Method]:
        """The requests that peers may send it, by method."""
        return {**self._methods, **(self.siblings.methods if self.siblings else {})}

    def is_kept(self, ino: int) -> bool:
        """Returns whether the namespace of an inode is of this kind."""
        return self._engine.is_local(namespace_of(ino))

    async def may_remove(self, directory: int) -> bool:
        """Does what `NodePort.may_remove` describes. Raises KvfsError."""
        path = await self._engine.read(lambda t: held_names.path_of(t.get, directory))
        if not path or not self.is_kept(directory):
            return True
        try:
            await self._directory_removals.prepare(directory, path)
        except NotEmpty:
            return False
        return True

    def on_local(self, t: Transaction, changes: Sequence[LocalChange]) -> Then:
        """Notes, in its transaction, a change of this node's own keys; never waits."""
        removed = self._removals.on_local(t, changes)  # which asks what was announced before

        def committed() -> None:
            try:
                removed()
                self.sets.announcer.on_local(changes)
            except (KvfsError, OSError) as error:  # what was committed stays so
                self._missed(error)
            try:
                if self.siblings is not None:
                    self.siblings.on_local(changes)
                for key, _, new in changes:
                    if new is None and key[0] == _ENTRY:
                        self.finder.left(keys.unpack_u64(key, 1))
            except (KvfsError, OSError) as error:
                self._telling.complain(error)

        return committed

    def heard(self, written: Sequence[tuple[bytes, bytes | None, bytes | None]]) -> None:
        """Takes notice of commits of other nodes (key, before, now)."""
        self.usage.heard(written)
        if self._sets is not None and any(key == keys.HOMES for key, _, _ in written):
            self._sets.homes_changed()

    async def run(self) -> None:
        """Takes part, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._questions.run)
            nursery.start_soon(self.finder.run)
            nursery.start_soon(self._drop_unused)
            nursery.start_soon(self._changer.run)
            nursery.start_soon(self._ender.run)
            nursery.start_soon(self.usage.run)
            if self.siblings is not None:
                nursery.start_soon(self.siblings.run)
            try:
                if self._sets is not None:
                    nursery.start_soon(self._sets.run)
                looking = Persistence(log.warning, "names of other nodes are not found")
                while self._sets is None:
                    await looking.attempt(self._look)
                    await trio.sleep(_LOOK_S)
                await looking.attempt(self._take_up)
                if self.cold is not None:
                    nursery.start_soon(self.cold.run)
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def namespace_removed(self, namespace_id: int) -> None:
        """Has the next start read anew which names are held here: until then those of a removed
        namespace, for which nobody asks, are announced still. Raises OSError."""
        if self.cold is not None:
            self.cold.namespace_removed(namespace_id)
        if self._sets is not None:
            self._sets.namespace_removed()
            return
        for each in self._own_sets():
            each.unlink()

    def close(self) -> None:
        """Leaves in order what the node announced; idempotent."""
        if self._sets is None:
            return
        try:
            self._sets.close()
        except OSError as error:  # the next start reads all names
            log.warning("what this node announced is not kept: %s", error)

    @property
    def sets(self) -> "NameSets":
        """The names that this node holds, and those that others are said to; made when they are
        used first. Raises OSError."""
        if self._sets is None:
            from kvfs.holdings.fingerprints import derive_seed  # brings numpy, as the next does
            from kvfs.node.names.name_sets import NameSets

            secret = self._secret()
            own_set = self._own_set(secret)
            cold_set = (
                own_set.with_name(_COLD_SET + own_set.name) if self.cold is not None else None
            )
            for other in [*self._own_sets(), *self._store.glob(f"{_COLD_SET}{OWN_SET}*")]:
                if other not in (own_set, cold_set):
                    other.unlink()
            if self._has_missed:
                own_set.unlink(missing_ok=True)
            boot = boot_of(own_set.parent)
            self._sets = NameSets(
                self._engine,
                self._member.node,
                derive_seed(secret),
                own_set,
                cold_set,
                boot,
                self._paths,
                self._members,
                self._call,
                self._stones,
                self._removals,
                self._member,
                self._jobs,
                self._most_names,
            )
            if self._nursery is not None:
                self._nursery.start_soon(self._sets.run)
        return self._sets

    def report(self) -> dict[str, Any] | None:
        """Returns the part of the node's status; None if there is no such namespace."""
        if self._sets is None:
            return None
        return {
            **self._sets.report(),
            "becoming": self._changer.report(),
            "ending": self._ender.report(),
            "left_out": self._lister.left_out(),
            **(self.siblings.report() if self.siblings else {}),
        }

    @property
    def counters(self) -> dict[str, int]:
        """Counters since the start."""
        parts = (self.finder, self._lister, self._holder, self._questions, self._peers.ahead)
        counted = [each.counters for each in parts]
        counted += [each.counters for each in (self._sets, self.siblings) if each is not None]
        return {name: count for each in counted for name, count in each.items()}

    # ---- inside

    def _missed(self, error: KvfsError | OSError) -> None:
        """Has all names told anew that are held here, since a change of them was not noted."""
        self._telling.complain(error)
        if self._sets is None:
            self._has_missed = True
        else:
            self._sets.missed()

    def _own_set(self, secret: bytes) -> Path:
        """Returns the file of fingerprints by this secret: those by another one mean nothing."""
        return self._store / f"{OWN_SET}{hashlib.blake2b(secret, digest_size=4).hexdigest()}"

    def _own_sets(self) -> list[Path]:
        return list(self._store.glob(f"{OWN_SET}*"))

    async def _look(self) -> None:
        spaces = await self._engine.read(held_names.namespaces_of_nodes)
        if spaces and self._sets is None:
            _ = self.sets

    async def _take_up(self) -> None:
        """Has what an earlier run took over, and did not fetch, forgotten."""
        nodes = [node for node, _ in self._members()]
        for namespace_id in await self._engine.read(held_names.namespaces_of_nodes):
            await self.finder.take_up(namespace_id, nodes)

    async def _until_open(self, namespace_id: int) -> None:
        ending = self._engine.ending
        if ending.is_closed(namespace_id):
            await ending.until_open()

    def _ended(self, namespace_id: int) -> None:
        """Forgets what it knows of a namespace whose names are everybody's now."""
        self._paths.forget()
        self.namespace_removed(namespace_id)

    def _may_be_elsewhere(self, namespace_id: int, path: bytes) -> bool:
        return self._sets is None or self._sets.may_be_elsewhere(namespace_id, path)

    def _claims(self, namespace_id: int, path: bytes) -> Sequence[int] | None:
        if self._sets is None:
            return ()
        found = self._sets.claims(namespace_id, path)
        if not self._listed or found is None:
            return found
        if (node := self._listed.get((namespace_id, path))) is None:
            return found
        if node not in found:
            return [*found, node]
        # The one that told of it in a list comes first: its file has the number that was shown.
        return [node, *(each for each in found if each != node)]

    def _learn(self) -> Learn | None:
        return self._sets.learn if self._sets is not None and self._sets.asks_homes else None

    async def _holders_below(
        self, directories: Sequence[tuple[int, bytes]]
    ) -> Sequence[Sequence[int]]:
        if self._sets is None:
            return [()] * len(directories)
        return await self._sets.holders_below(directories)

    def _heard_of(self, namespace_id: int, tellers: Mapping[bytes, int]) -> None:
        """Notes which nodes told of these paths in a list: they are found from then on."""
        for path, node in self.sets.unclaimed(namespace_id, tellers).items():
            self._listed[namespace_id, path] = node
        while len(self._listed) > _LISTED:
            self._listed.popitem(last=False)

    def _members(self) -> Iterable[tuple[int, bool]]:
        return [(each.number, each.alive) for each in self._member.roster.all()]

    async def _call(
        self, node: int, method: str, params: Any, deadline_s: float, takes: int = 0
    ) -> Any:
        address = placement_view.address(self._member.roster, node)
        return await self._peers.call(address, method, params, deadline_s, takes)

    async def _drop_unused(self) -> None:
        """Drops answers that brought along what nobody wanted, until cancelled."""
        while True:
            await trio.sleep(KEPT_S)
            self._peers.ahead.expire()

    async def _told(self, peer: Party, params: Any) -> News | None:
        return await self.sets.told(peer.node, params)

    async def _asked(self, peer: Party, params: Any) -> list[bytes]:
        return await self.sets.exchange.asked(peer, params)

    async def _asked_homes(self, peer: Party, params: Any) -> "ToldHolders":
        return await self.sets.homes.asked(peer, params)

    async def _asked_removed(self, peer: Party, params: Any) -> list[bytes]:
        return await self.sets.removal_exchange.asked(peer, params)
