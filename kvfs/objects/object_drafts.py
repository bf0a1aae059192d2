"""Objects and parts in the making: data files that nobody sees yet."""

from kvfs.datastore.kernel.writeback import start_writing
from kvfs.objects import lookup
from kvfs.objects.multipart.part_slots import Slot, Slots
from kvfs.objects.multipart.upload_transactions import Upload
from kvfs.objects.object_keys import check_key
from kvfs.objects.staged_files import Bodies, StagedBody
from kvfs.session.session import Session


class ObjectDraft:
    """An object or part in the making: write to `fd`, then `commit` or `discard`."""

    __slots__ = ("body", "key", "part", "upload")

    def __init__(
        self, body: StagedBody | Slot, key: bytes, upload: Upload | None = None, part: int = 0
    ) -> None:
        self.body = body
        self.key = key
        self.upload = upload
        self.part = part

    @property
    def fd(self) -> int:
        """The data file, open for reading and writing."""
        return self.body.fd

    @property
    def offset(self) -> int:
        """The offset of its bytes in the data file."""
        return self.body.place.offset if isinstance(self.body, Slot) else 0

    @property
    def durable(self) -> bool:
        """Whether to commit it waits for the disk."""
        return self.body.bucket.durable

    @property
    def fast_etag(self) -> bool:
        """Whether its ETag need be no MD5."""
        return self.body.bucket.etag == "fast"


class ObjectDrafts:
    """Makes, fills and forgets them."""

    def __init__(self, opened: Session, bodies: Bodies, slots: Slots) -> None:
        self._session = opened
        self._bodies = bodies
        self._slots = slots

    def begin(self, bucket: bytes, key: bytes, size_hint: int) -> ObjectDraft:
        """A draft of about so many bytes; nothing is seen of it. Raises NoSuchBucket, Invalid (no
        possible key), NoSpace, ReadOnly, Unavailable, OSError."""
        check_key(key)
        found = self._session.read(lambda t: lookup.find_bucket(t, bucket))
        return ObjectDraft(self._bodies.begin(found, size_hint), key)

    def begin_now(self, bucket: bytes, key: bytes, size_hint: int) -> ObjectDraft | None:
        """As `begin`, for an event loop: it waits neither for the disk nor for the node. None where
        only `begin` can: a large body, or space that must be asked for first."""
        check_key(key)
        if self._session.mirrored is not None:
            return None  # numbers are reserved elsewhere
        found = self._session.read(lambda t: lookup.find_bucket(t, bucket))
        body = self._bodies.begin_now(found, size_hint)
        return None if body is None else ObjectDraft(body, key)

    def grow(self, draft: ObjectDraft, size: int) -> None:
        """Call before more is written than was hinted; seldom does anything. Raises NoSpace,
        Unavailable."""
        if isinstance(draft.body, StagedBody):
            self._bodies.grow(draft.body, size)
        else:
            assert size <= draft.body.size, "the size of a part in its place is known"

    def written(self, draft: ObjectDraft, start: int, end: int) -> None:
        """Tell that these bytes of a draft are written, of a long one now and then: what is to be
        on disk at the end is put on its way."""
        if draft.body.bucket.durable:
            start_writing(draft.fd, draft.offset + start, end - start)

    def discard(self, draft: ObjectDraft) -> None:
        """Forget a draft; nothing where it was committed. Idempotent."""
        if isinstance(draft.body, StagedBody):
            self._bodies.discard(draft.body)
        else:
            self._slots.discard(draft.body)
