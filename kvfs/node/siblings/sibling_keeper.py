"""Keeps as many copies of each block as its namespace wants, in namespaces that are kept by their
nodes: nothing of it asks the metadata server.

| event | blocks examined |
|---|---|
| a block is sealed here, or its copy came | this one, with all others of the moment |
| a sibling has its copy no more | this one |
| a node goes, by its lease or its silence, or is drained | those of which it is a sibling |
| a node comes, or half a minute passes | those that lack copies |
| ten minutes pass | all that this node holds, against the table of holders |

The first of a block's living holders by rendezvous acts, as far as its siblings are known; what was
sealed here is this node's to copy. 64 blocks made one after the other go to the same nodes, so that
many go together; nodes that are said to hold the name come first.

Invariants
- Blocks that wait are bounded; what has no room is found by the next look at all.
- Repair keeps to a rate; copies of what was just sealed do not wait for it.
"""

import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from itertools import islice
from typing import Any, Final

import trio
import trio.lowlevel

from kvfs.base import detach
from kvfs.base.errors import Unavailable
from kvfs.base.retry import Persistence
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.siblings import copy_plan
from kvfs.node.siblings.copy_offers import CopyOffers
from kvfs.node.siblings.copy_plan import LackingBlock, group_of
from kvfs.node.siblings.copy_protocol import CopyOutcome
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.siblings.living_nodes import LivingNodes
from kvfs.policy import replica_repair
from kvfs.policy.pace import Pace
from kvfs.tree.copies import held_names, placements, siblings
from kvfs.tree.copies.siblings import HeldBlock

log = logging.getLogger(__name__)
_GATHER_S: Final = 0.1
_TICK_S: Final = 1.0
_AGAIN_S: Final = 30.0
_ROUTINE_S: Final = 600.0
_FIRST_S: Final = 15.0
_PAGE: Final = 256
_BATCH: Final = 1024
_MOST_WAITING: Final = 65_536
_ROUNDS: Final = 4
_WAIT_S: Final = 10.0
_PATIENCE_S: Final = 1.0
"""Time for which a close waits for nodes that keep other content under its name: one that writes it
at the same time may have closed it by then."""
_BYTES_PER_S: Final = 32 << 20
Claims = Callable[[Sequence[tuple[int, bytes]]], Awaitable[list[tuple[int, list[int] | None]]]]
"""Returns, of each path of a namespace, its fingerprint, and the nodes said to hold it."""


class SiblingKeeper:
    """The keeper of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        me: int,
        nodes: LivingNodes,
        offers: CopyOffers,
        differing: DifferingNames,
        claims: Claims,
        knows: Callable[[int], bool],
        tell: Callable[[Sequence[tuple[int, int]], Sequence[int], Iterable[int]], None],
        bytes_per_s: int,
    ) -> None:
        """`knows`: whether all is known that a node says it holds. `tell` has nodes told (the last
        argument) that these files, by number and version, have those siblings."""
        self._engine = engine
        self._me = me
        self._nodes = nodes
        self._offers = offers
        self._differing = differing
        self._claims = claims
        self._knows = knows
        self._tell = tell
        self._rate = bytes_per_s
        self._pace = Pace(bytes_per_s, 0.0)
        self._notes = 0
        self._fresh: dict[int, int] = {}
        """Blocks that were just sealed, and by which note: a later one is examined for itself."""
        self._due: dict[int, int] = {}
        """The same of other blocks to be examined."""
        self._renamed: set[int] = set()
        self._lacking: dict[int, None] = {}
        self._came, self._fell_due = trio.Event(), trio.Event()
        self._owes_all = False
        self._seen: dict[int, tuple[bool, str]] = {}
        self._owed: set[int] = set()
        """Nodes that went, and whose blocks were not examined yet."""
        self.counters = {"peer_closes_acknowledged": 0, "peer_closes_late": 0}

    def sealed(self, inos: Collection[int]) -> None:
        """Notes that files were sealed here."""
        self._note(inos, is_fresh=True)

    def renamed(self, inos: Collection[int]) -> None:
        """Notes that sealed files have another name: the copies under the former one go."""
        for ino in inos:
            if len(self._renamed) >= _MOST_WAITING:
                self._owes_all = True
                break
            self._renamed.add(ino)
        self._note(inos, is_fresh=True)

    def lost_sibling(self, inos: Collection[int]) -> None:
        """Notes that these files have a sibling less."""
        self._note(inos, is_fresh=False)

    def keeps_copies(self, space: int) -> bool:
        """Returns whether a namespace is kept by its nodes, with copies."""
        found = self._engine.namespace(space) if self._engine.is_local(space) else None
        return found is not None and found.replicas > 0

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        waiting = len(self._fresh) + len(self._due)
        return {"lacking_copies": len(self._lacking), "waiting_for_copies": waiting}

    async def run(self) -> None:
        """Keeps copies, until cancelled."""
        self._pace = Pace(self._rate, trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._copy_fresh)
            nursery.start_soon(self._repair)
            nursery.start_soon(self._watch)
            looking = Persistence(log.warning, "copies of blocks are looked after later")
            await looking.repeat(self._look_at_all, _ROUTINE_S, first_s=_FIRST_S)

    async def acknowledge(self, inos: Sequence[int]) -> None:
        """Returns when these files, which were published here, have their copies on the disks of
        other nodes, where their namespace promises that. Raises Unavailable if they do not get them
        in time."""
        wanted = [ino for ino in inos if self._is_acknowledged(namespace_of(ino))]
        if not wanted:
            return
        await detach.aside()
        blocks = await self._engine.read(lambda t: siblings.look(t, wanted))
        count, began = len(blocks), trio.current_time()
        with trio.move_on_after(_WAIT_S + sum(each.inode.size for each in blocks) / _BYTES_PER_S):
            while left := await self._copy(blocks):
                self._check_hope(left, trio.current_time() - began)
                await trio.sleep(_GATHER_S)
                blocks = await self._engine.read(lambda t: siblings.look(t, wanted))
            self.counters["peer_closes_acknowledged"] += count
            return
        self.counters["peer_closes_late"] += len(blocks)
        raise Unavailable(
            f"{_shown(blocks[0])}: {blocks[0].wanted} nodes are to have it before its close is"
            " done, and some of them have it not yet; `kvfs node list` shows the nodes"
        )

    def _check_hope(self, left: Sequence[LackingBlock], waited_s: float) -> None:
        """Raises Unavailable if one of these will have no copy, as far as can be seen."""
        if waited_s < _PATIENCE_S:
            return
        snapshot = self._nodes.snapshot()
        for each in left:
            if copy_plan.is_hopeless(snapshot, each):
                self.counters["peer_closes_late"] += len(left)
                nodes = ", ".join(map(str, sorted(each.others)))
                why = (
                    f"{_shown(each.block)}: no node can take the copy that its close promises:"
                    f" other content has this name on node {nodes}, which keeps it"
                )
                log.warning("%s", why)
                raise Unavailable(why)

    def _is_acknowledged(self, space: int) -> bool:
        """Returns whether a close there promises the file's copies."""
        found = self._engine.namespace(space) if self.keeps_copies(space) else None
        return found is not None and found.acknowledge == "sync"

    # ---- what is to be examined

    def _note(self, inos: Collection[int], *, is_fresh: bool) -> None:
        queue = self._fresh if is_fresh else self._due
        self._notes += 1
        for ino in inos:
            if ino not in queue and len(queue) >= _MOST_WAITING:
                self._owes_all = True
                break
            queue[ino] = self._notes
        if inos:
            (self._came if is_fresh else self._fell_due).set()

    async def _copy_fresh(self) -> None:
        """Has what was just sealed copied: without a pause."""
        working = Persistence(log.warning, "copies of new blocks are made later")
        while True:
            await self._came.wait()
            await trio.sleep(_GATHER_S)
            self._came = trio.Event()
            while self._fresh:
                await working.attempt(self._examine_fresh)

    async def _repair(self) -> None:
        """Has copies made that were lost, at the rate of repair."""
        working = Persistence(log.warning, "copies of blocks are made later")
        while True:
            await self._fell_due.wait()
            await trio.sleep(_GATHER_S)
            self._fell_due = trio.Event()
            while self._due:
                await working.attempt(self._examine_due)

    async def _examine_fresh(self) -> None:
        await self._forget_former()
        some = dict(islice(self._fresh.items(), _BATCH))
        blocks = await self._engine.read(lambda t: siblings.look(t, list(some)))
        left = await self._copy([each for each in blocks if each.is_sealed])
        self._examined(self._fresh, some, left)

    async def _examine_due(self) -> None:
        some = dict(islice(self._due.items(), _BATCH))
        blocks = await self._engine.read(lambda t: siblings.look(t, list(some)))
        mine = [each for each in blocks if each.is_sealed and self._acts(each)]
        size = sum(each.inode.size for each in mine)
        await trio.sleep(self._pace.spend(size, trio.current_time()))
        left = await self._copy(mine)
        self._examined(self._due, some, left)

    def _examined(
        self, queue: dict[int, int], some: Mapping[int, int], left: Sequence[LackingBlock]
    ) -> None:
        """Notes that blocks of a queue were examined, and which of them lack copies still."""
        for ino, note in some.items():
            if queue.get(ino) == note:
                del queue[ino]
            self._lacking.pop(ino, None)
        for each in islice(left, _MOST_WAITING - len(self._lacking)):
            self._lacking[each.block.ino] = None

    async def _forget_former(self) -> None:
        """Forgets the siblings of renamed files."""
        while inos := list(islice(self._renamed, _BATCH)):
            blocks = await self._engine.read(lambda t: siblings.look(t, inos))
            await self._forget({each.ino: each.siblings for each in blocks if each.siblings})
            self._renamed.difference_update(inos)

    def _acts(self, block: HeldBlock) -> bool:
        snapshot = self._nodes.snapshot()
        holders = [self._me, *block.siblings]
        verdict = replica_repair.judge(snapshot, group_of(block.ino), holders, block.wanted)
        return verdict.missing > 0 and verdict.actor == self._me

    # ---- nodes that come and go

    async def _watch(self) -> None:
        watching = Persistence(log.warning, "blocks of a node that went are looked at later")
        tried_at = trio.current_time()
        while True:
            await trio.sleep(_TICK_S)
            await watching.attempt(self._look_around)
            if trio.current_time() - tried_at >= _AGAIN_S:
                tried_at = trio.current_time()
                self._try_again()

    async def _look_around(self) -> None:
        """Examines the blocks of nodes that went. Work that failed is still owed."""
        snapshot = self._nodes.snapshot()
        now = {host.number: (host.alive, host.state) for host in snapshot}
        before, self._seen = self._seen, now
        for number, (alive, state) in before.items():
            if number != self._me and alive and now.get(number) != (alive, state):
                self._owed.add(number)
        if any(alive and not before.get(each, (False, ""))[0] for each, (alive, _) in now.items()):
            self._try_again()
        for number in tuple(self._owed):
            await self._look_at_shared(number)
            self._owed.discard(number)
        if self._owes_all:
            self._owes_all = False
            await self._look_at_all()

    def _try_again(self) -> None:
        self._note(list(self._lacking), is_fresh=False)

    async def _look_at_shared(self, number: int) -> None:
        """Examines the blocks of which a node is a sibling."""
        async for inos in self._pages(number):
            blocks = await self._engine.read(lambda t: siblings.look(t, inos))  # noqa: B023
            self._note([each.ino for each in blocks if self._acts(each)], is_fresh=False)
            await self._until_room()

    async def _look_at_all(self) -> None:
        """Examines all blocks that this node holds: siblings that do not say any more that they
        have one are none, where all is known that they say."""
        async for inos in self._pages(self._me):
            blocks = await self._engine.read(lambda t: siblings.look(t, inos))  # noqa: B023
            claims = await self._claims([(each.namespace_id, each.path) for each in blocks])
            doubtful: dict[int, list[int]] = {}
            for each, (_, nodes) in zip(blocks, claims, strict=True):
                if nodes is None:
                    continue
                silent = [node for node in each.siblings if node not in nodes]
                alive = [host.number for host in self._nodes.snapshot().alive(silent)]
                if gone := [node for node in alive if self._knows(node)]:
                    doubtful[each.ino] = gone
            await self._forget(doubtful)
            blocks = await self._engine.read(lambda t: siblings.look(t, inos))  # noqa: B023
            self._note([each.ino for each in blocks if self._acts(each)], is_fresh=False)
            await self._until_room()

    async def _forget(self, doubtful: dict[int, list[int]]) -> None:
        if not doubtful:
            return
        await self._engine.transact(
            lambda t: [siblings.forget(t, ino, n) for ino, gone in doubtful.items() for n in gone]
        )

    async def _pages(self, number: int) -> AsyncIterator[list[int]]:
        """Yields the files of which a node has a copy, by these records, where copies are kept."""
        node = keys.pack_node(number)
        for space in await self._engine.read(held_names.namespaces_of_nodes):
            after = 0
            while self.keeps_copies(space):
                inos = await self._engine.read(
                    lambda t: placements.held_within(t, node, space, after, _PAGE)  # noqa: B023
                )
                if not inos:
                    break
                yield inos
                after = inos[-1]
                await trio.lowlevel.checkpoint()

    async def _until_room(self) -> None:
        while len(self._due) > _MOST_WAITING // 2:
            await trio.sleep(_TICK_S)

    # ---- copies

    async def _copy(self, blocks: Sequence[HeldBlock]) -> list[LackingBlock]:
        """Has the missing copies of these blocks made; returns those that lack some still. Raises
        KvfsError."""
        claims = await self._claims([(each.namespace_id, each.path) for each in blocks])
        works = [
            LackingBlock(e, self._me, nodes or [])
            for e, (_, nodes) in zip(blocks, claims, strict=True)
        ]
        for _ in range(_ROUNDS):
            plan = copy_plan.plan(self._nodes.snapshot(), self._offers.resting(), works)
            if not plan:
                break
            async with trio.open_nursery() as nursery:
                for node, those in plan.items():
                    nursery.start_soon(self._offer, node, those)
        await self._record(works)
        snapshot = self._nodes.snapshot()
        return [each for each in works if copy_plan.missing(snapshot, each)]

    async def _offer(self, node: int, works: Sequence[LackingBlock]) -> None:
        outcomes = await self._offers.make(node, [each.block for each in works])
        for each in works:
            outcome = outcomes.get(each.block.ino, CopyOutcome.REFUSED)
            if outcome is CopyOutcome.HERE:
                each.have.append(node)
                each.made.append(node)
                continue
            each.refused.add(node)
            if outcome is CopyOutcome.OTHER:
                each.others.add(node)
            if outcome is CopyOutcome.OTHER and each.block.is_sealed:
                self._differing.found(each.block.namespace_id, each.block.path, node)

    async def _record(self, works: Iterable[LackingBlock]) -> None:
        """Records new siblings, and has the others told of them."""
        made = [each for each in works if each.made and each.block.is_sealed]
        if not made:
            return

        def note(t: Transaction) -> None:
            for each in made:
                siblings.note(t, each.block.ino, each.block.inode.version, each.made)

        await self._engine.transact(note)
        told: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        for each in made:
            others = tuple(each.have[1:])
            if len(others) > 1:
                name = each.block.ino, each.block.inode.version
                told.setdefault((others, tuple(each.have)), []).append(name)
        for (others, have), files in told.items():
            self._tell(files, have, others)


def _shown(block: HeldBlock) -> str:
    return block.inode.name.decode(errors="backslashreplace")
