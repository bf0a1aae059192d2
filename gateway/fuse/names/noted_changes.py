"""Changes of names and attributes that are noted in a mount's journal before their commit: by the
inode that is noted the next daemon tells whether a request that comes again was done
(`resent_requests`)."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gateway.holder.mount_journal import MountJournal
from kvfs.meta.engine import Transaction
from kvfs.tree import tree

P = ParamSpec("P")
T = TypeVar("T")


def after(
    change: Callable[P, T], journal: MountJournal, about: Callable[[T], int]
) -> Callable[P, T]:
    """Returns a step of a transaction that notes the inode which its result is `about`."""

    def noting(*args: P.args, **kwargs: P.kwargs) -> T:
        result = change(*args, **kwargs)
        journal.note(about(result))
        return result

    return noting


def before(change: Callable[P, T], journal: MountJournal, place: int) -> Callable[P, T]:
    """Returns a change, commit and all, that notes its argument at `place` first: an inode."""

    def noting(*args: P.args, **kwargs: P.kwargs) -> T:
        ino = args[place]
        assert isinstance(ino, int), "the inode's number stands there"
        journal.note(ino)
        return change(*args, **kwargs)

    return noting


def of(change: Callable[P, T], journal: MountJournal, place: int) -> Callable[P, T]:
    """Returns a step of a transaction that notes its argument at `place`, an inode, unless it
    fails."""

    def noting(*args: P.args, **kwargs: P.kwargs) -> T:
        result, ino = change(*args, **kwargs), args[place]
        assert isinstance(ino, int), "the inode's number stands there"
        journal.note(ino)
        return result

    return noting


def moving(move: Callable[..., T], journal: MountJournal) -> Callable[..., T]:
    """Returns a step of a transaction that notes the inode which a rename moves from `old`."""

    def noting(t: Transaction, *, old: tuple[int, bytes], **how: object) -> T:
        moved = tree.find(t, *old)
        journal.note(moved[0] if moved else 0)
        return move(t, old=old, **how)

    return noting
