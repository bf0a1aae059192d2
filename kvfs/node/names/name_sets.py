"""The names that a node announces, and the table of those that others do: with numpy, and made only
where a namespace needs them."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from kvfs.base.errors import Corrupt, Invalid, Unavailable
from kvfs.base.retry import Persistence
from kvfs.cluster.job_lease import Claims as JobClaims
from kvfs.cluster.membership import Membership
from kvfs.holdings import repaired_names
from kvfs.holdings.fingerprints import Fingerprinter, gathered
from kvfs.holdings.holder_table import LIMIT_BYTES, HolderTable
from kvfs.holdings.own_set import OwnSet
from kvfs.holdings.usable_memory import usable_bytes
from kvfs.meta import keys
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.homes.home_keeper import HomeKeeper
from kvfs.node.homes.home_questions import HomeQuestions
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.announcer import Announcer
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_exchange import NameExchange
from kvfs.node.names.name_members import COLD, NameMembers, cold_of
from kvfs.node.names.name_protocol import Call, News, parse_news
from kvfs.node.names.peer_outbox import PeerOutbox
from kvfs.node.names.removal_exchange import RemovalExchange
from kvfs.node.names.removals import Removals
from kvfs.node.names.tombstones import Tombstones
from kvfs.tree.copies import held_names

log = logging.getLogger(__name__)
_SHARE: Final = 4
"""The share of the memory that the names of others may take, whatever other nodes say they hold."""


class NameSets:
    """The sets of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        me: int,
        seed: int,
        own_set: Path,
        cold_set: Path | None,
        boot: int,
        paths: DirectoryPaths,
        members: Callable[[], Iterable[tuple[int, bool]]],
        call: Call,
        stones: Tombstones,
        removals: Removals,
        member: Membership,
        jobs: JobClaims,
        most_names: int,
    ) -> None:
        """`seed`: that of the cluster's fingerprints. `cold_set`: the file of the names that this
        node has sent to the cold tier, if it has one. `most_names`: those of other nodes that each
        may know of. Raises OSError."""
        self._engine = engine
        self._store = own_set.parent
        self._own = OwnSet.open(own_set, me, boot)
        self.cold: Final = None if cold_set is None else OwnSet.open(cold_set, cold_of(me), boot)
        """The names that this node has sent to the cold tier."""
        self._has_missed = trio.Event()
        """Set when a change of names was not noted."""
        self._gives_up = False
        """Whether what is held here is being given up."""
        self._seed = seed
        self._fingerprinters: dict[int, Fingerprinter] = {}
        self._refused = 0
        """Requests and answers whose news were none."""
        self._refusing = Persistence(log.warning, "what another node tells of names is not taken")
        self._members = NameMembers(me, members)
        self._outbox = PeerOutbox(call, self._members.interval_s, self._hear)
        own = [each for each in (self._own, self.cold) if each is not None]
        limit = min(LIMIT_BYTES, usable_bytes() // _SHARE)
        self.known: Final = KnownHolders(
            lambda is_turned: HolderTable(limit, is_turned=is_turned), own, self._members, call
        )
        self.homes: Final = HomeQuestions(self.known, self._members, call)
        self.exchange: Final = NameExchange(
            *(own, self.known, self._members, self._outbox),
            *(self._flush_due, self._due_s),
        )
        self._keeper = HomeKeeper(engine, member, jobs, self.known, self.exchange, most_names)
        self.announcer: Final = Announcer(
            *(engine.local, paths, self._own, self._fingerprinter, self.exchange.changed),
            self._members.most_delay_s,
        )

        self._stones = stones
        self._removals = removals
        self.removal_exchange: Final = RemovalExchange(
            *(self._members, stones, call, self._outbox, removals)
        )

    async def told(self, node: int, params: Any) -> News | None:
        """Handles the request `tell-names` of another node: takes its news, and returns what it is
        to be told. Raises Invalid, Corrupt."""
        await self._hear(params)
        return self._outbox.answer(node)

    async def _hear(self, params: Any) -> None:
        """Takes the news of another node; where that is the first for more than a day, this node
        gives up what it holds first. Raises KvfsError, OSError."""
        news = parse_news(params)
        if self._stones.may_lack_some():
            await self._give_up()
        self._stones.heard()
        try:
            if news.deltas:
                self.exchange.told(news.deltas)
            self.removal_exchange.told(news.sums, news.stones)
        except (Corrupt, Invalid) as error:
            self._refused += 1
            self._refusing.complain(error)
            raise

    async def _give_up(self) -> None:
        """Gives up all that this node holds; what is left when it raises, or is killed, goes the
        next time. Raises KvfsError, OSError."""
        if self._gives_up:
            raise Unavailable("no other node was heard for a day: this one gives up what it held")
        self._gives_up = True
        try:
            log.warning("no other node was heard for a day: what is held here may be removed there")
            for namespace_id in await self._engine.read(held_names.namespaces_of_nodes):
                await self._removals.give_up(namespace_id)
        finally:
            self._gives_up = False

    async def run(self) -> None:
        """Tells and learns, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._outbox.run)
            nursery.start_soon(self.exchange.run)
            nursery.start_soon(self.removal_exchange.run)
            nursery.start_soon(self._keeper.run)
            scanning = Persistence(log.warning, "names that are held here are not all told yet")
            if self._own.is_filled and not repaired_names.is_marked(self._store):
                await scanning.until_done(self.announcer.take_up)
            else:
                await scanning.until_done(self._tell_all)
                self._own.mark_filled()
                repaired_names.unmark(self._store)
            while True:
                await self._has_missed.wait()
                self._has_missed = trio.Event()
                await scanning.until_done(self._tell_all)

    async def _tell_all(self) -> None:
        await self.announcer.scan(await self._engine.read(held_names.namespaces_of_nodes))

    def homes_changed(self) -> None:
        """Has this node go by the homes that another node recorded."""
        self._keeper.changed()

    def missed(self) -> None:
        """Has all names told that are held here, since a change of them was not noted; one that
        went is taken back when somebody asks for it, or by the next life of the set."""
        self._own.doubt()
        self._has_missed.set()

    def namespace_removed(self) -> None:
        """Has the next start read anew which names are held here."""
        self._own.doubt()

    # ---- who holds what

    @property
    def asks_homes(self) -> bool:
        """Whether who holds a name may have to be asked of other nodes."""
        return self.known.asked_map is not None

    async def learn(self, names: Iterable[tuple[int, bytes]], most: int = 8) -> None:
        """Has it known for a moment who holds these paths of namespaces, as far as homes tell."""
        if self.asks_homes:
            await self.homes.learn(self.fingerprints(names), most)

    def claims(self, namespace_id: int, path: bytes) -> Sequence[int] | None:
        """Returns the living nodes that are said to hold a path; None: their homes have not been
        asked (`learn`)."""
        found = self.homes.holders_of(self.fingerprint(namespace_id, path))
        return self._living(found) if found else found

    async def holders_below(self, directories: Sequence[tuple[int, bytes]]) -> list[Sequence[int]]:
        """Returns of each directory the living nodes that may have names in it: it is announced
        with the first of them, but for the namespace's own (an empty path)."""
        most = max(len(self._members), 8)
        if not self.known.is_full:
            await self.learn([each for each in directories if each[1]], most)
        return [self._holders_below(*each, most) for each in directories]

    def _holders_below(self, namespace_id: int, path: bytes, most: int) -> Sequence[int]:
        if not path or self.known.is_full:
            return self._members.living()
        fingerprint = self.fingerprint(namespace_id, path)
        holders = self.homes.holders_of(fingerprint, most)
        if holders is None or not self.homes.is_known(fingerprint):
            return self._members.living()
        return self._living(holders)

    def unclaimed(self, namespace_id: int, tellers: Mapping[bytes, int]) -> dict[bytes, int]:
        """Returns those of these paths whose node is not known to hold them."""
        paths = list(tellers)
        claimed = self.known.probe(self._fingerprinter(namespace_id).of_all(paths))
        return {
            path: tellers[path]
            for path, nodes in zip(paths, claimed, strict=True)
            if tellers[path] not in (nodes or ())
        }

    async def claims_of(
        self, names: Sequence[tuple[int, bytes]]
    ) -> list[tuple[int, list[int] | None]]:
        """Returns, of each path of a namespace, its fingerprint, and the living nodes that are said
        to hold it; None: no home answered."""
        found = self.fingerprints(names)
        most = max(len(self._members), 8)
        if not self.asks_homes:
            claims = self.known.probe(gathered(found), most)
        else:
            await self.homes.learn(found, most)
            claims = [
                self.homes.holders_of(each, most) if self.homes.is_known(each) else None
                for each in found
            ]
        return [
            (each, None if nodes is None else self._living(nodes))
            for each, nodes in zip(found, claims, strict=True)
        ]

    def fingerprint(self, namespace_id: int, path: bytes) -> int:
        """Returns the fingerprint of a path of a namespace."""
        known = self._fingerprinters.get(namespace_id) or self._fingerprinter(namespace_id)
        return known.of(path)

    def fingerprints(self, names: Iterable[tuple[int, bytes]]) -> list[int]:
        """Returns the fingerprint of each path of a namespace."""
        return [self.fingerprint(*each) for each in names]

    def cold_holders(self, namespace_id: int, path: bytes) -> tuple[int, list[int]]:
        """Returns the fingerprint of a path, and the nodes that are said to have sent it to the
        cold tier, living or not."""
        fingerprint = self.fingerprint(namespace_id, path)
        found = self.homes.holders_of(fingerprint) or ()
        nodes = [each ^ COLD for each in found if self._members.is_cold(each)]
        if self.cold is not None and self.cold.holds(gathered([fingerprint]))[0]:
            nodes.append(self._members.me)
        return fingerprint, nodes

    def heard_at(self, node: int) -> float | None:
        """Returns when a member was heard last (trio.current_time); None: it was not yet."""
        return self.known.heard_at(node)

    def knows(self, node: int) -> bool:
        """Returns whether all is known, here and at the homes that were asked of late, that a
        member says it holds."""
        return self.known.knows(node) and not self.homes.has_lagged(node)

    def may_be_elsewhere(self, namespace_id: int, path: bytes) -> bool:
        """Returns whether this node has told others of a path, or any of them may hold it. A
        temporary name that a file had for a moment is nowhere else."""
        if self.announcer.may_be_announced(namespace_id, path):
            return True
        return self.homes.may_be_held(self.fingerprint(namespace_id, path))

    def _living(self, nodes: Iterable[int]) -> list[int]:
        return [node for node in nodes if self._members.lives(node)]

    def close(self) -> None:
        """Leaves the set of this node's names in order; idempotent."""
        self.announcer.flush()
        self._own.close()
        if self.cold is not None:
            self.cold.close()

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        return {
            **self.exchange.report(),
            "unannounced": self.announcer.waiting,
            "tombstones": len(self._stones),
        }

    @property
    def counters(self) -> dict[str, int]:
        return {
            **self.exchange.counters,
            **self._outbox.counters,
            **self.removal_exchange.counters,
            **self.homes.counters,
            "name_news_refused": self._refused,
        }

    def _flush_due(self) -> None:
        self.announcer.flush_due()

    def _due_s(self) -> float:
        return self.announcer.due_s()

    def _fingerprinter(self, namespace_id: int) -> Fingerprinter:
        found = self._fingerprinters.get(namespace_id)
        if found is None:
            found = Fingerprinter(self._seed, keys.pack_u16(namespace_id))
            self._fingerprinters[namespace_id] = found
        return found
