"""Copies of this node that go first when space is short, since others have them too, in namespaces
that are kept by their nodes.

Who has a copy is known from the table of holders, without a question; a copy goes only after one of
them has promised to keep its own (`policy.spare_copies`). The nodes are asked in one request each.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import trio

from kvfs.base.clock import now
from kvfs.base.errors import KvfsError
from kvfs.cluster.handshake import Party
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of, unpack_inode
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_protocol import Call
from kvfs.node.siblings.copy_protocol import (
    KEEP_COPIES,
    MOST_ASKED,
    CopyPromise,
    WantedPromise,
    packed,
    parse_promises,
    parse_wanted,
)
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.siblings.sibling_keeper import Claims
from kvfs.policy import rendezvous
from kvfs.policy.spare_copies import SpareCopies
from kvfs.tree import lifecycle
from kvfs.tree.copies import held_names, siblings
from kvfs.tree.copies.siblings import HeldBlock
from kvfs.tree.inodes import read_inodes
from kvfs.tree.namespaces import is_peer

log = logging.getLogger(__name__)
_DEADLINE_S: Final = 1.0
_REFUSED_S: Final = 5.0
"""Time for which a copy that nobody would keep is not asked about again."""
_MOST_REFUSED: Final = 65_536
_REST_S: Final = 2.0
"""Time until the next look where fewer went than were wanted: a look costs 10 ms or so."""


class _Elsewhere(NamedTuple):
    """A block that others are said to hold."""

    block: HeldBlock
    content: int
    """The number by which all holders know it."""
    nodes: list[int]


class PeerSpares:
    """The spare copies of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        me: int,
        claims: Callable[[], Claims | None],
        contents: Callable[[Sequence[tuple[int, bytes]]], list[int]],
        call: Call,
        differing: DifferingNames,
        is_whole: Callable[[int, Inode], bool],
        touch: Callable[[int], None],
        paths: DirectoryPaths,
    ) -> None:
        """`claims`: None while no table is made. `contents`: the numbers of paths by which all
        holders know them, without asking anyone. `is_whole`: whether the data of a file's record
        are here, and nobody writes them. `touch` notes that a file was used."""
        self._engine = engine
        self._me = me
        self._claims = claims
        self._contents = contents
        self._call = call
        self._differing = differing
        self._is_whole = is_whole
        self._touch = touch
        self._paths = paths
        self._looks_at = 0.0
        self._copies = SpareCopies(me)
        self._refused: dict[int, float] = {}
        self.counters = {"peer_copies_promised": 0, "peer_copies_let_go": 0}

    def keeps(self, ino: int) -> bool:
        """Returns whether another node was promised that this copy stays."""
        return self._copies.keeps(ino, now())

    def may_go(self, ino: int) -> bool:
        """Returns whether a copy may go now, in the transaction that drops it."""
        return self._copies.may_go(ino, now())

    async def evict(
        self, inos: Sequence[int], in_use: Callable[[int, Inode], bool]
    ) -> list[lifecycle.Evicted]:
        """Removes the names of those of these files that others keep, with that content, and that
        nobody uses here; their data files stay. Raises what `Engine.transact` raises."""
        promised = await self.promised(inos)
        if not promised:
            return []
        evicted: list[lifecycle.Evicted] = []
        time_ns = time.time_ns()

        def remove_names(t: Transaction) -> list[lifecycle.Evicted]:
            found = zip(promised, read_inodes(t, list(promised)), strict=True)
            going = [
                ino
                for ino, inode in found
                if inode is not None
                and inode.checksum == promised[ino]
                and self.may_go(ino)
                and not in_use(ino, inode)
                and is_peer(t, namespace_of(ino))
            ]
            return [gone for ino in going if (gone := lifecycle.evict(t, ino, time_ns))]

        try:
            evicted = await self._engine.transact(remove_names)
        finally:
            self.done(list(promised), len(evicted))
        return evicted

    def done(self, asked: Sequence[int], gone: int) -> None:
        """Notes that copies that might go went, or stay."""
        self.counters["peer_copies_let_go"] += gone
        for ino in asked:
            self._copies.done(ino)

    @property
    def rests(self) -> bool:
        """Whether fewer went a moment ago than were wanted: another look would find no more."""
        return now() < self._looks_at

    def rest(self) -> None:
        """Notes that fewer went than were wanted."""
        self._looks_at = now() + _REST_S

    async def elsewhere(self, inos: Sequence[int]) -> list[int]:
        """Returns those of these files that others are said to hold, in their order; nobody is
        asked. Raises KvfsError."""
        claims, at = self._claims(), now()
        if claims is None:
            return []
        own = [ino for ino in inos if self._refused.get(ino, 0.0) <= at]
        inodes = await self._engine.read(lambda t: read_inodes(t, own))
        named: list[tuple[int, tuple[int, bytes]]] = []
        for ino, inode in zip(own, inodes, strict=True):
            path = None if inode is None else self._paths.of(inode.parent, inode.name)
            if inode is not None and inode.nlink and path is not None:
                named.append((ino, (namespace_of(ino), path)))
        found = await claims([name for _, name in named])
        return [ino for (ino, _), (_, nodes) in zip(named, found, strict=True) if nodes]

    async def promised(self, inos: Sequence[int]) -> dict[int, bytes]:
        """Returns those of these files that may go while they have this checksum: another node
        keeps that content. `done` ends that. Cancelled: all of them stay. Raises KvfsError."""
        asked: dict[int, list[_Elsewhere]] = {}
        for each in await self._look(inos):
            node = rendezvous.first(each.content, each.nodes)
            asked.setdefault(node, []).append(each)
        promised: dict[int, bytes] = {}
        try:
            async with trio.open_nursery() as nursery:
                for node, those in asked.items():
                    for start in range(0, len(those), MOST_ASKED):
                        some = those[start : start + MOST_ASKED]
                        nursery.start_soon(self._ask, node, some, promised)
        except BaseException:
            self.done(list(promised), 0)
            raise
        return promised

    async def asked(self, peer: Party, params: Any) -> list[int]:
        """Handles the request `keep-copies`. Raises Invalid, Unavailable."""
        wanted = parse_wanted(params)
        claims = self._claims()
        if claims is None:
            return [int(CopyPromise.NONE)] * len(wanted)
        contents = self._contents([(each.namespace_id, each.path) for each in wanted])
        # Nothing else runs between this look and the promises: what is here then stays.
        found = self._engine.read_now(lambda t: [_held(t, each) for each in wanted])
        return [
            int(self._answer(*each, peer.node))
            for each in zip(wanted, found, contents, strict=True)
        ]

    # ---- inside

    def _answer(
        self, wanted: WantedPromise, found: tuple[int, Inode] | None, content: int, asking: int
    ) -> CopyPromise:
        if found is None:
            return CopyPromise.NONE
        ino, inode = found
        if not inode.checksum or not self._is_whole(ino, inode):
            return CopyPromise.NONE
        if (inode.size, inode.checksum) != (wanted.size, wanted.checksum):
            self._differing.found(wanted.namespace_id, wanted.path, asking)
            return CopyPromise.OTHER
        if not self._copies.promise(ino, content, asking, now()):
            return CopyPromise.NONE
        self.counters["peer_copies_promised"] += 1
        self._touch(ino)  # it stands for both now: else it would be the next to go here
        return CopyPromise.KEPT

    async def _look(self, inos: Sequence[int]) -> list[_Elsewhere]:
        claims, at = self._claims(), now()
        own = [
            ino
            for ino in inos
            if self._engine.is_local(namespace_of(ino)) and self._refused.get(ino, 0.0) <= at
        ]
        if claims is None or not own:
            return []
        blocks = await self._engine.read(lambda t: siblings.look(t, own))
        sealed = [each for each in blocks if each.is_sealed]
        found = await claims([(each.namespace_id, each.path) for each in sealed])
        return [
            _Elsewhere(block, content, others)
            for block, (content, nodes) in zip(sealed, found, strict=True)
            if (others := [node for node in nodes or () if node != self._me])
        ]

    async def _ask(self, node: int, some: Sequence[_Elsewhere], promised: dict[int, bytes]) -> None:
        questions = {each.block.ino: self._copies.ask(each.block.ino, now()) for each in some}
        some = [each for each in some if questions[each.block.ino]]
        if not some:
            return
        answers = [CopyPromise.NONE] * len(some)
        try:
            params = packed([_wanted(each.block) for each in some])
            told = await self._call(node, KEEP_COPIES, params, _DEADLINE_S)
            answers = parse_promises(told, len(some))
        except KvfsError as error:
            log.debug("node %d promises no copies: %s", node, error)
        finally:
            for each, answer in zip(some, answers, strict=True):
                ino = each.block.ino
                if answer is CopyPromise.KEPT:
                    if self._copies.promised(ino, questions[ino], now()):
                        promised[ino] = each.block.inode.checksum
                else:
                    self._copies.refused(ino, questions[ino])
                    self._refuse(ino)
                if answer is CopyPromise.OTHER:
                    self._differing.found(each.block.namespace_id, each.block.path, node)

    def _refuse(self, ino: int) -> None:
        self._refused.pop(ino, None)
        self._refused[ino] = now() + _REFUSED_S
        while len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]


def _wanted(block: HeldBlock) -> WantedPromise:
    return WantedPromise(block.namespace_id, block.path, block.inode.size, block.inode.checksum)


def _held(t: Transaction, wanted: WantedPromise) -> tuple[int, Inode] | None:
    held = held_names.told(t, wanted.namespace_id, wanted.path)
    return (held.ino, unpack_inode(held.record)) if held is not None and held.ino else None
