"""The treatment of a data file that no record names, or that differs from its record, and the disk
space of the quarantine.

| data file | treatment |
|---|---|
| of a cache, as its namespace or its own description says | unlinked |
| empty, and never described | unlinked: there is nothing in it |
| a second name of the data file that its record names | unlinked: the data stay |
| any other | moved into quarantine |

Invariants
- A data file that may be of a durable namespace is never unlinked because a record is missing: the
  record may have been lost, and the data may be all that is left of what was acknowledged.
- A data file that cannot be examined stays where it is.
"""

import logging
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

import trio

from kvfs.base.retry import Persistence
from kvfs.datastore.files import DataFiles, Description, description
from kvfs.datastore.index import Index
from kvfs.datastore.quarantine_directory import Quarantined, Reason
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_of
from kvfs.tree import namespaces

log = logging.getLogger(__name__)
_PERIOD_S: Final = 1.0
Kinds = Mapping[int, str]
"""'durable' or 'cache', by namespace id."""


def kinds_of(t: Transaction) -> Kinds:
    """Returns the kinds of all namespaces."""
    return {number: each.kind for number, each in namespaces.records(t).items()}


def may_be_durable(kinds: Kinds, ino: int, said: Description | None) -> bool:
    """Returns whether a data file may be of a durable namespace. `said`: its description of
    itself."""
    told = {kinds.get(namespace_of(ino), ""), said.kind if said is not None else ""}
    return "durable" in told or "cache" not in told


def put_away(
    files: DataFiles, kinds: Kinds, ino: int, version: int, reason: Reason, recorded: int = -1
) -> str | None:
    """Unlinks a data file that is not needed, or moves it into quarantine; returns its path there.

    `recorded`: the other version that its record has, if there is a record. Raises OSError: it
    stays where it is."""
    try:
        fd = files.open_unseen(ino, version)
    except FileNotFoundError:
        return None
    try:
        found, said = os.fstat(fd), description(fd)
    finally:
        os.close(fd)
    is_empty = said is None and not found.st_size
    if is_empty or not may_be_durable(kinds, ino, said) or _has(files, ino, recorded, found):
        files.unlink(ino, version)
        return None
    return files.quarantine(ino, version, reason)


def _has(files: DataFiles, ino: int, version: int, found: os.stat_result) -> bool:
    """Returns whether the data file of this version is the same file under another name."""
    try:
        return os.path.samestat(files.stat(ino, version), found)
    except FileNotFoundError:
        return False


class Used(NamedTuple):
    """The contents of the quarantine."""

    files: int
    bytes: int
    """Bytes that they take of the disk."""
    beside: int
    """Bytes of those that are not in the usage of their namespaces any more."""


class Quarantine:
    """Watches the size of the quarantine, for one node."""

    def __init__(self, files: DataFiles, index: Index) -> None:
        self._files = files
        self._index = index
        self._stamp = 0
        self.used = Used(0, 0, 0)

    async def run(self) -> None:
        """Checks each second whether a file came or went, until cancelled."""
        looking = Persistence(log.warning, "what is in quarantine is not known")
        await looking.repeat(self.look, _PERIOD_S)

    async def look(self) -> None:
        """Measures the quarantine anew if a file came or went. Raises OSError."""
        stamp = self._files.quarantine_stamp()
        if stamp == self._stamp:
            return
        found = await trio.to_thread.run_sync(lambda: list(self._files.quarantined()))
        beside = sum(each.used_bytes for each in found if not self._is_counted(each))
        self.used = Used(len(found), sum(each.used_bytes for each in found), beside)
        self._stamp = stamp

    def _is_counted(self, each: Quarantined) -> bool:
        """Returns whether it is still in the usage of its namespace: a damaged file keeps its
        name."""
        entry = self._index.get(each.ino) if each.reason is Reason.DAMAGED else None
        return entry is not None and entry.version == each.version
