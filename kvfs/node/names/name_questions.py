"""Questions to holders of names: those of one moment go together.

Invariants
- A node is asked by few requests at a time; what is asked meanwhile goes with the next one.
- A question ends: with an answer, or after its deadline; then it is not sent any more.
- What waits for a node is bounded.
- A node that did not answer rests for a moment: nobody waits for it again meanwhile.
"""

from collections.abc import Callable
from typing import Final

import trio

from kvfs.base.background import Background
from kvfs.base.errors import KvfsError, Unavailable
from kvfs.node.names.name_protocol import (
    CONFIRM,
    MOST_NAMES,
    Question,
    TakingCall,
    parse_confirmed,
)
from kvfs.tree.copies.held_names import HeldName

DEADLINE_S: Final = 1.0
LEASE_S: Final = 5.0
"""Time for which a holder is asked to keep what it told of: a look-up's open follows at once."""
_REST_S: Final = 1.0
_MOST_WAITING: Final = 1 << 14
"""Questions that wait for one node."""
_REQUESTS: Final = 4
"""Requests to one node at a time."""


class _Waiting:
    """A question, and what became of it."""

    __slots__ = ("answer", "done", "error", "is_over", "question", "takes")

    def __init__(self, question: Question, takes: bool) -> None:
        self.question = question
        self.takes = takes
        self.done = trio.Event()
        self.is_over = False
        """Whether nobody waits for it any more."""
        self.answer: HeldName | None = None
        self.error: KvfsError | None = None


class _Line:
    """The questions to one node."""

    __slots__ = ("requests", "rests_until", "waiting")

    def __init__(self) -> None:
        self.waiting: list[_Waiting] = []
        self.requests = 0
        self.rests_until = 0.0


class NameQuestions:
    """The questions of one node. `run` must be running."""

    def __init__(self, call: TakingCall, wanted: Callable[[], int] = lambda: 0) -> None:
        """`wanted`: the bytes that a file may have which comes along with the answer."""
        self._call = call
        self._wanted = wanted
        self._lines: dict[int, _Line] = {}
        self._tasks = Background()
        self.counters = {"name_requests": 0, "name_questions": 0, "name_questions_unanswered": 0}

    async def run(self) -> None:
        """Sends what is asked, until cancelled."""
        await self._tasks.run()

    def rests(self, node: int) -> bool:
        """Returns whether the node did not answer a moment ago."""
        line = self._lines.get(node)
        return line is not None and trio.current_time() < line.rests_until

    def let_rest(self, node: int) -> None:
        """Notes that the node did not answer."""
        line = self._lines.setdefault(node, _Line())
        line.rests_until = trio.current_time() + _REST_S

    async def ask(self, node: int, question: Question, *, takes: bool = False) -> HeldName | None:
        """Returns what the node tells of a name. `takes`: the bytes of a small file may come along,
        if no other question goes with it. Raises KvfsError if the node does not answer."""
        if not self._tasks.runs:
            raise Unavailable("the node is not ready to ask others for names")
        line = self._lines.setdefault(node, _Line())
        if len(line.waiting) >= _MOST_WAITING:
            raise Unavailable(f"node {node} is asked too much at a time")
        waiting = _Waiting(question, takes)
        line.waiting.append(waiting)
        self.counters["name_questions"] += 1
        if len(line.waiting) == 1 and line.requests < _REQUESTS:
            line.requests += 1
            self._tasks.begin(self._send, node, line)
        with trio.move_on_after(2 * DEADLINE_S):
            await waiting.done.wait()
        if not waiting.done.is_set():
            waiting.is_over = True
            raise Unavailable(f"node {node} is asked too much at a time")
        if waiting.error is not None:
            raise waiting.error
        return waiting.answer

    async def _send(self, node: int, line: _Line) -> None:
        try:
            while line.waiting:
                batch, line.waiting = line.waiting[:MOST_NAMES], line.waiting[MOST_NAMES:]
                wanted = [each for each in batch if not each.is_over]
                if wanted:
                    await self._ask(node, wanted)
        finally:
            line.requests -= 1

    async def _ask(self, node: int, batch: list[_Waiting]) -> None:
        self.counters["name_requests"] += 1
        params = [LEASE_S, [each.question for each in batch]]
        error: KvfsError | None = Unavailable("the node stops")
        try:
            takes = self._wanted() if len(batch) == 1 and batch[0].takes else 0
            found = await self._call(node, CONFIRM, params, DEADLINE_S, takes)
            told = parse_confirmed(found, len(batch))
            for each, answer in zip(batch, told, strict=True):
                each.answer = answer
            error = None
        except KvfsError as failed:
            error = failed
            self.let_rest(node)
            self.counters["name_questions_unanswered"] += len(batch)
        finally:
            for each in batch:
                each.error = error
                each.done.set()
