"""A node's part of a change of a namespace's coherence to `peer` while it has files
(`kvfs.tree.coherence_change` has the steps).

Invariants
- A record of what another node holds goes only when that one is said to hold it, has told all that
  it holds, or does not live: so a name whose data are there is found all the time.
- The server's records go last, when each node that was not removed has done its part, and has it on
  its disk.
- Work is done in batches; nothing of it waits for a node that is away but the end. While a living
  node has not told, all records are looked at once for each that has, not again and again.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from kvfs.base.errors import Conflict
from kvfs.base.retry import Persistence
from kvfs.cluster.job_lease import Claims
from kvfs.cluster.node_records import changing_coherence, members
from kvfs.meta.engine import Transaction
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.tree import coherence_change
from kvfs.tree.coherence_change import DONE, TOLD
from kvfs.tree.copies import own_part
from kvfs.tree.copies.own_part import ForeignFile

if TYPE_CHECKING:
    from kvfs.node.names.name_sets import NameSets

_PERIOD_S: Final = 1.0
_BATCH: Final = 128
_SETTLING_S: Final = 5.0
"""Time for which what nodes have told is on its way to all others, at most."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Told:
    """The nodes that have told what they hold of a namespace."""

    nodes: frozenset[int]
    since: float
    """When the last of them was seen to have."""
    is_looked_at: bool = False
    """Whether all records were looked at since then."""


class CoherenceChanger:
    """The part of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        claims: Claims,
        sets: Callable[[], "NameSets"],
        lives: Callable[[int], bool],
        is_in_use: Callable[[int], bool],
        fade: Callable[[Sequence[int]], None],
    ) -> None:
        """`lives`: whether a node holds its lease. `is_in_use`: whether a kernel knows an inode, or
        its data are on their way. `fade` has records that were taken over forgotten once nobody
        uses them."""
        self._engine = engine
        self._claims = claims
        self._sets = sets
        self._lives = lives
        self._is_in_use = is_in_use
        self._fade = fade
        self._told: dict[int, _Told] = {}
        """The nodes that have told what they hold, by namespace."""
        self._waiting: dict[int, int] = {}

    async def run(self) -> None:
        """Does its part until cancelled."""
        changing = Persistence(log.warning, "the coherence of a namespace is not changed yet")
        await changing.repeat(self._step, _PERIOD_S)

    def report(self) -> list[dict[str, Any]]:
        """Returns the part of the node's status: what it has still to do."""
        return [{"namespace": each, "names_left": left} for each, left in self._waiting.items()]

    # ---- inside

    async def _step(self) -> None:
        changing = await self._engine.read(coherence_change.switching)
        for gone in set(self._waiting) - set(changing):
            del self._waiting[gone]
            self._told.pop(gone, None)
        for namespace_id in changing:
            self._waiting.setdefault(namespace_id, 0)
            await self._take(namespace_id)

    async def _take(self, namespace_id: int) -> None:
        """Does what is next. Raises KvfsError, OSError."""
        steps = await self._engine.read(lambda t: coherence_change.steps(t, namespace_id))
        done = steps.get(self._engine.node)
        if done is None:
            await self._tell(namespace_id)
        elif done == TOLD:
            told = self._have_told(namespace_id, steps)
            is_known = self._is_known(told.nodes)
            if told.is_looked_at and not is_known:
                return
            is_last = is_known and self._is_settled(told)
            left = await self._let_go(namespace_id, is_last=is_last)
            self._waiting[namespace_id], told.is_looked_at = left, True
            if not left:
                await self._correct_usage(namespace_id)
                await self._report(namespace_id, DONE)
        elif not await self._engine.read(lambda t: changing_coherence(t, namespace_id)):
            await self._finish(namespace_id)

    async def _tell(self, namespace_id: int) -> None:
        """Takes for its own, and tells others, what it holds."""
        async for inos in self._files(namespace_id):
            await self._engine.transact(partial(_keep_own, inos))
        await self._sets().announcer.scan([namespace_id])
        await self._engine.local.sync()
        await self._report(namespace_id, TOLD)
        log.info("the names of namespace %d are this node's own now", namespace_id)

    async def _let_go(self, namespace_id: int, *, is_last: bool) -> int:
        """Lets go what others hold, as far as they are known to (`is_last`: all of it); returns how
        many names have to wait."""
        left = 0
        async for inos in self._files(namespace_id):
            found = await self._engine.read(lambda t: own_part.foreign(t, inos))  # noqa: B023
            waiting = [] if is_last else found
            await self._sets().learn(
                [(namespace_id, each.path) for each in waiting if each.path is not None]
            )
            kept = {each.ino for each in waiting if not self._is_claimed(namespace_id, each)}
            in_use = [
                each.ino for each in found if each.ino not in kept and self._is_in_use(each.ino)
            ]
            self._fade(in_use)
            gone = [each.ino for each in found if each.ino not in kept and each.ino not in in_use]
            if found:
                await self._engine.transact(partial(_part, gone, [*kept, *in_use]))
            left += len(kept)
        return left

    def _is_claimed(self, namespace_id: int, file: ForeignFile) -> bool:
        """Returns whether a file that others hold is found without the record of it here."""
        if file.path is None:
            return True
        claims = self._sets().claims(namespace_id, file.path) or ()
        return any(each != self._engine.node for each in claims)

    def _have_told(self, namespace_id: int, steps: dict[int, bytes]) -> _Told:
        """Returns the nodes that have told what they hold."""
        told = self._told.get(namespace_id)
        if told is None or told.nodes != steps.keys():
            told = self._told[namespace_id] = _Told(frozenset(steps), trio.current_time())
        return told

    def _is_settled(self, told: _Told) -> bool:
        """Returns whether what these nodes told has come here."""
        is_late = trio.current_time() > told.since + _SETTLING_S
        return is_late and not self._sets().exchange.report()["lagging"]

    def _is_known(self, told: frozenset[int]) -> bool:
        """Returns whether all living nodes have told: what another one has is a miss until it is
        back, and then it tells."""
        nodes = self._engine.read_now(members)
        return all(each in told or not self._lives(each) for each in nodes)

    async def _correct_usage(self, namespace_id: int) -> None:
        """Makes the usage that of this node's records."""
        engine = self._engine
        error = await trio.to_thread.run_sync(
            engine.read_now, lambda t: own_part.usage_error(t, namespace_id)
        )
        if error.bytes or error.inodes:
            await engine.transact(lambda t: own_part.correct_usage(t, namespace_id, error))

    async def _finish(self, namespace_id: int) -> None:
        """Drops the server's records, unless another node does. Raises Conflict, KvfsError."""
        name = f"coherence-{namespace_id}"
        if not await self._claims.take(name):
            return

        def finish(t: Transaction) -> None:
            self._claims.check(t, name)
            if changing_coherence(t, namespace_id):
                raise Conflict("a node has joined, and has to do its part first")
            coherence_change.finish(t, namespace_id)

        await self._engine.drop_shared(namespace_id)
        await self._engine.transact(finish)
        await self._claims.drop(name)
        log.info(
            "namespace %d is kept by its nodes: the engine knows none of its files", namespace_id
        )

    async def _report(self, namespace_id: int, step: bytes) -> None:
        await self._engine.transact(lambda t: coherence_change.report(t, namespace_id, step))

    async def _files(self, namespace_id: int) -> AsyncIterator[list[int]]:
        """Yields the inodes of a namespace, a batch at a time."""
        after = 0
        while inos := await self._engine.read(
            lambda t: own_part.files_after(t, namespace_id, after, _BATCH)  # noqa: B023
        ):
            yield inos
            after = inos[-1]
            await trio.lowlevel.checkpoint()


def _keep_own(inos: Sequence[int], t: Transaction) -> None:
    own_part.keep_own(t, inos)


def _part(gone: Sequence[int], kept: Sequence[int], t: Transaction) -> None:
    own_part.drop_foreign(t, gone)
    own_part.take_for_copies(t, kept)
