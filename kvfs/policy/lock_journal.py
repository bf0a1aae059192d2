"""The notes of a mount that outlives its daemon on its programs' locks, for the next daemon.

| step of a lock in the engine | the journal has | the next daemon |
|---|---|---|
| 1 it is about to be asked for | its owner, not held | grants it once: the request comes again |
| 2 it was granted | its owner, held | goes on as that owner, or says ENOLCK (lost) |
| 3 its owner's last is about to be given back | its owner, not held | the request comes again |
| 4 its owner has closed the file | nothing | gives it back before it grants others' |

A lost one went to another node while this one had no lease. Locks that reach as far as the host
stand here alone: a lock is entered before those in whose place it is are removed, so a kill between
the two leaves more bytes locked, until the same request has come again.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvfs.base.errors import NoLocks
from kvfs.policy.byte_range_locks import ByteRangeLock, LockOwner


class JournaledLock(NamedTuple):
    """A lock in the daemon's memory, or an owner that has asked for locks in the engine."""

    ino: int
    whole: bool
    """Whether it is flock's."""
    owner: int
    """Its number in the kernel."""
    exclusive: bool = False
    start: int = 0
    end: int = 0
    pid: int = 0
    is_there: bool = False
    """Whether the engine has the owner's locks: no bytes are told."""
    is_held: bool = False
    """Whether that owner has locks in the engine, unless they were lost."""
    fh: int = 0
    """The handle of a view that has asked for this owner; `start` is then the view's namespace."""


class LockJournal(Protocol):
    """The journal of one mount's locks."""

    def enter(self, lock: JournaledLock) -> None:
        """Enters one, or whether it is held. Raises NoLocks if there is no room."""

    def remove(self, lock: JournaledLock) -> None:
        """Removes one; does nothing where it was not entered."""

    def all(self) -> list[JournaledLock]:
        """Returns all that are entered."""


class LockNotes:
    """The notes of `Locks` in a journal; none, where there is no journal."""

    def __init__(self, journal: LockJournal | None) -> None:
        self._journal = journal

    def all(self) -> list[JournaledLock]:
        """Returns all that earlier daemons noted, but for what views alone must know."""
        found = [] if self._journal is None else self._journal.all()
        return [each for each in found if not each.fh]

    def asked(self, place: tuple[int, bool], owner: LockOwner, *, is_held: bool = False) -> None:
        """Notes that an owner may have locks in the engine, or has. Raises NoLocks."""
        if self._journal is not None:
            self._journal.enter(JournaledLock(*place, owner.number, is_there=True, is_held=is_held))

    def closed(self, place: tuple[int, bool], owner: LockOwner) -> None:
        """Notes that an owner may have no locks in the engine any more."""
        if self._journal is not None:
            self._journal.remove(JournaledLock(*place, owner.number, is_there=True))

    def changed_here(
        self,
        place: tuple[int, bool],
        before: Sequence[ByteRangeLock],
        after: Sequence[ByteRangeLock],
    ) -> None:
        """Notes the locks in memory: what is new before what goes. Raises NoLocks: none is."""
        if self._journal is None:
            return
        new = [_kept_here(place, each) for each in after if each not in before]
        try:
            for each in new:
                self._journal.enter(each)
        except NoLocks:
            for each in new:
                self._journal.remove(each)
            raise
        for old in before:
            if old not in after:
                self._journal.remove(_kept_here(place, old))


def _kept_here(place: tuple[int, bool], lock: ByteRangeLock) -> JournaledLock:
    return JournaledLock(*place, lock.owner.number, lock.exclusive, lock.start, lock.end, lock.pid)
