"""Leases as those see them who take data files away: the evictor, movers, the end of orphans.

A client that matches and a node that takes run no lock between them. Each first writes what it
does, and then reads what the other wrote (hazard pointers):

| a client matches | a node takes names or moves data (`taking`) |
|---|---|
| m1 looks up the names | t1 marks the files |
| m2 writes its lease | t2 has every processor run a barrier |
| m3 reads the marks: marked is a miss | t3 reads the leases: what is leased stays |
| m4 looks up again, if there were commits: changed is a miss | t4 commits, then unlinks |
| | t5 clears the marks |

| order | outcome |
|---|---|
| m2 before t3 | the node sees the lease: the file stays, promised or, by m3, a miss |
| t1 before m3, m3 before t5 | the client sees the mark: a miss |
| t5 before m3 | t4 came before m3, so m4 sees the commit: a miss |
| m1 after t4 | the name is not there: a miss |

The barrier at t2 stands for one between m2 and m3 as well: it runs on the client's processor, so
that its write of m2 comes before t3, or its reading at m3 after t1. Where the kernel has none, the
node says so in the marks, and then both sides take the lock of that file, the client for m2 and
the node from t1 to t3. The node takes the lock in any case, for a client whose process cannot
be registered; if it is not to be had soon, nothing is taken.

Content whose name went by its users' doing (a file replaced or removed) needs no mark: the commit
that took the name is what m4 sees, and whoever unlinks the data file afterwards reads the leases
before (`held`). What is leased stays an orphan until the orphans are looked through again.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvfs.base.errors import Unavailable
from kvfs.datastore.kernel import membarrier
from kvfs.datastore.leases.marks import Marks
from kvfs.datastore.leases.table import leased_in, living_tables

DIRECTORY: Final = "leases"
"""Within the store's `run`."""
MARKS: Final = "marks"
_PATIENCE_S: Final = 0.005


class LeaseTaker:
    """The leases of a store's clients, for one process that takes data files away."""

    def __init__(
        self, run: Path, marks: Marks, barrier: Callable[[], bool] = membarrier.barrier
    ) -> None:
        self._directory = os.fspath(run / DIRECTORY)
        self._marks = marks
        self._barrier = barrier
        self.passed_over = 0
        """Files that stayed because they were leased, since the start."""

    @classmethod
    def of_node(cls, run: Path) -> "LeaseTaker":
        """Makes the marks of a node that starts; `close` it. Raises OSError, ValueError."""
        (run / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
        marks = Marks.made(run / MARKS)
        taker = cls(run, marks)
        membarrier.register()  # for a client's first lease, on kernels without a barrier for all
        marks.needs_lock = not membarrier.barrier()
        return taker

    def close(self) -> None:
        """Lets go of the marks; idempotent."""
        self._marks.close()

    def tell_capacity(self, size_bytes: int) -> None:
        """Tells clients how large the store is: all leases together are on a part of it. For the
        node alone."""
        self._marks.capacity = size_bytes

    @contextlib.contextmanager
    def taking(self, inos: Sequence[int]) -> Iterator[set[int]]:
        """Gives those of these files that are not to be taken; the others may be while the block
        lasts: nobody is promised them meanwhile. For the node alone. Raises Unavailable."""
        slots: list[int] = []
        try:
            with self._alone():
                slots = self._marks.mark(inos)
                self._barrier()
                taken = inos[: len(slots)]
                kept = set(inos[len(slots) :]) | self._leased(taken)
                self._look_for_tables()
            self.passed_over += len(kept)
            yield kept
        finally:
            self._marks.unmark(slots)

    def _look_for_tables(self) -> None:
        """Notes, with the lock held, whether no process leases anything any more."""
        if self._marks.is_leasing:
            with contextlib.suppress(OSError):
                self._marks.is_leasing = bool(os.listdir(self._directory))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        until = time.monotonic() + _PATIENCE_S
        while True:
            with self._marks.alone() as is_alone:
                if is_alone:
                    yield
                    return
            if time.monotonic() > until:
                raise Unavailable("a client that matches was stopped while it holds the marks")
            time.sleep(0)

    def held(self, inos: Sequence[int]) -> set[int]:
        """Returns those of these files whose data are leased; their names have gone before."""
        if not self._marks.is_leasing:
            return set()
        self._barrier()
        return self._leased(inos)

    def _leased(self, inos: Sequence[int]) -> set[int]:
        if not inos or not self._marks.is_leasing:
            return set()
        wanted, found = frozenset(inos), set[int]()
        for fd in living_tables(self._directory):
            found |= leased_in(fd, wanted)
        return found
