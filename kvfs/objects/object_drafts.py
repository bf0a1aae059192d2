"""Objects and parts in the making: data files that nobody sees yet."""

import msgspec

from kvfs.datastore.kernel.writeback import start_writing
from kvfs.objects import lookup
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart.part_slots import Slot, Slots
from kvfs.objects.multipart.upload_transactions import Upload
from kvfs.objects.object_keys import check_key
from kvfs.session.session import Session
from kvfs.vfs.stage import SMALL_BYTES, Draft, Drafts
from kvfs.vfs.stage_records import NewFile


class ObjectDraft(msgspec.Struct, eq=False):
    """An object or part in the making: write to `fd`, then `commit` or `discard`."""

    body: Draft | Slot
    bucket: Bucket
    key: bytes
    waits: bool
    """Whether committing it waits for the disk, or for another host."""
    upload: Upload | None = None
    part: int = 0

    @property
    def fd(self) -> int:
        """The data file, open for reading and writing."""
        return self.body.fd

    @property
    def offset(self) -> int:
        """The offset of its bytes in the data file."""
        return self.body.place.offset if isinstance(self.body, Slot) else 0

    @property
    def fast_etag(self) -> bool:
        """Whether its ETag need not be an MD5."""
        return self.bucket.etag == "fast"


class ObjectDrafts:
    """Makes, fills and forgets them."""

    def __init__(self, opened: Session, stage: Drafts, slots: Slots) -> None:
        self._session = opened
        self._stage = stage
        self._slots = slots

    def begin(self, bucket: bytes, key: bytes, size_hint: int) -> ObjectDraft:
        """Returns a draft of about so many bytes, which is invisible. Raises NoSuchBucket, Invalid
        (no possible key), NoSpace, ReadOnly, Unavailable, OSError."""
        check_key(key)
        found = self._session.read(lambda t: lookup.find_bucket(t, bucket))
        waits = found.durable or self._session.replica is not None
        return ObjectDraft(self._stage.begin_one(found.new_file(size_hint)), found, key, waits)

    def begin_now(self, bucket: Bucket, key: bytes, size_hint: int) -> ObjectDraft | None:
        """Like `begin`, for an event loop: it waits neither for the disk nor for the node. None if
        only `begin` can: a large body, or space that must be asked for first."""
        check_key(key)
        if size_hint > SMALL_BYTES or self._session.replica is not None:
            return None  # in a cluster numbers are reserved elsewhere
        body = self._stage.begin_small_now(NewFile(bucket.root, size_hint, bucket.durable))
        return None if body is None else ObjectDraft(body, bucket, key, bucket.durable)

    def grow(self, draft: ObjectDraft, size: int) -> None:
        """Reserves space before more is written than was hinted; seldom does anything. Raises
        NoSpace, Unavailable."""
        if isinstance(draft.body, Draft):
            self._stage.grow(draft.body, size)
        else:
            assert size <= draft.body.size, "the size of a part in its place is known"

    def written(self, draft: ObjectDraft, start: int, end: int) -> None:
        """Tells that these bytes of a draft are written, for a long one now and then: their way to
        the disk begins."""
        if draft.bucket.durable:
            start_writing(draft.fd, draft.offset + start, end - start)

    def discard(self, draft: ObjectDraft) -> None:
        """Forgets a draft; does nothing if it was committed. Idempotent."""
        if isinstance(draft.body, Draft):
            self._stage.discard([draft.body])
        else:
            self._slots.discard(draft.body)
