"""Answers that brought the bytes of a small file along, before those were asked for: whoever asks
for the file's data next has them without a request.

Whether they will be wanted is not known when a name is looked up, so the last ones say: while those
that came were used, the next look-up takes its bytes along; when some were not, ever more look-ups
take none, up to a thousand for one that tries again, and fewer with each small file that had to be
asked for. So a program that looks at names alone drags few bytes along, and one that reads what it
finds saves a round trip for each.

Invariants
- At most MOST answers wait, each for KEPT_S: the bytes that nobody wanted are bounded.
- An answer is used once, for just the request that it answers.
"""

from collections.abc import Callable, Hashable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

MOST_BYTES: Final = 64 << 10
"""Bytes of a file that come along: what a connection holds while nobody reads it."""
MOST: Final = 16
KEPT_S: Final = 2.0
_MOST_PASSED: Final = 1_023


class Question(Protocol):
    """The request that an answer is to, or would be."""

    @property
    def size(self) -> int:
        """Bytes of the file."""


class Closing(Protocol):
    """The source that an answer is read from."""

    def close(self) -> None: ...


Q = TypeVar("Q", bound=Question)
C = TypeVar("C", bound=Closing)


class _Waiting(NamedTuple, Generic[Q, C]):
    question: Q
    connection: C
    until: float


class AnswersAhead(Generic[Q, C]):
    """The answers that one node has. Pure but for the clock that it is given."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[Hashable, _Waiting[Q, C]] = {}
        self._passed = 0
        """Look-ups that took nothing along, after the last that was in vain."""
        self._to_pass = 0
        self.counters = {"answers_ahead": 0, "answers_ahead_unused": 0}

    def wanted(self) -> int:
        """Returns how many bytes a file may have that the next look-up takes along."""
        self.expire()
        if len(self._waiting) >= (1 if self._to_pass else MOST):
            return 0
        if self._passed < self._to_pass:
            self._passed += 1
            return 0
        return MOST_BYTES

    def put(self, name: Hashable, question: Q, connection: C) -> None:
        """Keeps an answer for the request that asks for it; `name`: that of a node and a file."""
        self.counters["answers_ahead"] += 1
        earlier = self._waiting.pop(name, None)
        if earlier is not None:
            earlier.connection.close()
        self._waiting[name] = _Waiting(question, connection, self._clock() + KEPT_S)

    def take(self, name: Hashable, question: Q) -> C | None:
        """Returns the answer to a request; None: there is none."""
        found = self._waiting.pop(name, None)
        if found is None:
            if question.size <= MOST_BYTES:  # it would have been used
                self._to_pass //= 2
            return None
        if found.question != question:
            self._unused(found)
            return None
        self._passed = self._to_pass = 0
        return found.connection

    def expire(self) -> None:
        """Drops what nobody asked for in time."""
        now = self._clock()
        while self._waiting:
            name, first = next(iter(self._waiting.items()))
            if first.until > now:
                return
            del self._waiting[name]
            self._unused(first)

    def close(self) -> None:
        """Drops all; idempotent."""
        for each in self._waiting.values():
            each.connection.close()
        self._waiting.clear()

    def _unused(self, waiting: _Waiting[Q, C]) -> None:
        waiting.connection.close()
        self.counters["answers_ahead_unused"] += 1
        self._to_pass, self._passed = min(2 * self._to_pass + 1, _MOST_PASSED), 0
