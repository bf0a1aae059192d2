"""Parts on their way into an assembly, and assemblies on their way to be objects.

| step | on disk | in the engine | left by a kill after it |
|---|---|---|---|
| 1 for the first part a data file, see `kvfs.vfs.stage` | empty file | `r` | as there |
| 2 its record; the part's bytes locked | the same | the assembly | see `upload_transactions` |
| 3 space reserved | the same | counted | space counted until the upload ends |
| 4 bytes written; durable: synced | the bytes | the same | the same; they are written again |
| 5 the part recorded | the same | the part | the part |
| 6 completing: locked, cut, synced | the object's bytes | the same | the upload, as it was |
| 7 one transaction | the same | the object | the object |

In step 6 parts with a file of their own are copied to their places. An assembly is used on the node
that made it; on others a part gets a file of its own, and a completion copies (`part_gathering`).

A lock is one of the open file (F_OFD_SETLK): it ends with the descriptor, however the process ends,
and holds between processes and within one. A completion that finds a writer leaves the assembly
alone: a client that sent the part twice and completes may still have the first attempt under
way.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvfs.base.errors import KvfsError
from kvfs.datastore import file_sync
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart import part_assembly, upload_transactions
from kvfs.objects.multipart.part_assembly import PartBytes
from kvfs.objects.multipart.part_gathering import PartGathering
from kvfs.objects.multipart.upload_transactions import Upload, UploadPart
from kvfs.objects.mutations import Moment
from kvfs.session.byte_transfer import Step
from kvfs.session.session import Session
from kvfs.vfs.stage import Drafts
from kvfs.vfs.stage_records import WrittenData

_MOST_BYTES: Final = 5 << 40
"""The largest object."""
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BUSY: Final = frozenset((errno.EAGAIN, errno.EACCES))
_CANNOT: Final = frozenset((errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP))


class Slot:
    """The place of a part that is on its way. `fd` is the assembly's, locked there."""

    __slots__ = ("bucket", "fd", "place", "size")

    def __init__(self, bucket: Bucket, fd: int, place: PartBytes, size: int) -> None:
        self.bucket = bucket
        self.fd = fd
        self.place = place
        self.size = size

    def close(self) -> None:
        """Gives the place up; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Slots:
    """The slots of one store; any thread."""

    def __init__(self, session: Session, stage: Drafts) -> None:
        self._session = session
        self._stage = stage

    def begin(
        self, bucket: Bucket, upload: Upload, number: int, size: int, moment: Moment
    ) -> Slot | None:
        """Does steps 1 to 3; None: the part is to have a file of its own. Raises NoSuchUpload,
        NoSpace, Unavailable, OSError."""
        stride = self._session.read(
            lambda t: part_assembly.choose(list(part_assembly.find(t, upload.directory)), size)
        )
        if not size or stride is None:
            return None
        offset = (number - 1) * stride
        if offset + size > _MOST_BYTES:
            return None
        ino = self._find_or_make(bucket, upload, stride, moment)
        fd = None if ino is None else self._open(ino)
        if ino is None or fd is None:
            return None
        slot = Slot(bucket, fd, PartBytes(ino, offset), size)
        try:
            if _lock(fd, offset, stride) and self._reserve(slot, upload, number):
                return slot
        except BaseException:
            slot.close()
            raise
        slot.close()
        return None

    def sync(self, slot: Slot) -> None:
        """Does the sync of step 4. Raises OSError."""
        if slot.bucket.durable:
            file_sync.sync(slot.fd, datasync=True)

    def discard(self, slot: Slot) -> None:
        """Undoes `begin` if the part was not recorded; idempotent. Space that cannot be given back
        now is counted until the upload ends."""
        if slot.fd < 0:
            return
        slot.close()
        ino, blocks = slot.place.data, part_assembly.blocks_of(slot.size)

        def fn(t: Transaction) -> None:
            if t.get(keys.inode(ino)) is not None and t.get(keys.orphan(ino)) is None:
                part_assembly.reserve(t, ino, -blocks)

        with contextlib.suppress(KvfsError, OSError):
            self._session.write(fn)

    @contextlib.contextmanager
    def joined(
        self,
        bucket: Bucket,
        upload: Upload,
        parts: Sequence[UploadPart],
        gathering: PartGathering,
        boot: int,
        step: Step,
    ) -> Iterator[WrittenData | None]:
        """Does step 6: yields the data file that holds just these parts one after the other, for as
        long as it is locked; None if there is none on this host. Raises OSError, InvalidPart, what
        `step` raises."""
        target = self._session.read(lambda t: _target(t, upload, parts, boot))
        fd = None if target is None else self._open(target)
        if fd is None or target is None:
            yield None
            return
        try:
            if not _lock(fd, 0, 0):
                yield None
                return
            # Once more: what was recorded before the lock was had.
            if self._session.read(lambda t: _target(t, upload, parts, boot)) != target:
                yield None
                return
            self._put_together(fd, target, parts, gathering, step)
            if bucket.durable:
                file_sync.sync(fd, datasync=True)
            yield _written(fd, target, synced=bucket.durable)
        finally:
            os.close(fd)

    def _put_together(
        self,
        fd: int,
        target: int,
        parts: Sequence[UploadPart],
        gathering: PartGathering,
        step: Step,
    ) -> None:
        at = 0
        for part in parts:
            if part.place.data != target:
                gathering.copy(part, fd, at, step)
            at += part.size
        if os.fstat(fd).st_size != at:
            os.ftruncate(fd, at)
        os.utime(fd)

    def _find_or_make(
        self, bucket: Bucket, upload: Upload, stride: int, moment: Moment
    ) -> int | None:
        """Returns the assembly's inode number; None if none could be made now."""

        def find(t: Transaction) -> int | None:
            return part_assembly.find(t, upload.directory).get(stride)

        found = self._session.read(find)
        return self._make(bucket, upload, stride, moment, find) if found is None else found

    def _make(
        self,
        bucket: Bucket,
        upload: Upload,
        stride: int,
        moment: Moment,
        find: Callable[[Transaction], int | None],
    ) -> int | None:
        body = self._stage.begin_one(bucket.new_file(0))

        def fn(t: Transaction) -> int | None:
            upload_transactions.find(t, bucket, upload.key, upload.id)
            found = find(t)  # another may have been faster
            if found is not None:
                return found
            made = part_assembly.make(t, bucket, upload.directory, stride, body.ino, moment)
            return body.ino if made else None

        try:
            found = self._session.write(fn)
        except BaseException:
            self._stage.discard([body], in_doubt=True)
            raise
        self._stage.discard([body])  # but for the descriptor nothing, where it was used
        return found

    def _open(self, ino: int) -> int | None:
        try:
            return self._session.files.open(ino, 0, os.O_RDWR)
        except FileNotFoundError:
            return None

    def _reserve(self, slot: Slot, upload: Upload, number: int) -> bool:
        """Returns whether the place is free. Its bytes are locked already, so that it stays so."""
        place, size = slot.place, slot.size

        def fn(t: Transaction) -> bool:
            upload_transactions.find(t, slot.bucket, upload.key, upload.id)
            if place.data not in part_assembly.find(t, upload.directory).values():
                return False  # it was evicted
            there = t.get(keys.file_entry(upload.directory, upload_transactions.part_name(number)))
            if there is not None and part_assembly.place_of(t, keys.unpack_u64(there)) == place:
                return False
            part_assembly.reserve(t, place.data, part_assembly.blocks_of(size))
            return True

        return self._stage.with_room(slot.bucket.id, size, fn)


def _target(t: Transaction, upload: Upload, parts: Sequence[UploadPart], boot: int) -> int | None:
    """Returns the data file that is to become the object, if one can."""
    first, last = parts[0], parts[-1]
    if first.place.offset:
        return None
    target = first.place.data
    if len(parts) > 1:
        if [part.number for part in parts] != list(range(1, len(parts) + 1)):
            return None
        if any(part.size != first.size for part in parts[:-1]) or last.size > first.size:
            return None
        found = part_assembly.find(t, upload.directory).get(first.size)
        if found is None:
            return None
        target = found
    chosen = {part.number for part in parts}
    there, _ = upload_transactions.list_parts(t, upload, 0, upload_transactions.MAX_PARTS, boot)
    if any(part.place.data == target and part.number not in chosen for part in there):
        return None
    return target


def _written(fd: int, ino: int, *, synced: bool) -> WrittenData:
    found = os.fstat(fd)
    return WrittenData(
        ino=ino,
        size=found.st_size,
        blocks=found.st_blocks,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
        synced=synced,
    )


def _lock(fd: int, offset: int, length: int) -> bool:
    """Locks these bytes, with a length of 0 all from there on; False if another has locked some of
    them, or this filesystem knows no locks."""
    try:
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, length, 0)
        )
    except OSError as error:
        if error.errno in _BUSY or error.errno in _CANNOT:
            return False
        raise
    return True
