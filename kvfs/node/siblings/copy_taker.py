"""Copies of blocks that other nodes ask this one to take.

| under the name here | sealed alike | what happens |
|---|---|---|
| nothing, or what was taken over | - | it is taken over, and its data are brought |
| the same file, or another one | yes | it counts as a copy |
| former content of the same file | no | goes, if nobody has it open; then as above |
| another one | no | both stay, each with its holder; counted, and told, once both are sealed |
| a removal that is later | - | refused |

Former content that was written here goes only where a close is to replace it: that is the last one.

Invariants
- A copy counts once it is recorded here: then its data are verified, and on the disk.
- What is on its way is bounded in number and bytes; more is refused, and goes elsewhere.
- A record whose data did not come is forgotten like any that was taken over.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import trio

from kvfs.base.background import Background
from kvfs.base.errors import UNDECODABLE, Invalid, KvfsError, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Inode, unpack_inode
from kvfs.node.names.tombstones import Tombstones
from kvfs.node.siblings.copy_protocol import CopyOffer, CopyOutcome, parse_offers
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.tree import lifecycle
from kvfs.tree.changes import Change
from kvfs.tree.copies import held_names, siblings
from kvfs.tree.inodes import read_inodes
from kvfs.vfs.content_versions import is_version_of

log = logging.getLogger(__name__)
_ANSWER_S: Final = 2.0
"""Time after which the asking node is told that a copy is on its way."""
_RECORDED_S: Final = 10.0
_MOST: Final = 1024
_MOST_BYTES: Final = 1 << 30
_AT_ONCE: Final = 16


class CopyBrings(Protocol):
    """The ways in which data come here."""

    async def bring(self, ino: int) -> None:
        """Returns when the file's data are here. Raises KvfsError, OSError."""

    def record_now(self) -> None:
        """Has files that came a moment ago recorded at once."""


class _Coming:
    """A copy on its way."""

    __slots__ = ("done", "outcome", "recorded", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.done, self.recorded = trio.Event(), trio.Event()
        self.outcome = CopyOutcome.COMING


class CopyTaker:
    """The copies that one node takes."""

    def __init__(
        self,
        engine: Engine,
        brings: CopyBrings,
        stones: Tombstones,
        fade: Callable[[Sequence[int]], None],
        differing: DifferingNames,
        is_in_use: Callable[[int], bool],
        forget: Callable[[Sequence[Change]], Awaitable[None]],
    ) -> None:
        """`fade` has records forgotten whose data did not come. `is_in_use`: whether a file is open
        here. `forget` makes mounts forget names, and drops their files."""
        self._engine = engine
        self._brings = brings
        self._stones = stones
        self._fade = fade
        self._differing = differing
        self._is_in_use = is_in_use
        self._forget = forget
        self._coming: dict[int, _Coming] = {}
        self._slots = trio.Semaphore(_AT_ONCE)
        self._tasks = Background()
        self.counters = {"peer_copies_taken": 0, "peer_copies_refused": 0}

    async def run(self) -> None:
        """Brings what was asked for, until cancelled."""
        await self._tasks.run()

    def recorded(self, ino: int) -> None:
        """Notes that a file's data are recorded here."""
        coming = self._coming.get(ino)
        if coming is not None:
            coming.recorded.set()

    async def take(self, peer: Party, params: Any) -> list[int]:
        """Handles the request `take-copies`. Raises Invalid, Unavailable."""
        offers = parse_offers(params)
        if not self._tasks.runs:
            raise Unavailable("the node is not ready to take copies")
        coming = self._coming_of(offers)
        fresh = [each for each in offers if each.held.ino not in coming]
        outcomes = await self._begin(fresh, peer.node) if fresh else {}
        coming = self._coming_of(fresh) | coming
        with trio.move_on_after(_ANSWER_S):
            for each in coming.values():
                await each.done.wait()
        for ino, each in coming.items():
            outcomes[ino] = each.outcome
            if each.done.is_set() and self._coming.get(ino) is each:
                del self._coming[ino]
        return [int(outcomes.get(each.held.ino, CopyOutcome.REFUSED)) for each in offers]

    # ---- inside

    def _coming_of(self, offers: Sequence[CopyOffer]) -> dict[int, _Coming]:
        """Returns what is on its way of these already, also for another node."""
        inos = [each.held.ino for each in offers]
        return {ino: coming for ino in inos if (coming := self._coming.get(ino)) is not None}

    async def _begin(self, offers: Sequence[CopyOffer], holder: int) -> dict[int, CopyOutcome]:
        """Takes over what can be, and begins to bring it; returns what is known of the others."""
        outcomes: dict[int, CopyOutcome] = {}
        packed = keys.pack_node(holder)
        taken: list[tuple[int, int]] = []
        gone: list[Change] = []
        idle = {each.held.ino for each in offers if not self._is_in_use(each.held.ino)}
        room = self._room(offers)
        wanted = [each for each in offers if each.held.ino and not self._is_removed(each)]

        def fn(t: Transaction) -> None:
            outcomes.clear()
            taken.clear()
            gone.clear()
            for each in wanted:
                if each.held.ino in idle and _is_former(t, each):
                    gone.extend(_evict(t, each.held.ino))
                    outcomes[each.held.ino] = CopyOutcome.COMING
                    continue
                outcome = _take_over(t, each, packed, may_come=len(taken) < room)
                outcomes[each.held.ino] = outcome
                if outcome is CopyOutcome.COMING:
                    taken.append((each.held.ino, unpack_inode(each.held.record).size))

        await self._engine.transact(fn)
        if gone:
            await self._forget(gone)
        self._stones.renew(
            each.name for each in wanted if outcomes[each.held.ino] is CopyOutcome.COMING
        )
        for each in wanted:
            if outcomes[each.held.ino] is CopyOutcome.OTHER and _is_sealed(each):
                self._differing.found(*each.name, holder)
        for ino, size in taken:
            if ino in self._coming:
                continue  # another request came first
            coming = self._coming[ino] = _Coming(size)
            self._tasks.begin(self._bring, ino, coming)
        return outcomes

    def _room(self, offers: Sequence[CopyOffer]) -> int:
        """Returns how many of these may come."""
        for done in [ino for ino, each in self._coming.items() if each.done.is_set()]:
            del self._coming[done]  # nobody came back to ask
        if sum(each.size for each in self._coming.values()) >= _MOST_BYTES:
            return 0
        return min(len(offers), _MOST - len(self._coming))

    def _is_removed(self, offer: CopyOffer) -> bool:
        try:
            changed_ns = unpack_inode(offer.held.record).ctime_ns
        except UNDECODABLE:
            return True
        return self._stones.hides(*offer.name, changed_ns, offer.held.renews_ns)

    async def _bring(self, ino: int, coming: _Coming) -> None:
        try:
            async with self._slots:
                await self._brings.bring(ino)
            self._brings.record_now()
            with trio.move_on_after(_RECORDED_S):
                if not await self._engine.read(lambda t: held_names.is_held(t, ino)):
                    await coming.recorded.wait()
                coming.outcome = CopyOutcome.HERE
                self.counters["peer_copies_taken"] += 1
        except (KvfsError, OSError) as error:
            log.info("a copy of inode %#x does not come: %s", ino, error)
        finally:
            if coming.outcome is not CopyOutcome.HERE:
                coming.outcome = CopyOutcome.REFUSED
                self.counters["peer_copies_refused"] += 1
                self._fade([ino])
            coming.done.set()


def _take_over(t: Transaction, offer: CopyOffer, holder: bytes, *, may_come: bool) -> CopyOutcome:
    """Takes over a file whose data may come then; else returns what is to be said of it."""
    told = unpack_inode(offer.held.record)
    ino = held_names.named(t, *offer.name)
    if ino and held_names.is_held(t, ino):
        return _compare(t, ino, offer, told, keys.unpack_node(holder))
    if not may_come:
        return CopyOutcome.REFUSED
    try:
        now = held_names.take_over(t, *offer.name, offer.held, holder)
    except Invalid:
        return CopyOutcome.REFUSED
    return CopyOutcome.COMING if now == offer.held.ino else CopyOutcome.REFUSED


def _is_former(t: Transaction, offer: CopyOffer) -> bool:
    """Returns whether this node has former content of the file that is offered, and that gives way:
    it is another node's, or a close offers what replaces it."""
    told, ino = unpack_inode(offer.held.record), offer.held.ino
    (here,) = read_inodes(t, [ino])
    if here is None or not here.nlink or here.version >= told.version:
        return False
    is_own = is_version_of(here.version, keys.unpack_node(t.node))
    return held_names.is_held(t, ino) and not (is_own and told.flags & Flag.SEALED)


def _evict(t: Transaction, ino: int) -> list[Change]:
    gone = lifecycle.evict(t, ino, time.time_ns(), "unavailable")
    return [] if gone is None else [Change(*name, gone.ino) for name in gone.names]


def _is_sealed(offer: CopyOffer) -> bool:
    return bool(unpack_inode(offer.held.record).flags & Flag.SEALED)


def _compare(t: Transaction, ino: int, offer: CopyOffer, told: Inode, holder: int) -> CopyOutcome:
    here = read_inodes(t, [ino])[0]
    # What is not sealed is offered while its close waits: until that is done it gets no seal.
    not_now = CopyOutcome.REFUSED if told.flags & Flag.SEALED else CopyOutcome.OTHER
    if here is None or not here.flags & Flag.PUBLISHED:
        return not_now
    is_same = ino == offer.held.ino and here.version == told.version
    if not told.flags & Flag.SEALED or not here.flags & Flag.SEALED:
        if is_same and (here.size, here.mtime_ns) == (told.size, told.mtime_ns):
            return CopyOutcome.HERE
        return not_now
    if (here.size, here.checksum) != (told.size, told.checksum):
        return CopyOutcome.OTHER
    if is_same:
        siblings.note(t, ino, here.version, [holder, *offer.held.siblings])
    return CopyOutcome.HERE
