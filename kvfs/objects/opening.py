"""Opens objects for reading: a descriptor, and facts that agree with it.

An open descriptor is the lease: what replaces or deletes the object only unlinks its data file.
While a file is not sealed, its data file is the truth about size and time (a mount may be writing
to it), so who sends it compares both again at the end: `Opened.is_unchanged`.
"""

import os
from typing import Final, NamedTuple

import msgspec

from kvfs.client.session import Session
from kvfs.client.touches import Touches
from kvfs.errors import Corrupt
from kvfs.meta.records import Flag
from kvfs.namespace import spaces
from kvfs.objects import attributes, finding
from kvfs.objects.finding import Facts
from kvfs.objects.problems import MarkedDeleted, NoSuchKey

_ATTEMPTS: Final = 3
_REMEMBERED: Final = 4096
_REMEMBERED_METADATA: Final = 4096
"""Characters: an object about which more is said is found anew each time."""


class Opened(NamedTuple):
    """An object open for reading; the caller closes `fd`."""

    fd: int
    facts: Facts

    @property
    def size(self) -> int:
        return self.facts.size

    def is_unchanged(self) -> bool:
        """Whether the bytes read so far are those of the object that was opened: False where its
        file was written in place meanwhile."""
        found = os.fstat(self.fd)
        return (found.st_size, found.st_mtime_ns) == (self.facts.size, self.facts.data_mtime_ns)


class Opener:
    """Of one store; any thread."""

    def __init__(self, session: Session, touches: Touches) -> None:
        self._session = session
        self._touches = touches
        self._seen = _Seen()

    def find(self, bucket: bytes, key: bytes, version: str) -> Facts:
        """One version, or a delete marker. Raises NoSuchBucket, NoSuchKey, NoSuchVersion,
        Invalid."""
        found = self._found(bucket, key, version)
        if found.delete_marker or found.inode.flags & Flag.SEALED:
            return found
        try:
            data = self._session.files.stat(found.ino, found.inode.version)
        except FileNotFoundError:
            return found
        return _as_data(found, data)

    def open(self, bucket: bytes, key: bytes, version: str) -> Opened:
        """A new descriptor of one version. Raises as `find`, MarkedDeleted, Corrupt, OSError."""
        found = None
        for _ in range(_ATTEMPTS):
            found = self._found(bucket, key, version)
            opened = self._open(found)
            if opened is not None:
                if opened.facts.inode is found.inode and opened.facts is not found:
                    self._seen.replace(bucket, key, found, opened.facts)
                self._touches.add(found.ino)
                return opened
        assert found is not None
        shown = key.decode(errors="backslashreplace")
        if self._session.read(lambda t: spaces.is_durable(t, found.ino)):
            raise Corrupt(f"{shown}: its data file is missing or torn: run `kvfs fsck`")
        raise NoSuchKey(f"{shown}: its data have gone")

    def reopen(self, seen: Opened) -> Opened | None:
        """A new descriptor of what was opened before in the same generation of the metadata; None
        where its data file is not what it was then. Raises OSError."""
        facts = seen.facts
        try:
            opened = Opened(
                self._session.files.open(facts.ino, facts.inode.version, os.O_RDONLY), facts
            )
        except FileNotFoundError:
            return None
        if opened.is_unchanged():
            self._touches.add(facts.ino)
            return opened
        os.close(opened.fd)
        return None

    def _found(self, bucket: bytes, key: bytes, version: str) -> Facts:
        """As the engine has it now. Raises as `find`."""
        generation = self._session.generation()
        if not version and (seen := self._seen.get(bucket, key, generation)) is not None:
            return seen
        boot = self._session.boot
        found = self._session.read(
            lambda t: finding.find(t, finding.find_bucket(t, bucket), key, version, boot)
        )
        return found if version else self._seen.put(bucket, key, generation, found)

    def _open(self, found: Facts) -> Opened | None:
        """None when the data file has gone, or is not what the record says."""
        if found.delete_marker:
            shown = found.key.decode(errors="backslashreplace")
            raise MarkedDeleted(f"{shown} is deleted", found.version, latest=found.latest)
        try:
            fd = self._session.files.open(found.ino, found.inode.version, os.O_RDONLY)
        except FileNotFoundError:
            return None
        data = os.fstat(fd)
        if found.inode.flags & Flag.SEALED:
            if data.st_size == found.inode.size:
                return Opened(fd, _with_mtime(found, data))
            os.close(fd)
            return None
        return Opened(fd, _as_data(found, data))


class _Seen:
    """Current versions as they were found, by bucket and key.

    Nothing stale is told: an entry counts for the generation of the engine before which it was
    read, and any commit, of whichever process, begins another. What the data file alone knows (size
    and time of one that is being written) is asked anew each time.
    """

    def __init__(self) -> None:
        self._facts: dict[tuple[bytes, bytes], tuple[int, Facts]] = {}

    def get(self, bucket: bytes, key: bytes, generation: int) -> Facts | None:
        seen = self._facts.get((bucket, key))
        return seen[1] if seen is not None and seen[0] == generation else None

    def put(self, bucket: bytes, key: bytes, generation: int, found: Facts) -> Facts:
        """Remember what was found; where that is what it was before, the same object is returned
        again, by which others know that it is."""
        seen = self._facts.get((bucket, key))
        if seen is not None and found._replace(data_mtime_ns=seen[1].data_mtime_ns) == seen[1]:
            found = seen[1]
        if sum(map(len, found.metadata.values())) <= _REMEMBERED_METADATA:
            if len(self._facts) >= _REMEMBERED:
                self._facts.clear()
            self._facts[bucket, key] = generation, found
        return found

    def replace(self, bucket: bytes, key: bytes, found: Facts, better: Facts) -> None:
        """Remember that of the same record more is known now."""
        seen = self._facts.get((bucket, key))
        if seen is not None and seen[1] is found:
            self._facts[bucket, key] = seen[0], better


def _with_mtime(found: Facts, data: os.stat_result) -> Facts:
    if found.data_mtime_ns == data.st_mtime_ns:
        return found
    return found._replace(data_mtime_ns=data.st_mtime_ns)


def _as_data(found: Facts, data: os.stat_result) -> Facts:
    """The facts as the data file has them."""
    inode = found.inode
    if (inode.size, inode.mtime_ns) == (data.st_size, data.st_mtime_ns):
        return _with_mtime(found, data)
    inode = msgspec.structs.replace(inode, size=data.st_size, mtime_ns=data.st_mtime_ns)
    etag = attributes.computed_etag(found.ino, inode)
    metadata = attributes.of_other_content(found.metadata)
    return found._replace(inode=inode, etag=etag, metadata=metadata, data_mtime_ns=data.st_mtime_ns)
