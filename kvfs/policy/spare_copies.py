"""The copies that one node may let go of, so that holders of one content never all let go at once.
Pure but for the time that is given.

A copy goes as a spare one only on the promise of another holder to keep its own for a term. Who
promises drops nothing meanwhile, and who is about to let go promises nothing, but to a node that
comes before it in the content's own order, which all nodes know: then its own question is void.

| state here | may ask | asked by another | on its promise | evicted for lack of space |
|---|---|---|---|---|
| held | yes: asking | promises: promised | nothing | may be |
| asking | no | promises if the other comes first: promised | going | may be: the question is void |
| promised, until the term is over | no | promises | nothing | may not be |
| going | no | refuses | nothing | goes |

Invariants
- When a spare copy goes, another one is there, and stays for the rest of the term: so spare copies
  never are the last, whatever is lost, late, or comes twice.
- Terms end at the asking node before they do at the promising one: it counts from its question,
  the other from its answer, each by its own clock, of which only the pace has to be right.
"""

from typing import Final

from kvfs.policy import rendezvous

TERM_S: Final = 10.0
"""Time for which a copy is kept once that was promised."""
MOST: Final = 65_536
"""Promises, and questions, that are remembered: beyond that none is given, or asked."""


class SpareCopies:
    """The copies of one node. A copy is named by a number that is its own here; `content` is one
    that all holders have of it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._asked: dict[int, tuple[int, float]] = {}
        """Copies without which others were asked to do: by which question, and when."""
        self._questions = 0
        self._going: dict[int, float] = {}
        """Copies that may go, and until when."""
        self._promised: dict[int, float] = {}

    def ask(self, copy: int, now: float) -> int:
        """Returns the number of the question by which another holder may be asked for a promise;
        0: none may be."""
        if copy in self._asked or copy in self._going or self.keeps(copy, now):
            return 0
        if len(self._asked) >= MOST:
            return 0
        self._questions += 1
        self._asked[copy] = self._questions, now
        return self._questions

    def promised(self, copy: int, question: int, now: float) -> bool:
        """Notes that another holder has promised to keep its copy; returns whether this one may go
        until `done`. The answer to a question that is void by now changes nothing."""
        asked, at = self._asked.get(copy, (0, 0.0))
        if asked != question:
            return False
        del self._asked[copy]
        if now >= at + TERM_S:
            return False
        self._going[copy] = at + TERM_S
        return True

    def refused(self, copy: int, question: int) -> None:
        """Notes that no holder promised anything, or the question was lost."""
        if self._asked.get(copy, (0, 0.0))[0] == question:
            del self._asked[copy]

    def promise(self, copy: int, content: int, asking: int, now: float) -> bool:
        """Answers another node: returns whether this one, which has the content, keeps it for a
        term from now on."""
        if copy in self._going:
            return False
        if copy in self._asked and not self._yields(content, asking):
            return False
        if copy not in self._promised and len(self._promised) >= MOST:
            self._expire(now)
            if len(self._promised) >= MOST:
                return False
        self._asked.pop(copy, None)
        self._promised.pop(copy, None)
        self._promised[copy] = now + TERM_S
        return True

    def keeps(self, copy: int, now: float) -> bool:
        """Returns whether it was promised that this copy stays."""
        return self._promised.get(copy, 0.0) > now

    def may_go(self, copy: int, now: float) -> bool:
        """Returns whether a copy may go as a spare one, at once: in the step that drops it."""
        return self._going.get(copy, 0.0) > now

    def done(self, copy: int) -> None:
        """Notes that a copy that might go went, or stays."""
        self._going.pop(copy, None)

    def _yields(self, content: int, asking: int) -> bool:
        return rendezvous.first(content, (self._me, asking)) == asking

    def _expire(self, now: float) -> None:
        for copy in [each for each, until in self._promised.items() if until <= now]:
            del self._promised[copy]
