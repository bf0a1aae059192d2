"""A rename over a file of a durable namespace: a power cut must not take both files, so the present
data of the one that replaces it are on disk first. Every door's rename is this transaction.

| the transaction | what its caller does |
|---|---|
| returns Unsettled: nothing is changed | puts that file on disk, and asks again with its number |
| raises Stale: another file has the name by now | begins anew |
| returns what was replaced | nothing: it is done |
"""

from kvfs.base.errors import Stale
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.tree import tree
from kvfs.tree.entries import Keep
from kvfs.tree.lifecycle import Unsettled, unsettled_source
from kvfs.tree.tree import Removed

Name = tuple[int, bytes]
"""A directory's number, and a name in it."""


def settled_rename(
    t: Transaction,
    old: Name,
    new: Name,
    *,
    flags: int,
    now: int,
    keep: Keep,
    whiteout: tuple[int, Inode] | None = None,
    settled: int = 0,
) -> Removed | Unsettled | None:
    """Does `tree.rename`, or `tree.rename_with_whiteout` with this inode and its number, unless the
    file has to be put on disk first. `settled`: the file that was, 0: none.

    Raises what these raise; Stale."""
    if settled:
        found = tree.find(t, *old)
        if found is None or found[0] != settled:
            raise Stale("another file has the name by now: look it up again")
    else:
        unsettled = unsettled_source(t, *old, *new)
        if unsettled is not None:
            return unsettled
    if whiteout is None:
        return tree.rename(t, *old, *new, flags=flags, now=now, keep=keep)
    return tree.rename_with_whiteout(t, old, new, whiteout, flags=flags, now=now, keep=keep)
