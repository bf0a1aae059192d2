"""The mark that `kvfs fsck --repair` changed this node's own names while the node did not run: the
next start announces all that it holds, beside what it announced before.

The mark stands before the first repair, and goes when all is announced.
"""

from pathlib import Path
from typing import Final

from kvfs.base.private_file import sync_directory

_NAME: Final = "repaired-names"


def mark(store: Path) -> None:
    """Makes the mark, if it is not there. Raises OSError."""
    if not is_marked(store):
        (store / _NAME).touch()
        sync_directory(store)


def is_marked(store: Path) -> bool:
    """Returns whether the mark is there."""
    return (store / _NAME).exists()


def unmark(store: Path) -> None:
    """Removes the mark. Raises OSError."""
    (store / _NAME).unlink(missing_ok=True)
