"""Offers of blocks to other nodes, which are to take copies of them.

Invariants
- Blocks that are offered to a node together go in requests of up to 128, two at a time.
- An offer ends: a block is waited for as long as it may take at 1 MiB a second, and a minute. A
  node that does not answer is offered nothing for ten seconds.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import trio

from kvfs.base.errors import KvfsError
from kvfs.node.names.name_protocol import Call
from kvfs.node.siblings.copy_protocol import (
    MOST_OFFERED,
    TAKE_COPIES,
    CopyOffer,
    CopyOutcome,
    packed,
    parse_outcomes,
)
from kvfs.tree.copies.siblings import HeldBlock

log = logging.getLogger(__name__)
_DEADLINE_S: Final = 3.0
_AGAIN_S: Final = 0.2
_REST_S: Final = 10.0
_LEAST_S: Final = 60.0
_BYTES_PER_S: Final = 1 << 20
_BATCH_BYTES: Final = 64 << 20
_AT_ONCE: Final = 2


class CopyOffers:
    """The offers of one node."""

    def __init__(self, call: Call, renews: Callable[[int, bytes], int]) -> None:
        """`renews`: the removal after which a path was written here; 0: none is known."""
        self._call = call
        self._renews = renews
        self._slots: dict[int, trio.Semaphore] = {}
        self._resting: dict[int, float] = {}
        self.counters = {"peer_copies_made": 0, "peer_copy_requests": 0}

    def resting(self) -> set[int]:
        """Returns the nodes that did not answer a moment ago."""
        now = trio.current_time()
        return {node for node, until in self._resting.items() if now < until}

    async def make(self, node: int, blocks: Sequence[HeldBlock]) -> dict[int, CopyOutcome]:
        """Offers blocks to a node; returns what became of each, by its number, once that is
        known."""
        outcomes: dict[int, CopyOutcome] = {}
        async with trio.open_nursery() as nursery:
            for batch in _batches(blocks):
                nursery.start_soon(self._make, node, batch, outcomes)
        self.counters["peer_copies_made"] += sum(
            each is CopyOutcome.HERE for each in outcomes.values()
        )
        return outcomes

    async def _make(
        self, node: int, batch: list[HeldBlock], outcomes: dict[int, CopyOutcome]
    ) -> None:
        size = sum(each.inode.size for each in batch)
        slots = self._slots.setdefault(node, trio.Semaphore(_AT_ONCE))
        try:
            async with slots:
                with trio.move_on_after(_LEAST_S + size / _BYTES_PER_S):
                    while batch := await self._ask(node, batch, outcomes):
                        await trio.sleep(_AGAIN_S)
        except KvfsError as error:
            log.info("node %d takes no copies of %d blocks: %s", node, len(batch), error)
            self._resting[node] = trio.current_time() + _REST_S
        for each in batch:
            outcomes[each.ino] = CopyOutcome.REFUSED

    async def _ask(
        self, node: int, batch: list[HeldBlock], outcomes: dict[int, CopyOutcome]
    ) -> list[HeldBlock]:
        """Asks once; returns the blocks that are on their way still. Raises KvfsError."""
        self.counters["peer_copy_requests"] += 1
        for each in batch:
            each.held.renews_ns = self._renews(each.namespace_id, each.path)
        offers = [CopyOffer(each.namespace_id, each.path, each.held) for each in batch]
        answer = await self._call(node, TAKE_COPIES, packed(offers), _DEADLINE_S)
        coming: list[HeldBlock] = []
        for each, outcome in zip(batch, parse_outcomes(answer, len(batch)), strict=True):
            if outcome is CopyOutcome.COMING:
                coming.append(each)
            else:
                outcomes[each.ino] = outcome
        return coming


def _batches(blocks: Sequence[HeldBlock]) -> Iterator[list[HeldBlock]]:
    batch: list[HeldBlock] = []
    size = 0
    for each in blocks:
        if batch and (len(batch) == MOST_OFFERED or size + each.inode.size > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.inode.size
    if batch:
        yield batch
