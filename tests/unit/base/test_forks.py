"""Objects that begin anew in the child of a fork."""

import os

from kvfs.base import forks


class Held:
    def __init__(self) -> None:
        self.began = 0
        forks.in_each_child(self)

    def begin_anew(self) -> None:
        self.began += 1


def test_those_that_live_begin_anew_in_the_child_alone() -> None:
    kept, dropped = Held(), Held()
    del dropped
    child = os.fork()
    if child == 0:
        os._exit(10 + kept.began)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    assert kept.began == 0
