"""Checks whether a store is whole, and repairs it. For a store that no daemon uses: hold its lock.

| kind | problem | the repair |
|---|---|---|
| leaked_data | a data file without a record | it goes; one that may be durable into quarantine |
| foreign_file | a file among the data that is none | none: examine it, and move it away |
| missing_data | a record without a data file | the name goes: there is nothing behind it |
| quarantined_data | the same, it is in quarantine | whole: it comes back. damaged: none |
| foreign_data | a link, or another user's file, lies in place of a data file | by hand |
| wrong_size | a sealed record and its data differ | cache: it goes. durable: into quarantine |
| wrong_checksum | the same, by reading all data (`checksums=True`) | as for wrong_size |
| dangling_entry | a name that leads to nothing | the name goes |
| unreachable_inode | an inode without its name | it gets a name again |
| wrong_link_count | a count that differs from the names | the names count |
| wrong_list | the unsealed, unpublished, orphan lists and the records differ | the records count |
| wrong_usage | a namespace's usage differs from its records | the records count |
| stray_index_entry | an index entry without a file of that version | it goes |
| missing_index_entry | a sealed file that the index does not know | it is added |
| wrong_index_order | a file without its place in the access order, or with two | its entry counts |
| damaged_base | the base of the metadata is not as it was taken | a new one is taken |
| damaged_journal | the metadata's journal cannot be read to its end | what follows is taken |

For a member of a cluster the data files that it holds are checked, and the records of namespaces
whose names are its own (`--coherence peer`), which nobody else has: all other metadata are the
engine's. Damage of the data is named and not repaired: the running node gets them from others that
have them, and reports it if none do. If its replica went back to damage in its journal, the engine
may know what the replica does not: that is for the running node to judge (`stale_data_gc`).

The remains of a kill that the next start handles (orphans, unpublished files) are no problem. Reads
page by page: memory does not grow with the number of files.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from kvfs.admin.fsck_records import Problem, RecordCheck, name_of
from kvfs.base.descriptors import closing
from kvfs.base.errors import Corrupt
from kvfs.datastore.checksum import FileChecksum, checksum
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import Index, IndexEntry, Sealed, Table
from kvfs.datastore.quarantine_directory import Quarantined, Reason
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, unpack_inode
from kvfs.meta.replica.local_namespaces import marked
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.vfs.quarantine import kinds_of, put_away

__all__ = ["Fsck", "Problem"]
_ROUNDS: Final = 5
"""Most rounds: repairing one problem may uncover another (a directory that comes back holds
names)."""


class Fsck:
    """Checks and repairs one store."""

    def __init__(
        self,
        engine: Table,
        files: DataFiles,
        index: Index,
        *,
        checksums: bool = False,
        is_behind: bool = False,
        before_repair: Callable[[], None] = lambda: None,
    ) -> None:
        """`is_behind`: the engine is a replica that may lack what its cluster has. `before_repair`
        is called before each change."""
        self._engine = engine
        self._files = files
        self._index = index
        self._checksums = checksums
        self._node = engine.read_now(lambda t: t.node)
        self._is_behind = is_behind
        self._before_repair = before_repair
        self._records = RecordCheck(engine, engine.read_now(_own) if self._node else None)
        self._quarantined: dict[tuple[int, int], list[Quarantined]] = {}

    def check(self) -> Iterator[Problem]:
        """Yields every problem, as it is found. Raises Corrupt when the engine cannot be read."""
        self._quarantined.clear()
        for each in self._files.quarantined():
            self._quarantined.setdefault((each.ino, each.version), []).append(each)
        yield from self._records.problems()
        yield from self._of_data_files()
        for key, value in self._records.pages(b"i", b"j"):
            inode = unpack_inode(value)
            if not self._is_held(keys.unpack_u64(key, 1)):
                continue
            if stat.S_ISREG(inode.mode) and inode.nlink and inode.flags & Flag.PUBLISHED:
                yield from self._of_file(keys.unpack_u64(key, 1), inode)
        yield from self._of_index()

    def repair(self) -> Iterator[Problem]:
        """Repairs what it can, and yields each repaired problem; then checks again, until nothing
        is found.

        Raises Corrupt when that does not come to an end, NoSpace, ReadOnly, OSError.
        """
        for _ in range(_ROUNDS):
            mended = 0
            for problem in self.check():
                if problem.mend is not None:
                    self._before_repair()
                    problem.mend()
                    mended += 1
                    yield problem
            if not mended:
                return
        raise Corrupt(
            f"new problems appear after {_ROUNDS} repairs: restore the store from a backup"
        )

    def quarantined(self) -> Iterator[Quarantined]:
        """Returns the data files that are in quarantine."""
        return self._files.quarantined()

    def _of_data_files(self) -> Iterator[Problem]:
        for path in self._files.strangers():
            yield Problem("foreign_file", path, "it is no data file; move it away", None)
        for ino, version in self._files.scan():
            inode = self._record(ino)
            if self._is_behind or (inode is not None and inode.version == version):
                continue
            if inode is None and self._is_reserved(ino):
                continue
            detail = "no record names it" if inode is None else "its record has another version"
            mend = partial(self._put_away, ino, version, inode)
            yield Problem("leaked_data", self._files.path(ino, version), detail, mend)

    def _of_file(self, ino: int, inode: Inode) -> Iterator[Problem]:
        try:
            found = self._files.stat(ino, inode.version)
        except FileNotFoundError:
            if inode.flags & Flag.COLD:
                return
            yield self._of_missing(ino, inode)
            return
        if not self._files.is_ours(found):
            detail = "what lies in place of its data is a link, or another user's: look into it"
            yield Problem("foreign_data", self._files.path(ino, inode.version), detail, None)
        elif inode.flags & Flag.SEALED:
            yield from self._of_sealed(ino, inode, found)

    def _of_missing(self, ino: int, inode: Inode) -> Problem:
        kept = self._quarantined.get((ino, inode.version), [])
        for each in kept:
            if _is_whole(each, inode):
                detail = f"its data are in quarantine: {each.path}"
                mend = partial(self._files.restore, each)
                return Problem("quarantined_data", self._name(ino), detail, mend)
        if kept:
            detail = f"what is left of its data is in quarantine: {kept[-1].path}"
            return Problem("quarantined_data", self._name(ino), detail, None)
        return self._lost("missing_data", ino, "its data are gone", partial(self._drop, ino))

    def _of_sealed(self, ino: int, inode: Inode, found: os.stat_result) -> Iterator[Problem]:
        entry = self._index.get(ino)
        if found.st_size != inode.size:
            detail = f"its data file has {found.st_size} bytes, its record says {inode.size}"
            yield self._damaged("wrong_size", ino, detail)
        elif self._checksums and (detail := self._damage(ino, inode, entry)):
            yield self._damaged("wrong_checksum", ino, detail)
        if entry is None or entry.version != inode.version:
            mend = partial(self._add_to_index, ino, inode.version)
            detail = "the index does not know it"
            yield Problem("missing_index_entry", self._name(ino), detail, mend)

    def _damage(self, ino: int, inode: Inode, entry: IndexEntry | None) -> str:
        """Reads all the file's data and tells how they differ from the record; empty if they do
        not."""
        fd = self._files.open_unseen(ino, inode.version)
        try:
            found = checksum(fd, inode.size)
        except OSError as error:
            return f"its data cannot be read: {error.strerror}"
        finally:
            os.close(fd)
        if found is not None and found.combined == inode.checksum:
            return ""
        return _where(found, entry)

    def _damaged(self, kind: str, ino: int, detail: str) -> Problem:
        mend = self._drop if self._is_cache(ino) else self._quarantine
        return self._lost(kind, ino, detail, partial(mend, ino))

    def _lost(self, kind: str, ino: int, detail: str, mend: Callable[[], None]) -> Problem:
        return Problem(kind, self._name(ino), detail, None if self._node else mend)

    def _is_held(self, ino: int) -> bool:
        """Returns whether its data should be in this store."""
        if not self._node:
            return True
        key = keys.placement(ino, self._node)
        return self._engine.read_now(lambda t: t.get(key)) is not None

    def _of_index(self) -> Iterator[Problem]:
        for clock, ino in self._index.disorder():
            yield self._disordered(ino, clock)
        start = 0
        while page := self._index.entries(start):
            for ino, entry in page:
                inode = self._record(ino)
                if self._is_behind and (inode is None or inode.version != entry.version):
                    continue
                if inode is None or inode.version != entry.version:
                    mend: Callable[[], None] = partial(self._index.remove, [ino])
                    detail = "the index has an entry for no such file"
                    yield Problem("stray_index_entry", self._name(ino), detail, mend)
                elif self._index.unordered(ino, entry):
                    yield self._disordered(ino, entry.clock)
            start = page[-1][0] + 1

    def _disordered(self, ino: int, clock: int) -> Problem:
        mend = partial(self._index.restore_order, ino, clock)
        detail = "its place in the access order is wrong"
        return Problem("wrong_index_order", self._name(ino), detail, mend)

    def _record(self, ino: int) -> Inode | None:
        value = self._engine.read_now(lambda t: t.get(keys.inode(ino)))
        return None if value is None else unpack_inode(value)

    def _is_reserved(self, ino: int) -> bool:
        return self._engine.read_now(lambda t: t.get(keys.reserved(ino))) is not None

    def _name(self, ino: int) -> str:
        return self._engine.read_now(lambda t: name_of(t, ino))

    def _is_cache(self, ino: int) -> bool:
        listed = self._engine.read_now(namespaces.list_all)
        return any(
            each.id == namespace_of(ino) and each.namespace.kind == "cache" for each in listed
        )

    def _put_away(self, ino: int, version: int, inode: Inode | None) -> None:
        kinds = self._engine.read_now(kinds_of)
        if inode is None:
            put_away(self._files, kinds, ino, version, Reason.UNNAMED)
        else:
            put_away(self._files, kinds, ino, version, Reason.OUTDATED, inode.version)

    def _drop(self, ino: int) -> None:
        """Removes a file as everywhere: names, data file, index entry, record."""
        now = time.time_ns()
        gone = self._engine.transact_now(lambda t: lifecycle.evict(t, ino, now, "damaged"))
        if gone is not None:
            self._files.unlink(ino, gone.inode.version)
        self._index.remove([ino])
        self._engine.transact_now(lambda t: tree.reap(t, ino))

    def _quarantine(self, ino: int) -> None:
        """Moves the data file into quarantine; the name stays: the remaining data are never taken
        for the sealed ones."""
        inode = self._record(ino)
        if inode is not None:
            self._files.quarantine(ino, inode.version, Reason.DAMAGED)

    def _add_to_index(self, ino: int, version: int) -> None:
        inode = self._record(ino)
        if inode is None:
            return
        with closing(self._files.open_unseen(ino, version)) as fd:
            found = checksum(fd, inode.size)
            blocks = os.fstat(fd).st_blocks
        self._index.remove([ino])
        chunks = found.chunks if found is not None else b""
        self._index.store([Sealed(ino, version, chunks, blocks)])


def _own(t: Transaction) -> list[bytes]:
    """Returns the ids of the namespaces whose names are this node's own, but of removed ones, of
    which the running node drops what is left."""
    spaces = sorted(keys.pack_u16(each) for each in marked(t))
    return [each for each in spaces if t.get(keys.NAMESPACE + each) is not None]


def _is_whole(kept: Quarantined, inode: Inode) -> bool:
    """Returns whether a data file in quarantine matches this record."""
    try:
        fd = os.open(kept.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        stat = os.fstat(fd)
        if not inode.flags & Flag.SEALED:
            return (stat.st_size, stat.st_mtime_ns) == (inode.size, inode.mtime_ns)
        found = checksum(fd, inode.size) if stat.st_size == inode.size else None
    except OSError:
        return False
    finally:
        os.close(fd)
    return found is not None and found.combined == inode.checksum


def _where(found: FileChecksum | None, entry: IndexEntry | None) -> str:
    """Names the damaged chunks, if the index knows them."""
    if found is None:
        return "its data file is shorter than its record says"
    if entry is None or len(entry.chunks) != len(found.chunks):
        return "its data do not match its checksum"
    wrong = [
        str(at // 16)
        for at in range(0, len(found.chunks), 16)
        if found.chunks[at : at + 16] != entry.chunks[at : at + 16]
    ]
    return (
        f"its data do not match its checksum, in the chunks of 4 MiB number {', '.join(wrong[:8])}"
    )
