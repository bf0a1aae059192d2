"""The leases that this process takes on the data files of one store (see `taker`)."""

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvfs.base.clock import now
from kvfs.base.errors import Invalid
from kvfs.datastore.kernel import membarrier
from kvfs.datastore.leases.marks import Marks
from kvfs.datastore.leases.table import ReadLease, ReadLeaseTable
from kvfs.datastore.leases.taker import DIRECTORY, MARKS, LeaseTaker

LONGEST_S: Final = 3_600.0
SHARE: Final = 0.5
"""The part of a store's capacity that all leases together may be on."""
_LOOK_S: Final = 1.0
"""Time between two looks at what other processes have leased."""
_NONE: Final = frozenset[int]()


class ReadLeases:
    """The leases of this process; any thread. What it needs is opened when first used."""

    def __init__(self, run: Path, register: Callable[[], bool] = membarrier.register) -> None:
        self._run = run
        self._register = register
        self._marks: Marks | None = None
        self._table: ReadLeaseTable | None = None
        self._takes_lock = False
        self._others = 0
        """Bytes that other processes have leased, as of the last look."""
        self._look_again_s = 0.0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Ends all leases; idempotent."""
        with self._lock:
            table, self._table = self._table, None
            marks, self._marks = self._marks, None
        if table is not None:
            table.close()
        if marks is not None:
            marks.close()

    def begin_anew(self) -> None:
        """Lets go of what is the parent's, in the child of a fork."""
        table, self._table = self._table, None
        marks, self._marks = self._marks, None
        self._lock = threading.Lock()
        if table is not None:
            table.forget()
        if marks is not None:
            marks.close()

    def hold(
        self, inos: bytes, size_bytes: int, lease_s: float
    ) -> tuple[ReadLeaseTable, ReadLease] | str:
        """Leases these files (inode numbers in network order) of so many bytes, before `marked`
        is asked; returns the reason if it cannot."""
        try:
            table, marks = self._opened()
            most = self._most(table, marks)
        except FileNotFoundError:
            return "no node of this version has run on the store"
        except (OSError, ValueError) as error:
            return f"leases cannot be written: {error}"
        deadline_ns = int((now() + lease_s) * 1e9)
        with marks.shared() if self._takes_lock or marks.needs_lock else contextlib.nullcontext():
            lease = table.hold(inos, size_bytes, deadline_ns, most)
        if lease is None:
            if size_bytes and most < math.inf and table.leased_bytes + size_bytes > most:
                return "clients have leased as much of the store as they may"
            return "this process has as many leases as it may have"
        return table, lease

    def _most(self, table: ReadLeaseTable, marks: Marks) -> float:
        """Returns the bytes that this process may have leased. Raises OSError."""
        if not marks.capacity:
            return math.inf
        if now() >= self._look_again_s:
            self._look_again_s = now() + _LOOK_S
            self._others = table.of_others()
        return marks.capacity * SHARE - self._others

    def marked(self) -> frozenset[int]:
        """Returns the files that the node is about to take."""
        marks = self._marks
        return _NONE if marks is None else marks.marked()

    def held(self, inos: list[int]) -> set[int]:
        """Does `LeaseTaker.held` for this process, which unlinks data files without a node."""
        with self._lock:
            try:
                marks = self._marks = self._marks or Marks.open(self._run / MARKS)
            except (OSError, ValueError):
                return set()  # nobody can have leased anything
        return LeaseTaker(self._run, marks).held(inos)

    def _opened(self) -> tuple[ReadLeaseTable, Marks]:
        table, marks = self._table, self._marks
        if table is not None and marks is not None:
            return table, marks
        with self._lock:
            if self._marks is None:
                self._marks = Marks.open(self._run / MARKS)
            if self._table is None:
                self._takes_lock = not self._register()
                with self._marks.shared():
                    table = ReadLeaseTable(self._run / DIRECTORY)
                    self._marks.is_leasing = True
                # Whoever read just before that there is no table has committed before that.
                if not membarrier.barrier_for_all():
                    membarrier.barrier()
                self._table = table
            return self._table, self._marks


def require_length(lease_s: float) -> float:
    """Returns the length of a lease. Raises Invalid."""
    if not math.isfinite(lease_s) or not 0 <= lease_s <= LONGEST_S:
        raise Invalid(f"a lease lasts 0 to {LONGEST_S:.0f} seconds, not {lease_s}")
    return float(lease_s)
