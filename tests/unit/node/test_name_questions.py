"""Questions to one node, many at a time, and to one that does not answer."""

from typing import Any

import pytest
import trio
import trio.testing

from kvfs.base.errors import Unavailable
from kvfs.node.names import name_questions
from kvfs.node.names.name_questions import DEADLINE_S, NameQuestions

ASKED = 2500
MOST_WAITING = 2048
MOST_NAMES = 16


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_questions, "_MOST_WAITING", MOST_WAITING)
    monkeypatch.setattr(name_questions, "MOST_NAMES", MOST_NAMES)


class Holder:
    """A node that has nothing, and takes its time to say so."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.asked = 0

    async def call(
        self, _node: int, _method: str, params: Any, deadline_s: float, _wanted: int
    ) -> Any:
        names = params[1]
        assert len(names) <= MOST_NAMES
        self.asked += len(names)
        with trio.move_on_after(deadline_s):
            await trio.sleep(self.takes_s)
            return [None] * len(names)
        raise Unavailable("it did not answer")


def ask_all(holder: Holder) -> tuple[int, int]:
    """Asks for many names at once; returns how many were answered, and how many not."""
    answered, unanswered = 0, 0

    async def ask(questions: NameQuestions, number: int) -> None:
        nonlocal answered, unanswered
        try:
            await questions.ask(2, (1, b"%d" % number))
            answered += 1
        except Unavailable:
            unanswered += 1

    async def main() -> None:
        questions = NameQuestions(holder.call)
        async with trio.open_nursery() as running:
            running.start_soon(questions.run)
            await trio.testing.wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                for number in range(ASKED):
                    nursery.start_soon(ask, questions, number)
            await trio.sleep(10 * DEADLINE_S)
            running.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return answered, unanswered


def test_what_waits_for_a_node_is_bounded_and_the_rest_is_asked() -> None:
    holder = Holder(0.001)
    answered, unanswered = ask_all(holder)
    assert answered + unanswered == ASKED
    assert answered == holder.asked
    assert MOST_WAITING // 2 < answered < ASKED


def test_questions_that_nobody_waits_for_any_more_are_not_sent() -> None:
    holder = Holder(0.9 * DEADLINE_S)
    answered, unanswered = ask_all(holder)
    assert answered + unanswered == ASKED
    assert holder.asked < 20 * MOST_NAMES
