"""The checksums that a store keeps of its data files, for callers that check their reads
themselves."""

from kvfs.datastore.checksum import combine
from kvfs.meta.records import Flag
from kvfs.session.session import Session
from kvfs.tree.inodes import read_inodes
from kvfs.tree.published_view import FoundInode


class StoredChecksums:
    """The stored checksums, for one client; any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def of(self, found: FoundInode) -> bytes | None:
        """Returns the xxh3-128 of each chunk, one after the other; None if this store has none of
        this content: it was not sealed yet, or lies in a directory for which another node is
        responsible. Raises what `Session.read` raises."""
        ino, inode = found
        if not inode.flags & Flag.SEALED:
            return None
        entry = self._session.read_index(lambda index: index.get(ino))
        if entry is None or entry.version != inode.version:
            return None
        return entry.chunks if combine(entry.chunks) == inode.checksum else None

    def hold(self, found: FoundInode) -> bool:
        """Returns whether its record still bears this seal: else it was opened for writing since,
        and may well have other bytes. Raises what `Session.read` raises."""
        (now,) = self._session.read(lambda t: read_inodes(t, [found.ino]))
        if now is None or not now.flags & Flag.SEALED:
            return False
        return (now.version, now.checksum) == (found.inode.version, found.inode.checksum)
