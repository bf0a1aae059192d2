"""Rebuilds a store's metadata from its data files, each of which describes itself.

| a data file | becomes |
|---|---|
| described, and its content matches | a sealed file under its names |
| described, written since | a file under its names, of the size that it has; the sealer goes on |
| described, damaged, durable | quarantined; it gets no name |
| not described, of a durable namespace | `lost+found-<inode number>` at the top of it |
| not described or damaged, of a cache | unlinked; so is an empty one that is not described |
| not damaged, and a node's replica knew it | the record that the replica had, with its names |

Invariants
- Files in quarantine because no record named them take part, as if they lay in their places.
- Everything is read once: no content gets a seal that it was not given when it was written. Only
  files that a node's replica still knew, with checksums that this node's index has, are not read.
- A data file with content is unlinked only if its namespace is known to be a cache.
- A kill at any point: run again, same result. The record without which nobody opens the engine (the
  schema version) is written last.
"""

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from kvfs.datastore.checksum import FileChecksum, checksum, combine
from kvfs.datastore.files import DataFiles, Description, description
from kvfs.datastore.index import Index, Sealed
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_copy import Blocking
from kvfs.meta.records import ROOT_INODE, Flag, Inode, namespace_of
from kvfs.tree import namespaces, rebuilt_records
from kvfs.tree.inodes import read_inodes
from kvfs.tree.rebuilt_records import DirectoryOwner, RebuiltFile

log = logging.getLogger(__name__)
T = TypeVar("T")
_BATCH: Final = 64
_THREADS: Final = 4


class _Known(NamedTuple):
    """The findings of a record on a data file."""

    is_published: bool
    size: int
    sums: FileChecksum | None
    """The checksums of a sealed record that agrees with this node's index."""


class DataFileRead(NamedTuple):
    """The findings on one data file."""

    ino: int
    version: int
    stat: os.stat_result
    said: Description | None
    sums: FileChecksum | None
    """None: it could not be read."""
    is_known: bool = False
    """Whether there is a record of this content, so that it was not read."""
    is_recorded: bool = False
    """Whether there is a record with a name, of this version or one before it."""

    @property
    def is_damaged(self) -> bool:
        """Whether it differs from what was sealed, though nobody wrote it."""
        if self.sums is None:
            return True
        return self.said is not None and not self.matches and not self.was_written

    @property
    def matches(self) -> bool:
        return self.said is not None and self.sums is not None and self._is_said(self.sums)

    def _is_said(self, sums: FileChecksum) -> bool:
        assert self.said is not None
        return (self.stat.st_size, sums.combined) == (self.said.size, self.said.checksum)

    @property
    def was_written(self) -> bool:
        """Whether it was opened and changed after it was sealed."""
        return self.said is not None and self.stat.st_mtime_ns != self.said.mtime_ns


class Rebuild:
    """The rebuild of one store. `engine` takes the records; it is empty or begun by another
    node's."""

    def __init__(
        self,
        engine: Blocking,
        files: DataFiles,
        index: Index,
        owner: DirectoryOwner,
        own: Container[int] = (),
    ) -> None:
        """`own`: namespaces whose files are this node's own, of which it keeps the records."""
        self._own = own
        self._engine = engine
        self._files = files
        self._index = index
        self._owner = owner
        self._kinds: dict[int, str] = {}
        self.counts = {
            "files": 0,
            "bytes": 0,
            "without_name": 0,
            "written_since": 0,
            "damaged": 0,
            "dropped": 0,
        }

    def run(self, progress: Callable[[int], None]) -> dict[str, int]:
        """Rebuilds, and returns counts of the results. `progress` is told the bytes that were read.
        Raises OSError, KvfsError."""
        self._restore_quarantined()
        greatest: dict[int, int] = {}
        for ino, _ in self._scan():
            greatest[namespace_of(ino)] = max(ino, greatest.get(namespace_of(ino), 0))
        nameless: list[DataFileRead] = []
        for batch in _batches(self._read_all(progress)):
            self._make_namespaces(batch, greatest)
            nameless += [each for each in batch if each.said is None]
            self._add([each for each in batch if each.said is not None])
        for batch in _batches(nameless):
            self._make_lost(batch, greatest)
            self._add(batch)
        return self.counts

    def _scan(self) -> Iterator[tuple[int, int]]:
        return (name for name in self._files.scan() if namespace_of(name[0]) not in self._own)

    def _restore_quarantined(self) -> None:
        for each in list(self._files.quarantined()):
            if each.reason is not Reason.DAMAGED:
                with contextlib.suppress(FileExistsError):
                    self._files.restore(each)

    def _read_all(self, progress: Callable[[int], None]) -> Iterator[DataFileRead]:
        with ThreadPoolExecutor(_THREADS) as threads:
            for names in _batches(self._scan()):
                known = self._known(names)
                for read in threads.map(self._read, names, known):
                    if read is not None:
                        progress(read.stat.st_size)
                        yield read

    def _known(self, names: list[tuple[int, int]]) -> list["_Known | None"]:
        """Returns what is known of each file that has a record with a name: a node's replica knew
        it, or a data file before."""
        inodes = self._engine.read_now(lambda t: read_inodes(t, [ino for ino, _ in names]))
        found: list[_Known | None] = []
        for (ino, version), inode in zip(names, inodes, strict=True):
            if inode is None or inode.version > version or not inode.nlink:
                found.append(None)
                continue
            entry, sums = self._index.get(ino), None
            is_sealed = bool(inode.flags & Flag.SEALED) and inode.version == version
            if entry is not None and is_sealed and entry.version == version:
                sums = FileChecksum(inode.checksum, entry.chunks)
                sums = sums if combine(entry.chunks) == inode.checksum else None
            is_published = bool(inode.flags & Flag.PUBLISHED)
            found.append(_Known(is_published, inode.size, sums))
        return found

    def _read(self, name: tuple[int, int], known: "_Known | None") -> DataFileRead | None:
        try:
            fd = self._files.open_unseen(*name)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            log.error("%s is left out: %s", self._files.path(*name), error.strerror)
            return None
        try:
            found, said = os.fstat(fd), description(fd)
            if said is not None and (said.ino, said.version) != name:
                said = None  # a copy under another name
            is_recorded = known is not None and known.is_published
            if known is not None and known.sums is not None and known.size == found.st_size:
                return DataFileRead(*name, found, said, known.sums, True, is_recorded)
            try:
                sums = checksum(fd, found.st_size)
            except OSError:
                sums = None
            return DataFileRead(*name, found, said, sums, is_recorded=is_recorded)
        finally:
            os.close(fd)

    def _make_namespaces(self, batch: list[DataFileRead], greatest: dict[int, int]) -> None:
        new = {
            namespace_of(each.ino): each
            for each in batch
            if each.said is not None and namespace_of(each.ino) not in self._kinds
        }
        for number, each in new.items():
            assert each.said is not None
            name = each.said.namespace or each.said.path.split(b"/")[1:2][0]
            self._make(each.ino, name or b"lost-%d" % number, each.said.kind, greatest)

    def _make_lost(self, batch: list[DataFileRead], greatest: dict[int, int]) -> None:
        """Makes namespaces of which no data file says anything."""
        for each in batch:
            if (number := namespace_of(each.ino)) not in self._kinds:
                self._make(each.ino, b"lost-%d" % number, "durable", greatest)

    def _make(self, ino: int, name: bytes, kind: str, greatest: dict[int, int]) -> None:
        number = namespace_of(ino)

        def fn(t: Transaction) -> str:
            rebuilt_records.make_namespace(t, ino, name, kind or "durable", self._owner)
            rebuilt_records.pass_by(t, {number: greatest[number]})
            return namespaces.get(t, number).kind

        self._kinds[number] = self._engine.transact_now(fn)

    def _add(self, batch: list[DataFileRead]) -> None:
        good = [each for each in batch if self._is_kept(each)]
        founds = [_found(each) for each in good]

        def fn(t: Transaction) -> list[bool]:
            return [rebuilt_records.add(t, each, self._owner) for each in founds]

        added = self._engine.transact_now(fn)
        here = [each for each, is_in in zip(good, added, strict=True) if is_in]
        self._index.store(
            Sealed(each.ino, each.version, each.sums.chunks, each.stat.st_blocks)
            for each in here
            if each.sums is not None
        )
        for each, is_in in zip(good, added, strict=True):
            if not is_in:
                self._drop(each)
        self.counts["files"] += len(here)
        self.counts["bytes"] += sum(each.stat.st_size for each in here)
        self.counts["without_name"] += sum(
            each.said is None and not each.is_recorded for each in here
        )
        self.counts["written_since"] += sum(each.was_written and not each.is_known for each in here)

    def _is_kept(self, each: DataFileRead) -> bool:
        """Returns whether the data file gets a record: a damaged one, or a nameless one of a cache,
        gets none."""
        is_cache = self._kinds[namespace_of(each.ino)] == "cache"
        if each.is_known:
            return True
        if each.is_damaged:
            self.counts["damaged"] += 1
            if not is_cache:
                self._files.quarantine(each.ino, each.version, Reason.DAMAGED)
        if each.is_recorded and not each.is_damaged:
            return True
        if each.said is None and not each.stat.st_size:  # made ahead, or never written
            self._files.unlink(each.ino, each.version)
            return False
        if is_cache and (each.is_damaged or each.said is None):
            self._drop(each)
            return False
        return not each.is_damaged

    def _drop(self, each: DataFileRead) -> None:
        """Removes a data file without a record: one of a cache goes, any other into quarantine."""
        if self._kinds[namespace_of(each.ino)] == "cache":
            self._files.unlink(each.ino, each.version)
            self.counts["dropped"] += 1
        else:
            self._files.quarantine(each.ino, each.version, Reason.UNNAMED)


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    drawn = iter(items)
    while batch := list(islice(drawn, _BATCH)):
        yield batch


def begin(t: Transaction, owner: DirectoryOwner) -> None:
    """Makes the root, if missing; until `finish` no node opens the engine."""
    if t.get(keys.inode(ROOT_INODE)) is None:
        namespaces.format(t, owner.now, owner.uid, owner.gid)
        t.delete(keys.VERSION)


def finish(t: Transaction) -> None:
    """Completes the engine: from here on nodes open it."""
    t.put(keys.VERSION, b"%d" % keys.SCHEMA)


def _found(each: DataFileRead) -> RebuiltFile:
    said = each.said
    now = max(each.stat.st_mtime_ns, each.stat.st_ctime_ns)
    inode = Inode(
        mode=said.mode if said else stat.S_IFREG | 0o600,
        uid=said.uid if said else each.stat.st_uid,
        gid=said.gid if said else each.stat.st_gid,
        nlink=1,
        size=each.stat.st_size,
        blocks=each.stat.st_blocks,
        atime_ns=each.stat.st_atime_ns,
        mtime_ns=each.stat.st_mtime_ns,
        ctime_ns=said.described_ns or now if said else now,
        parent=0,
        name=b"",
        flags=Flag.PUBLISHED | (Flag.SEALED if each.matches else 0),
        version=each.version,
        checksum=each.sums.combined if each.matches and each.sums else b"",
    )
    paths = [each_path for each_path in (said.path, *said.others) if each_path] if said else []
    return RebuiltFile(each.ino, each.version, inode, paths, said.xattrs if said else {})
