"""Takes delegations for this node, recalls those of others, and gives its own back when recalled.

| step of a recall | in the engine | after a kill here | after a kill of the other node |
|---|---|---|---|
| 1 recalled | the other's delegation says so | 2 comes all the same | its next start, or 2b |
| 2 its files are known | its delegation is gone | nothing to do | nothing to do |
| 2b its lease has ended | its delegation is gone | nothing to do | its files may lack a place |
| 3 the directory is removed | nobody has one: 3 looks | - | - |

Everything goes through the engine, and its log tells of it: a node that cannot hear of a recall
cannot renew its lease either. No clock is used, and no answer from before a restart is believed.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import trio

from kvfs.base.errors import Busy
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.give_backs import GiveBacks
from kvfs.meta.replica.applier import Applied
from kvfs.meta.replica.committer import Commits, Function
from kvfs.meta.replica.local_writes import LocalWrites

PATIENCE_S: Final = 15.0
"""Time for which a removal waits: longer than it takes to know that a node is dead."""
RECHECK_S: Final = 0.5
"""Time between checks for the end of a lease, which no log tells."""
PAUSE_S: Final = 0.25
"""Time for which a node takes no delegation again: a node that wants to remove a directory needs a
moment in which there is none, and removes others soon."""
_BATCH: Final = 64
_DELEGATION: Final = keys.DELEGATIONS[0][0]


class Recalls:
    """The recalls of one replica. `is_alive`: whether another node may still use its delegation."""

    def __init__(
        self,
        node: int,
        privates: LocalWrites,
        proposer: Commits,
        is_alive: Callable[[int], bool],
        on_exclusive: Callable[[int], None],
    ) -> None:
        """`on_exclusive` is told of a namespace whose exclusive delegation may be another."""
        self._node = node
        self._privates = privates
        self._proposer = proposer
        self._is_alive = is_alive
        self._on_exclusive = on_exclusive
        self._paused: dict[int, float] = {}
        """Namespaces, and until when."""
        self._waiting: dict[int, trio.Event] = {}
        """Namespaces in which others' delegations have to go."""
        self._recalled = GiveBacks(
            self._give_back, "others wait until new files of this node are known"
        )

    def taking(self, namespace_id: int, fn: Function) -> Function:
        """Returns `fn`, extended to take a delegation if that is possible."""
        if trio.current_time() < self._paused.get(namespace_id, -math.inf):
            return fn

        def taken(t: Transaction) -> Any:
            delegations.take(t, namespace_id)
            return fn(t)

        return taken

    def applied(self, changed: Iterable[Applied]) -> None:
        """Takes notice of changes that others made in the engine."""
        for key, _, value in changed:
            if key[0] != _DELEGATION:
                continue
            namespace_id, node = keys.parse_delegation(key)
            if node == delegations.EXCLUSIVE:
                self._on_exclusive(namespace_id)
            elif node != self._node:
                self._tell(namespace_id)
            elif value == delegations.RECALLED:
                self.give_back_soon(namespace_id)

    def found(self, t: Transaction) -> None:
        """Takes notice of recalls in the replica, when it was read anew or is followed again after
        a rest."""
        node = keys.pack_node(self._node)
        for namespace_id in delegations.of_node(t, node):
            if t.get(keys.delegation(namespace_id, node)) == delegations.RECALLED:
                self.give_back_soon(namespace_id)

    async def recall(self, namespace_id: int, end: float) -> None:
        """Returns when no living node but this one has a delegation of the namespace; one may take
        one again at once. Raises Busy at `end`, Unavailable, Conflict, NoSpace."""
        with trio.move_on_at(end):
            while True:
                gone = self._waiting.setdefault(namespace_id, trio.Event())
                if not await self._proposer.commit(partial(self._ask, namespace_id)):
                    return
                with trio.move_on_after(RECHECK_S):
                    await gone.wait()
        raise Busy("another node may be making files in the directory, and does not answer")

    async def run(self) -> None:
        """Gives back recalled delegations, until cancelled."""
        await self._recalled.run()

    def _ask(self, namespace_id: int, t: Transaction) -> bool:
        """Returns whether there is any node to wait for."""
        is_waiting = False
        for node in delegations.others(t, namespace_id):
            key = keys.delegation(namespace_id, keys.pack_node(node))
            if not self._is_alive(node):
                t.delete(key)
                continue
            is_waiting = True
            if t.get(key) != delegations.RECALLED:
                t.put(key, delegations.RECALLED)
        return is_waiting

    def give_back_soon(self, namespace_id: int) -> None:
        """Has this node's delegation given back: others wait for it, or it is not used."""
        self._pause(namespace_id)
        self._recalled.soon(namespace_id)

    async def _give_back(self, namespace_id: int) -> None:
        key = keys.delegation(namespace_id, keys.pack_node(self._node))

        def some(t: Transaction) -> list[int]:
            return self._privates.named_in(t, namespace_id)[:_BATCH]

        def fn(t: Transaction) -> bool:
            """Gives it back. No file is made any more that only this node knows of, since the
            replica says that it was recalled; files beyond a batch come first."""
            if len(self._privates.named_in(t, namespace_id)) > _BATCH:
                return False
            if t.get(key) is not None:  # else the namespace's names became this node's own
                t.delete(key)
            return True

        while not await self._proposer.commit(fn, some):
            pass
        self._pause(namespace_id)

    def _pause(self, namespace_id: int) -> None:
        self._paused[namespace_id] = trio.current_time() + PAUSE_S

    def _tell(self, namespace_id: int) -> None:
        event = self._waiting.pop(namespace_id, None)
        if event is not None:
            event.set()
