"""The exclusive delegations of one node (`kvfs.meta.exclusive`): when it takes one, what it need
not ask meanwhile, and how one ends that another node wants a change against."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Final

import trio

from kvfs.base.clock import now
from kvfs.base.errors import Busy
from kvfs.meta import exclusive
from kvfs.meta.engine import Transaction
from kvfs.meta.exclusive import BELIEVED_S, REVOKED_S
from kvfs.meta.give_backs import GiveBacks
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.replica.committer import Commits

QUESTIONS: Final = 32
WITHIN_S: Final = 10.0
"""So many questions before look-ups in a namespace, in that time, and one is taken with the next
change there: it costs other nodes a wait, which must be worth it."""
PAUSE_S: Final = 10.0
"""Time after one was asked back for which none is taken: others change something there too."""
PATIENCE_S: Final = 10.0


class Exclusives:
    """The exclusive delegations of one replica. `numbers` gives each that is taken a number of its
    own."""

    def __init__(self, local: EmbeddedEngine, numbers: Callable[[], int]) -> None:
        self._local = local
        self._numbers = numbers
        self.commits: Commits
        """Set before `run`, since what commits needs this first."""
        self._questions: dict[int, tuple[int, float]] = {}
        """The number of questions in each namespace, and since when they are counted."""
        self._paused: dict[int, float] = {}
        """Namespaces, and until when."""
        self._changed: dict[int, trio.Event] = {}
        self._asked_back = GiveBacks(
            lambda namespace_id: self.commits.commit(partial(_give_back, namespace_id)),
            "others wait until they may change names",
        )

    def is_believed(self, namespace_id: int, heard_at: float) -> bool:
        """Returns whether the replica has all names and attributes of a namespace, if it had
        everything at `heard_at`."""
        if now() - heard_at >= BELIEVED_S:
            return False
        return self._local.read_now(lambda t: exclusive.is_held(t, namespace_id))

    def asks(self, namespace_id: int) -> None:
        """Takes notice of a question before a look-up."""
        count, since = self._questions.get(namespace_id, (0, now()))
        is_old = now() - since > WITHIN_S
        self._questions[namespace_id] = (1, now()) if is_old else (count + 1, since)

    def admit(self, t: Transaction, written: Collection[bytes]) -> None:
        """Checks a transaction that is to write these keys, and has it take what is worth it.
        Raises Excluded."""
        for namespace_id in exclusive.check(t, written):
            if self._is_worth_it(namespace_id):
                exclusive.take(t, namespace_id, self._numbers())

    def look(self, namespace_id: int) -> None:
        """Takes notice that another node may have written a namespace's key."""
        event = self._changed.pop(namespace_id, None)
        if event is not None:
            event.set()
        if self._local.read_now(lambda t: exclusive.is_asked_back(t, namespace_id)):
            self._paused[namespace_id] = now() + PAUSE_S
            self._questions.pop(namespace_id, None)
            self._asked_back.soon(namespace_id)

    async def until_free(self, namespace_id: int) -> None:
        """Returns when no other node has names of a namespace to itself; one may take it again at
        once. Raises Busy after PATIENCE_S, Unavailable, Conflict, NoSpace."""
        asked_at: dict[bytes, float] = {}
        with trio.move_on_after(PATIENCE_S):
            while True:
                changed = self._changed.setdefault(namespace_id, trio.Event())
                which = await self.commits.commit(partial(_ask_back, namespace_id, asked_at))
                if which is None:
                    return
                end = asked_at.setdefault(which, now()) + REVOKED_S
                with trio.move_on_after(max(0.0, end - now())):
                    await changed.wait()
        raise Busy("other nodes go on changing names in the namespace: try again")

    async def run(self) -> None:
        """Gives back what others ask for, until cancelled."""
        await self._asked_back.run()

    async def give_back_all(self) -> None:
        """Gives back what this node holds, before it ends: others then wait for nothing. Raises
        Unavailable, Conflict, NoSpace."""
        for namespace_id in self._local.read_now(exclusive.namespaces):
            self._paused[namespace_id] = now() + PAUSE_S
            await self.commits.commit(partial(_give_back, namespace_id))

    def _is_worth_it(self, namespace_id: int) -> bool:
        count, since = self._questions.get(namespace_id, (0, 0.0))
        is_paused = now() < self._paused.get(namespace_id, 0.0)
        return count >= QUESTIONS and now() - since <= WITHIN_S and not is_paused


def _ask_back(namespace_id: int, asked_at: dict[bytes, float], t: Transaction) -> bytes | None:
    """Returns which one to wait for; None: there is none any more. `asked_at`: since when they are
    known to have been asked back."""
    which = exclusive.of_other(t, namespace_id)
    if which is None:
        return None
    if which in asked_at and now() - asked_at[which] >= REVOKED_S:
        exclusive.end(t, namespace_id, which)
        return None
    exclusive.ask_back(t, namespace_id, which)
    return which


def _give_back(namespace_id: int, t: Transaction) -> None:
    exclusive.end(t, namespace_id, t.node)
