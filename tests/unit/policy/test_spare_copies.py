"""Holders of one content that let go of their copies: messages are lost, late and doubled, clocks
run on, and a spare copy is never the last one."""

import random
from typing import Final

from kvfs.policy.spare_copies import MOST, TERM_S, SpareCopies
from tests.conftest import LONG, SEED

CONTENT: Final = 77
INTERLEAVINGS: Final = 1_000_000 if LONG else 10_000
STEPS: Final = 40


def holders(*numbers: int) -> list[SpareCopies]:
    return [SpareCopies(each) for each in numbers]


def test_a_copy_goes_on_the_promise_of_another_and_that_one_stays() -> None:
    here, there = holders(1, 2)
    question = here.ask(10, 0.0)
    assert question
    assert not here.may_go(10, 0.0)
    assert there.promise(20, CONTENT, 1, 1.0)
    assert here.promised(10, question, 2.0)
    assert here.may_go(10, TERM_S - 0.1)
    assert there.keeps(20, TERM_S + 0.9)
    assert not there.ask(20, TERM_S + 0.9)
    assert not here.may_go(10, TERM_S)  # a second before the other's term ends
    assert there.ask(20, TERM_S + 1.0)


def test_of_two_that_ask_at_once_one_goes() -> None:
    here, there = holders(1, 2)
    mine, theirs = here.ask(10, 0.0), there.ask(20, 0.0)
    promises = there.promise(20, CONTENT, 1, 0.1), here.promise(10, CONTENT, 2, 0.1)
    assert sorted(promises) == [False, True]
    if promises[0]:
        here.promised(10, mine, 0.2)
    else:
        there.promised(20, theirs, 0.2)
    assert (here.may_go(10, 0.2), there.may_go(20, 0.2)) == promises


def test_who_is_about_to_let_go_promises_nothing() -> None:
    here, there = holders(1, 2)
    question = here.ask(10, 0.0)
    there.promise(20, CONTENT, 1, 0.0)
    here.promised(10, question, 0.1)
    assert not here.promise(10, CONTENT, 2, 0.2)
    here.done(10)
    assert here.promise(10, CONTENT, 2, 0.2)  # it stayed


def test_an_answer_to_an_earlier_question_counts_for_no_later_one() -> None:
    (here,) = holders(1)
    first = here.ask(10, 0.0)
    here.refused(10, first)
    assert here.ask(10, TERM_S)
    assert not here.promised(10, first, TERM_S)
    assert not here.may_go(10, TERM_S)


def test_a_late_promise_counts_for_nothing() -> None:
    (here,) = holders(1)
    question = here.ask(10, 0.0)
    assert not here.promised(10, question, TERM_S)
    assert not here.may_go(10, TERM_S)
    assert here.promise(10, CONTENT, 2, TERM_S)  # it stays


def test_promises_are_bounded_and_those_that_ended_make_room() -> None:
    (here,) = holders(1)
    assert all(here.promise(each, CONTENT, 2, 0.0) for each in range(MOST))
    assert not here.promise(MOST, CONTENT, 2, 1.0)
    assert here.promise(MOST, CONTENT, 2, TERM_S + 0.1)


class Cluster:
    """Nodes of which some have the content, and the messages on their way."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        numbers = chance.sample(range(1, 100), chance.randint(2, 4))
        self.nodes = {number: SpareCopies(number) for number in numbers}
        self.clocks = {number: chance.uniform(0, 100) for number in numbers}
        self.content = chance.getrandbits(48)
        self.there = set(numbers)
        self.questions: list[tuple[int, int, int]] = []
        self.answers: list[tuple[int, int, bool]] = []
        self.dropped = 0

    def step(self) -> None:
        chance = self.chance.random()
        number = self.chance.choice(list(self.nodes))
        if chance < 0.3:
            self._ask(number)
        elif chance < 0.6:
            self._deliver_question()
        elif chance < 0.8:
            self._deliver_answer()
        elif chance < 0.95:
            self._let_go(number)
        else:
            passed = self.chance.choice((0.5, 3.0, TERM_S))
            for each in self.clocks:
                self.clocks[each] += passed

    def _ask(self, number: int) -> None:
        if number not in self.there:
            return
        question = self.nodes[number].ask(number, self.clocks[number])
        if question:
            asked = self.chance.choice([each for each in self.nodes if each != number])
            self.questions.append((number, asked, question))

    def _deliver_question(self) -> None:
        if not self.questions:
            return
        at = self.chance.randrange(len(self.questions))
        asking, asked, question = self.questions[at]
        if self.chance.random() < 0.8:  # else it comes twice
            self.questions.pop(at)
        if self.chance.random() < 0.1:
            return  # lost
        promised = asked in self.there and self.nodes[asked].promise(
            asked, self.content, asking, self.clocks[asked]
        )
        self.answers.append((asking, question, promised))

    def _deliver_answer(self) -> None:
        if not self.answers:
            return
        asking, question, promised = self.answers.pop(self.chance.randrange(len(self.answers)))
        if promised:
            self.nodes[asking].promised(asking, question, self.clocks[asking])
        else:
            self.nodes[asking].refused(asking, question)

    def _let_go(self, number: int) -> None:
        if number not in self.there or not self.nodes[number].may_go(number, self.clocks[number]):
            return
        if self.chance.random() < 0.9:  # else it stays after all
            self.there.discard(number)
            self.dropped += 1
            assert self.there, f"the last copy went as a spare one (seed {SEED})"
        self.nodes[number].done(number)


def test_whatever_comes_when_the_last_copy_is_no_spare_one() -> None:
    chance = random.Random(SEED)
    dropped = 0
    for _ in range(INTERLEAVINGS):
        cluster = Cluster(chance)
        for _ in range(STEPS):
            cluster.step()
        dropped += cluster.dropped
    assert dropped > INTERLEAVINGS // 10, f"copies do go (seed {SEED})"
