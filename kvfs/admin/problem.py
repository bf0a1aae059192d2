"""A problem that `fsck` finds."""

from collections.abc import Callable
from typing import NamedTuple


class Problem(NamedTuple):
    """One inconsistency."""

    kind: str
    """One of the kinds listed in `fsck`."""
    subject: str
    detail: str
    mend: Callable[[], None] | None
    """Repairs it; None if only a person can decide."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.subject}: {self.detail}"
