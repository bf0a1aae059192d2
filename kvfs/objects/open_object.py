"""Opens objects for reading: a descriptor, and facts that agree with it.

An open descriptor is the lease: replacing or deleting the object only unlinks its data file. While
a file is not sealed, its data file is the truth about size and time (a mount may be writing to it),
so a sender compares both again at the end: `OpenedObject.is_unchanged`. A write sets them before
its first byte: so they count from a moment when none is under way (`file_lease.settled`), which is
waited for if somebody has the file open for writing.
"""

import os
from collections.abc import Callable
from typing import Final

import msgspec

from kvfs.base.errors import OtherVersion, Unavailable, Unreached
from kvfs.datastore import file_lease
from kvfs.datastore.kernel.safe_open import Unreadable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, unpack_inode
from kvfs.objects import lookup, object_attributes
from kvfs.objects.object_errors import (
    BeingWritten,
    MarkedDeleted,
    NoSuchKey,
    NotHere,
    Unheld,
    WrittenElsewhere,
)
from kvfs.objects.object_info import Facts
from kvfs.objects.store_cache import NOW, StoreCache, Wanted
from kvfs.session.session import Session
from kvfs.transfer.transfer import SMALL_BYTES
from kvfs.tree import etags
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.open import BlockingOpener
from kvfs.vfs.touches import Touches

_ATTEMPTS: Final = 3


class OpenedObject(msgspec.Struct):
    """An object open for reading; the caller closes `fd`."""

    fd: int
    facts: Facts
    coming: Callable[[int, int], None] | None = None
    """Set while its data are on their way here: call it for (offset, length) before those bytes are
    read. It blocks, and raises NoSuchKey (a miss), Corrupt, Busy, Unavailable, NoSpace."""

    @property
    def size(self) -> int:
        return self.facts.size

    def is_unchanged(self) -> bool:
        """Returns whether the bytes read so far are those of the object that was opened: False if
        its file was written in place meanwhile."""
        if self.coming is not None:
            return True
        found = os.fstat(self.fd)
        facts = self.facts
        return (found.st_size, found.st_mtime_ns) == (facts.inode.size, facts.data_mtime_ns)


class ObjectOpener:
    """The opener of one store; any thread."""

    def __init__(
        self, session: Session, touches: Touches, node: NodeClient, cache: StoreCache
    ) -> None:
        self._session = session
        self._touches = touches
        self._opener = BlockingOpener(session, node)
        self._cache = cache

    def find(self, bucket: bytes, key: bytes, version: str, generation: int = NOW) -> Facts:
        """Returns one version, or a delete marker, as of that generation or newer. Raises
        NoSuchBucket, NoSuchKey, NoSuchVersion, Invalid."""
        found = self._found(bucket, key, version, generation)
        if found.delete_marker or found.inode.flags & Flag.SEALED:
            return found
        try:
            data = self._session.files.stat(found.ino, found.inode.version)
        except FileNotFoundError:
            return found
        return _as_data(found, data)

    def open(self, bucket: bytes, key: bytes, version: str) -> OpenedObject:
        """Returns a new descriptor of one version, whose data are fetched if they are on another
        node. Blocking. Raises what `find` raises, MarkedDeleted, Corrupt, Unavailable, NoSpace,
        OSError."""
        return self._open_fetched(bucket, key, version, self._fetch)

    def open_coming(self, bucket: bytes, key: bytes, version: str) -> OpenedObject:
        """Like `open`; a large object is read as its data arrive."""
        return self._open_fetched(bucket, key, version, self._fetch_begun)

    def _open_fetched(
        self,
        bucket: bytes,
        key: bytes,
        version: str,
        fetch: Callable[[Facts], OpenedObject | None],
    ) -> OpenedObject:
        def look() -> tuple[Facts, OpenedObject | None]:
            try:
                opened = self.open_here(bucket, key, version)
            except NotHere as missing:
                return missing.facts, None
            return opened.facts, opened

        return self._opener.open(_shown(key), look, fetch)

    def _fetch(self, facts: Facts) -> None:
        """Fetches the object's data; then look again. Raises NoSuchKey (a miss), Corrupt, Busy (it
        is being written), Unavailable, NoSpace."""
        try:
            self._opener.fetch(facts, _shown(facts.key))
        except (OtherVersion, Unreached) as missed:
            raise _as_key(missed) from None

    def _fetch_begun(self, facts: Facts) -> OpenedObject | None:
        """Does the same; for a large object returns a descriptor of the arriving file, once its
        first bytes are here."""
        if facts.size <= SMALL_BYTES:
            self._fetch(facts)
            return None
        if not self._fetch_span(facts, 0, 1):
            return None

        def coming(offset: int, length: int) -> None:
            if not self._fetch_span(facts, offset, length):
                raise Unavailable(f"{_shown(facts.key)}: it was replaced while it was read")

        try:
            fd = self._session.files.open_arriving(facts.ino, facts.inode.version)
        except FileNotFoundError:  # it is whole by now
            return None
        self._touches.add(facts.ino)
        return OpenedObject(fd, facts, coming)

    def open_here(
        self,
        bucket: bytes,
        key: bytes,
        version: str,
        generation: int = NOW,
        *,
        waits: bool = True,
    ) -> OpenedObject:
        """Returns a new descriptor of one version. `waits`: for a write to it that is under way.
        Raises as `find`, MarkedDeleted, NotHere, OSError; without `waits` also `BeingWritten`."""
        found = None
        for _ in range(_ATTEMPTS):
            if version:
                found = self._found(bucket, key, version, generation)
            else:
                found = self.current(bucket, key, generation)
            opened = self._open(found, waits)
            facts = found if opened is None else opened.facts
            is_older = facts.data_mtime_ns != facts.inode.mtime_ns  # or its record was copied
            if opened is not None and is_older and self._was_overtaken(opened):
                os.close(opened.fd)
            elif opened is not None:
                if facts.inode is found.inode and facts is not found:
                    self._cache.replace((bucket, key), found, facts)
                self._touches.add(found.ino)
                return opened
            generation = NOW
        assert found is not None
        raise NotHere(found)

    def _fetch_span(self, facts: Facts, offset: int, length: int) -> bool:
        try:
            return self._opener.fetch_span(facts, _shown(facts.key), offset, length)
        except (OtherVersion, Unreached) as missed:
            raise _as_key(missed) from None

    def reopen(self, seen: OpenedObject) -> OpenedObject | None:
        """Returns a new descriptor of an object that was opened before and is the same by the
        metadata; None if its data file differs from then. Raises OSError."""
        facts = seen.facts
        try:
            opened = OpenedObject(
                self._session.files.open(facts.ino, facts.inode.version, os.O_RDONLY), facts
            )
        except (FileNotFoundError, Unreadable):
            return None
        if opened.is_unchanged():
            self._touches.add(facts.ino)
            return opened
        os.close(opened.fd)
        return None

    def _was_overtaken(self, opened: OpenedObject) -> bool:
        """Returns whether a sealed file was written to between the reads of its record and of its
        data file, whose times differ, as they do in a store that was copied. The record says so
        before the first byte changes."""
        facts, inode = opened.facts, opened.facts.inode
        if not inode.flags & Flag.SEALED:
            return False
        packed = self._session.read(lambda t: t.get(keys.inode(facts.ino)))
        if packed is None:
            return True
        now = unpack_inode(packed)
        return not now.flags & Flag.SEALED or now.mtime_ns != inode.mtime_ns

    def wanted(self, bucket: bytes, key: bytes) -> Wanted:
        """Returns the current version, for `StoreCache.look`."""
        boot = self._session.boot

        def read(t: Transaction) -> Facts:
            return lookup.find(t, lookup.find_bucket(t, bucket), key, "", boot)

        return (bucket, key), read

    def _found(self, bucket: bytes, key: bytes, version: str, generation: int) -> Facts:
        """Returns the facts as the engine has them. Raises what `find` raises."""
        if not version:
            return self.current(bucket, key, generation)
        boot = self._session.boot
        return self._session.read(
            lambda t: lookup.find(t, lookup.find_bucket(t, bucket), key, version, boot)
        )

    def current(self, bucket: bytes, key: bytes, generation: int) -> Facts:
        """Returns the record of the current version, as of that generation or newer; the same
        object while it is the same. Raises what `find` raises."""
        entry = self._cache.entry((bucket, key))
        if entry is not None and entry.generation >= generation:
            known: Facts = entry.value
            return known
        found: Facts = self._cache.get(*self.wanted(bucket, key), generation)
        return found

    def _open(self, found: Facts, waits: bool) -> OpenedObject | None:
        """Returns None when the data file has gone, or differs from the record. Raises
        BeingWritten."""
        if found.delete_marker:
            raise marked_deleted(found)
        try:
            fd = self._session.files.open(found.ino, found.inode.version, os.O_RDONLY)
        except (FileNotFoundError, Unreadable):
            return None
        data = os.fstat(fd)
        if found.data_mtime_ns == data.st_mtime_ns and found.inode.size == data.st_size:
            return OpenedObject(fd, found)  # as it was when somebody looked at it before
        if found.inode.flags & Flag.SEALED:
            if data.st_size == found.inode.size:
                return OpenedObject(fd, _with_mtime(found, data))
            os.close(fd)
            return None
        if file_lease.is_quiet(fd) is False:
            if not waits:
                os.close(fd)
                raise BeingWritten
            data = file_lease.settled(fd)
        return OpenedObject(fd, _as_data(found, data))


def marked_deleted(marker: Facts) -> MarkedDeleted:
    """Returns the error for a request for the object that this delete marker stands for."""
    deleted = MarkedDeleted(
        f"{_shown(marker.key)} is deleted", marker.version, latest=marker.latest
    )
    deleted.at = lookup.current_entry(marker)
    return deleted


def _as_key(missed: OtherVersion | Unreached) -> NoSuchKey:
    """Returns the node's answer, as an answer about an object."""
    kind = WrittenElsewhere if isinstance(missed, OtherVersion) else Unheld
    error = kind(str(missed))
    error.at = missed.at
    return error


def _shown(key: bytes) -> str:
    return key.decode(errors="backslashreplace")


def _with_mtime(found: Facts, data: os.stat_result) -> Facts:
    if found.data_mtime_ns == data.st_mtime_ns:
        return found
    return msgspec.structs.replace(found, data_mtime_ns=data.st_mtime_ns)


def _as_data(found: Facts, data: os.stat_result) -> Facts:
    """Returns the facts as the data file has them."""
    inode = found.inode
    if (inode.size, inode.mtime_ns) == (data.st_size, data.st_mtime_ns):
        return _with_mtime(found, data)
    inode = msgspec.structs.replace(inode, size=data.st_size, mtime_ns=data.st_mtime_ns)
    etag = etags.computed(found.ino, inode)
    metadata = object_attributes.of_other_content(found.metadata)
    return msgspec.structs.replace(
        found, inode=inode, etag=etag, metadata=metadata, data_mtime_ns=data.st_mtime_ns
    )
