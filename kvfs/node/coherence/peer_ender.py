"""A node's part of the end of a namespace's coherence `peer` (`kvfs.tree.copies.peer_end` has the
steps).

Invariants
- Until all have told what they hold (`peer_teller`) nobody writes to it, so each step can be done
  again, and the change be asked back.
- Work is done in batches; no list has all files.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import trio

from kvfs.base.errors import Conflict, KvfsError, NoSpace
from kvfs.base.retry import Persistence
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.node_records import changing_coherence, members
from kvfs.meta.ending_namespaces import EndingNamespaces
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_layer import Layered
from kvfs.meta.records import Namespace, Tag
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.coherence.peer_teller import PeerTeller
from kvfs.tree import coherence_change
from kvfs.tree.coherence_change import DONE, TOLD
from kvfs.tree.copies import node_usage, own_part, peer_end, told_records
from kvfs.tree.copies.peer_end import RECORDS, STONES

_PERIOD_S: Final = 0.5
_STEP_S: Final = 0.02
"""The same while a namespace is closed, and others wait."""
_BATCH: Final = 256
_TAKEN: Final = 1_000
"""Keys that become the engine's in one commit: some milliseconds."""
_PATIENCE_S: Final = 30.0
"""Time for which a step may fail before the change is asked back."""
AWAY_S: Final = 3.0
"""Time for which a node must be seen not to live: one that joins has a record before a lease."""
_SILENCE_S: Final = 60.0
"""Time after which a change is asked back of which nothing is heard."""
log = logging.getLogger(__name__)


class PeerEnder:
    """The part of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        jobs: Claims,
        lives: Callable[[int], bool],
        teller: PeerTeller,
        drop_data: Callable[[Sequence[tuple[int, int]]], object],
        ended: Callable[[int], None],
    ) -> None:
        """`lives`: whether a node holds its lease. `teller` tells what this node has. `drop_data`
        drops data files by number and version. `ended` is told of a namespace whose names are not
        this node's own any more, before that is recorded: perhaps more than once."""
        self._engine = engine
        self._ending = engine.ending
        self._jobs = jobs
        self._lives = lives
        self._teller = teller
        self._drop_data = drop_data
        self._ended = ended
        self._failing_since: float | None = None
        self._away_since: float | None = None
        self._heard: dict[int, tuple[object, float]] = {}
        """How far all nodes were with a namespace, and since when they are."""

    async def run(self) -> None:
        """Does its part until cancelled."""
        ending = Persistence(log.warning, "a namespace does not end being peer yet")
        while True:
            await ending.attempt(self._step)
            is_closed = any(map(self._ending.is_closed, self._teller.told))
            await trio.sleep(_STEP_S if is_closed else _PERIOD_S)

    def report(self) -> list[dict[str, Any]]:
        """Returns the part of the node's status: what it has told."""
        return [
            {"namespace": each, "records_told": told} for each, told in self._teller.told.items()
        ]

    # ---- inside

    async def _step(self) -> None:
        for namespace_id in self._ending.ended():
            await take_engines(self._ending, namespace_id, self._drop_data)
            log.info("the names of namespace %d are everybody's now", namespace_id)
        found = await self._engine.read(peer_end.ending)
        for gone in set(self._teller.told) - set(found):
            del self._teller.told[gone]
            self._heard.pop(gone, None)
        for namespace_id, record in found.items():
            self._teller.told.setdefault(namespace_id, 0)
            if not record.is_peer:
                await self._end(namespace_id)
            elif record.is_asked_back:
                await self._forget(namespace_id)
            else:
                await self._take_part(namespace_id, record)

    async def _take_part(self, namespace_id: int, record: Namespace) -> None:
        """Does what is next, or asks the change back. Raises KvfsError, OSError."""
        nodes = await self._engine.read(members)
        away = [each for each in nodes if each != self._engine.node and not self._lives(each)]
        self._away_since = (self._away_since or trio.current_time()) if away else None
        if self._away_since is not None and trio.current_time() - self._away_since >= AWAY_S:
            await self._ask_back(namespace_id, f"node {away[0]} is away")
            return
        try:
            await self._do_next(namespace_id, record, nodes)
        except Conflict:
            return  # it was asked back, or a node has joined: the next look tells
        except NoSpace as error:
            await self._ask_back(namespace_id, str(error))
        except KvfsError as error:
            since = self._failing_since = self._failing_since or trio.current_time()
            if trio.current_time() - since > _PATIENCE_S:
                await self._ask_back(namespace_id, str(error))
            raise
        self._failing_since = None

    async def _do_next(self, namespace_id: int, record: Namespace, nodes: list[int]) -> None:
        engine, began = self._engine, (record.tags or {})[Tag.ENDS_PEER]
        steps = await engine.read(lambda t: coherence_change.steps(t, namespace_id))
        if set(steps) - set(nodes):
            await self._ask_back(namespace_id, "a node was removed")
            return
        if self._is_stuck(namespace_id, steps):
            await self._ask_back(namespace_id, "a node does not tell what it holds")
            return
        mine = steps.get(engine.node)
        if mine is None:
            await self._teller.tell_removals(namespace_id, began)
            await self._report(namespace_id, began, STONES)
        elif mine == STONES and peer_end.have_done(steps, nodes, STONES):
            await self._teller.tell_records(namespace_id, began)
            await self._report(namespace_id, began, RECORDS)
        elif mine == RECORDS and peer_end.have_done(steps, nodes, RECORDS):
            await self._teller.tell_names(namespace_id, began)
            await self._report(namespace_id, began, TOLD)
        elif mine == TOLD and peer_end.have_done(steps, nodes, TOLD):
            await engine.transact(lambda t: peer_end.end(t, namespace_id, began, members(t)))

    async def _report(self, namespace_id: int, began: bytes, step: bytes) -> None:
        await self._engine.transact(lambda t: peer_end.report(t, namespace_id, began, step))

    def _is_stuck(self, namespace_id: int, steps: dict[int, bytes]) -> bool:
        """Returns whether nothing was heard of any node's part for a while."""
        state, now = (steps, self._ending.heard), trio.current_time()
        before, since = self._heard.get(namespace_id, (None, now))
        if before != state:
            since = now
        self._heard[namespace_id] = state, since
        return now - since > _SILENCE_S

    async def _ask_back(self, namespace_id: int, why: str) -> None:
        if await self._engine.transact(lambda t: peer_end.ask_back_closed(t, namespace_id)):
            log.warning("namespace %d does not end being peer: %s", namespace_id, why)
            await self._engine.drop_shared(namespace_id)  # an engine that is full takes no step now

    # ---- after the entry that ended it

    async def _end(self, namespace_id: int) -> None:
        steps = await self._engine.read(lambda t: coherence_change.steps(t, namespace_id))
        if steps.get(self._engine.node) != DONE:
            self._ended(namespace_id)
            await self._engine.local.sync()
            await self._engine.transact(lambda t: coherence_change.report(t, namespace_id, DONE))
        else:
            await self._finish(namespace_id, is_dropped=False)

    async def _forget(self, namespace_id: int) -> None:
        """Forgets what the engine was told, after the change was asked back."""
        steps = await self._engine.read(lambda t: coherence_change.steps(t, namespace_id))
        if steps.get(self._engine.node) == DONE:
            await self._finish(namespace_id, is_dropped=True)
            return
        while not self._ending.drop(namespace_id, _TAKEN):
            await trio.lowlevel.checkpoint()
        await self._engine.local.sync()
        await self._engine.transact(lambda t: coherence_change.report(t, namespace_id, DONE))

    async def _finish(self, namespace_id: int, *, is_dropped: bool) -> None:
        """Finishes the change when all nodes are done, unless another node does. `is_dropped`: what
        the engine was told goes."""
        engine, name = self._engine, f"coherence-{namespace_id}"
        if await engine.read(lambda t: changing_coherence(t, namespace_id)):
            return
        if not await self._jobs.take(name):
            return
        if is_dropped:
            await engine.drop_shared(namespace_id)
        while not await engine.transact(lambda t: peer_end.drop_stones(t, namespace_id, _TAKEN)):
            pass

        def finish(t: Transaction) -> None:
            self._jobs.check(t, name)
            if changing_coherence(t, namespace_id):
                raise Conflict("a node has joined, and has to do its part first")
            if not is_dropped:
                node_usage.forget(t, namespace_id)  # a node may have told before it took its part
            if coherence_change.is_switching(t, namespace_id):
                coherence_change.finish(t, namespace_id)

        await engine.transact(finish)
        await self._jobs.drop(name)


async def settle(
    engine: ReplicaEngine, drop_data: Callable[[Sequence[tuple[int, int]]], object]
) -> None:
    """Brings each namespace to an end that this node's last run left closed, before anything is
    written here: what all nodes have told is taken, anything else is asked back. Raises KvfsError.
    """
    for namespace_id in await engine.read(peer_end.ending):
        if engine.ending.is_closed(namespace_id) and not engine.ending.has_ended(namespace_id):
            await engine.transact(partial(_ask_back, namespace_id))
            await engine.catch_up()
    for namespace_id in engine.ending.ended():
        await take_engines(engine.ending, namespace_id, drop_data)


async def take_engines(
    ending: EndingNamespaces,
    namespace_id: int,
    drop_data: Callable[[Sequence[tuple[int, int]]], object],
) -> None:
    """Makes this node's records of a namespace that has ended those of the engine. Names are found
    throughout: all are added, then directories get their common numbers, then the rest goes. Raises
    NoSpace, ReadOnly, Unavailable."""
    if not ending.is_taking(namespace_id):
        after = 0
        while inos := ending.read(
            lambda _engines, t: own_part.files_after(t, namespace_id, after, _BATCH)  # noqa: B023
        ):
            after = inos[-1]
            if lost := ending.read(partial(_lost_content, inos)):
                drop_data(lost)
            await trio.lowlevel.checkpoint()
        for switches in (False, True):
            last, is_all = b"", False
            while not is_all:
                last = ending.add(namespace_id, last, _TAKEN, switches=switches)
                is_all = not last
                await trio.lowlevel.checkpoint()
    while not ending.take(namespace_id, _TAKEN):
        await trio.lowlevel.checkpoint()


def _lost_content(inos: Sequence[int], engines: Layered, t: Transaction) -> list[tuple[int, int]]:
    return told_records.lost_content(cast("Transaction", engines), t, inos)


def _ask_back(namespace_id: int, t: Transaction) -> None:
    peer_end.ask_back_closed(t, namespace_id)
