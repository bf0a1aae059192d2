"""Objects that begin anew in the child of a fork: what they hold is the parent's, and the threads
that serve them are not there."""

import os
import weakref
from typing import Final, Protocol


class Forked(Protocol):
    """An object with something that a child must not share."""

    def begin_anew(self) -> None:
        """Begins with nothing; called in the child, in its only thread."""


_all: Final[weakref.WeakSet[Forked]] = weakref.WeakSet()


def in_each_child(each: Forked) -> None:
    """Has the object begin anew in each child of a fork, for as long as it lives."""
    _all.add(each)


def _after_fork() -> None:
    for each in list(_all):
        each.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
