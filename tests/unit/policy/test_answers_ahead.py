"""Answers that brought a file's bytes along: when they are asked for, and how long they wait."""

from typing import NamedTuple

from kvfs.policy.answers_ahead import KEPT_S, MOST, MOST_BYTES, AnswersAhead


class Ask(NamedTuple):
    name: int
    size: int = 100
    sealed: bool = True


class Connection:
    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Answers:
    """The answers of a node whose clock stands until it is set."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ahead = AnswersAhead[Ask, Connection](lambda: self.now)
        self._last = 0

    def look_up(self, *, reads: bool) -> bool:
        """A name is looked up, and its file read or not; whether its bytes came along."""
        takes = self.ahead.wanted()
        if not takes:
            if reads:
                assert self.ahead.take(0, Ask(0)) is None
            return False
        assert takes == MOST_BYTES
        self._last += 1
        self.ahead.put(self._last, Ask(self._last), Connection())
        if reads:
            assert self.ahead.take(self._last, Ask(self._last)) is not None
        return True


def test_bytes_come_along_as_long_as_they_are_read() -> None:
    answers = Answers()
    assert all(answers.look_up(reads=True) for _ in range(1_000))
    assert answers.ahead.counters == {"answers_ahead": 1_000, "answers_ahead_unused": 0}


def test_names_that_are_only_looked_at_drag_few_bytes_along() -> None:
    answers = Answers()
    taken = 0
    for _ in range(100_000):
        taken += answers.look_up(reads=False)
        answers.now += 0.001
    assert MOST < taken < 100
    answers.now += KEPT_S
    came_along = [answers.look_up(reads=True) for _ in range(40)]
    assert not came_along[0]
    assert all(came_along[20:]), "who reads soon has the bytes come along again"


def test_what_nobody_asks_for_is_closed_in_time() -> None:
    answers = Answers()
    connections = [Connection() for _ in range(3)]
    for ino, connection in enumerate(connections, 1):
        answers.ahead.put(ino, Ask(ino), connection)
        answers.now += 1.0
    answers.now = 100.0 + KEPT_S
    answers.ahead.expire()
    assert [each.is_closed for each in connections] == [True, False, False]
    assert answers.ahead.take(1, Ask(1)) is None
    assert answers.ahead.take(2, Ask(2)) is connections[1]
    assert answers.ahead.take(2, Ask(2)) is None, "it is used once"
    answers.ahead.close()
    assert connections[2].is_closed
    assert not connections[1].is_closed


def test_an_answer_to_another_question_is_not_used() -> None:
    answers = Answers()
    for other in (Ask(1)._replace(size=99), Ask(1)._replace(sealed=False)):
        connection = Connection()
        answers.ahead.put(1, Ask(1), connection)
        assert answers.ahead.take(1, other) is None
        assert connection.is_closed
    answers.ahead.put(1, Ask(1), Connection())
    assert answers.ahead.take(2, Ask(1)) is None
    assert answers.ahead.take(1, Ask(1)) is not None
