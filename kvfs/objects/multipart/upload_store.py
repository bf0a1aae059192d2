"""The uploads in parts of one store: part of `kvfs.objects.object_store`, whose rules hold."""

import os
import time
from collections.abc import Sequence

from kvfs.base.errors import Conflict, Invalid
from kvfs.meta.engine import Transaction
from kvfs.objects import lookup, mutations, range_copy
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart import part_assembly, upload_transactions
from kvfs.objects.multipart.part_gathering import PartGathering
from kvfs.objects.multipart.part_slots import Slot, Slots
from kvfs.objects.multipart.upload_transactions import (
    CompletedPart,
    Upload,
    UploadPage,
    UploadPart,
)
from kvfs.objects.mutations import Check, Moment, New, anything
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_drafts import ObjectDraft, ObjectDrafts
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import ObjectOpener
from kvfs.objects.publish import Publisher
from kvfs.session.byte_transfer import Step, go_on
from kvfs.session.session import Session
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.stage import Draft, Drafts
from kvfs.vfs.stage_records import WrittenData


class Uploads:
    """Operations on uploads, from their beginning to their end."""

    def __init__(
        self,
        opened: Session,
        stage: Drafts,
        slots: Slots,
        drafts: ObjectDrafts,
        opener: ObjectOpener,
        publisher: Publisher,
        node: NodeClient,
    ) -> None:
        self._session = opened
        self._stage = stage
        self._slots = slots
        self._drafts = drafts
        self._opener = opener
        self._publisher = publisher
        self._node = node

    def create(self, bucket: bytes, key: bytes, metadata: Metadata) -> Upload:
        """Raises NoSuchBucket, Invalid, TooLarge."""

        def fn(t: Transaction) -> Upload:
            found = lookup.find_bucket(t, bucket)
            # The exact clock: ids are in the order of their beginning.
            moment = Moment(time.time_ns(), self._session.boot)
            return upload_transactions.create(t, found, key, metadata, moment)

        upload = self._session.write(fn)
        self._publisher.sync_if_durable(upload.directory)
        return upload

    def find(self, bucket: bytes, key: bytes, upload_id: str) -> Upload:
        """Raises NoSuchBucket, NoSuchUpload."""
        return self._session.read(
            lambda t: upload_transactions.find(t, lookup.find_bucket(t, bucket), key, upload_id)
        )

    def begin_part(
        self, bucket: bytes, key: bytes, upload_id: str, number: int, size_hint: int
    ) -> ObjectDraft:
        """Like `ObjectStore.begin`, for a part, whose size is as hinted unless that is 0. Also
        raises NoSuchUpload, Invalid."""
        upload_transactions.check_number(number)

        def fn(t: Transaction) -> tuple[Bucket, Upload]:
            found = lookup.find_bucket(t, bucket)
            return found, upload_transactions.find(t, found, key, upload_id)

        found, upload = self._session.read(fn)
        slot = self._slots.begin(found, upload, number, size_hint, self._publisher.moment())
        body = self._stage.begin_one(found.new_file(size_hint)) if slot is None else slot
        return ObjectDraft(body, found, key, True, upload, number)

    def commit_part(self, draft: ObjectDraft, etag: str, metadata: Metadata) -> UploadPart:
        """Like `ObjectStore.commit`. Raises NoSuchUpload when the upload has ended meanwhile."""
        upload = draft.upload
        assert upload is not None, "an object is put with commit"
        if isinstance(draft.body, Slot):
            return self._commit_slot(draft.body, upload, draft.part, etag, metadata)
        bucket = draft.bucket

        def fn(t: Transaction, body: WrittenData, changed: Changed) -> UploadPart:
            new = New(body, etag, metadata)
            return upload_transactions.put_part(
                t, bucket, upload, draft.part, new, self._publisher.moment(), changed
            )

        return self._publisher.publish(draft.body, fn)

    def copy_part(
        self,
        source: tuple[bytes, bytes, str],
        draft: ObjectDraft,
        offset: int,
        size: int,
        *,
        check_source: Check = anything,
        step: Step = go_on,
    ) -> Facts:
        """Fills a draft with a range of an object; returns the facts of the source. `step`: as for
        `ObjectStore.copy`.

        Raises what `open` raises; Invalid when the range is not within it, Conflict when it was
        written to meanwhile.
        """
        opened = self._opener.open(*source)
        try:
            check_source(opened.facts)
            if not 0 <= offset <= offset + size <= opened.size:
                raise Invalid(f"the source has {opened.size} bytes: the range is not within")
            self._drafts.grow(draft, size)
            range_copy.copy_range(opened.fd, offset, size, draft.fd, draft.offset, step)
            if not opened.is_unchanged():
                raise Conflict("the source of the copy was written to meanwhile")
            return opened.facts
        finally:
            os.close(opened.fd)

    def list_parts(
        self, bucket: bytes, key: bytes, upload_id: str, after: int = 0, limit: int = 1000
    ) -> tuple[Upload, list[UploadPart], bool]:
        """Returns the upload, its parts with numbers above `after`, and whether there are more.
        Raises NoSuchBucket, NoSuchUpload."""

        def fn(t: Transaction) -> tuple[Upload, list[UploadPart], bool]:
            upload = upload_transactions.find(t, lookup.find_bucket(t, bucket), key, upload_id)
            return upload, *upload_transactions.list_parts(
                t, upload, after, limit, self._session.boot
            )

        return self._session.read(fn)

    def list_all(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        start_id: str = "",
        max_uploads: int = 1000,
    ) -> UploadPage:
        """See `upload_transactions.list_all`. Raises NoSuchBucket."""
        return self._session.read(
            lambda t: upload_transactions.list_all(
                t,
                lookup.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                start_id=start_id,
                max_uploads=max_uploads,
            )
        )

    def abort(self, bucket: bytes, key: bytes, upload_id: str) -> None:
        """Raises NoSuchBucket, NoSuchUpload."""

        def fn(t: Transaction, changed: Changed) -> None:
            found = lookup.find_bucket(t, bucket)
            upload_transactions.abort(t, found, key, upload_id, self._publisher.moment(), changed)

        self._publisher.change(fn)

    def completed(self, bucket: bytes, key: bytes, upload_id: str) -> tuple[str, str] | None:
        """Returns (ETag, version) that completing this upload gave within the last hour. Raises
        NoSuchBucket."""
        return self._session.read(
            lambda t: upload_transactions.completed(
                t, lookup.find_bucket(t, bucket), key, upload_id
            )
        )

    def choose_parts(
        self, bucket: bytes, key: bytes, upload_id: str, wanted: Sequence[CompletedPart]
    ) -> tuple[Upload, list[UploadPart]]:
        """Returns the upload and the parts that `complete` is to put together. Raises NoSuchBucket,
        NoSuchUpload, Invalid, PartOrder, InvalidPart, PartTooSmall."""

        def fn(t: Transaction) -> tuple[Upload, list[UploadPart]]:
            upload = upload_transactions.find(t, lookup.find_bucket(t, bucket), key, upload_id)
            return upload, upload_transactions.choose_parts(t, upload, wanted, self._session.boot)

        return self._session.read(fn)

    def complete(
        self,
        bucket: bytes,
        upload: Upload,
        parts: Sequence[UploadPart],
        etag: str,
        metadata: Metadata,
        *,
        versioning: str = "",
        check: Check = anything,
        step: Step = go_on,
    ) -> Facts:
        """Assembles an object from chosen parts, wherever they were put, and ends the upload.
        `step`: as for `ObjectStore.copy`, if bytes are copied; an exception of it leaves the upload
        as it was. Raises what `ObjectStore.commit` raises, NoSuchUpload and InvalidPart (the upload
        or a part was changed meanwhile), also Unavailable if a part's node does not answer."""
        found = self._session.read(lambda t: lookup.find_bucket(t, bucket))

        def fn(
            t: Transaction, body: WrittenData, changed: Changed, *, released: bool = False
        ) -> Facts:
            moment = self._publisher.moment()
            upload_transactions.check_unchanged(t, found, upload, parts, moment.boot)
            if released:
                part_assembly.release(t, upload.directory, body.ino)

            def put(body: WrittenData) -> Facts:
                new = New(body, etag, metadata)
                return mutations.put(t, found, upload.key, new, versioning, check, moment, changed)

            result = self._publisher.in_order(body, put)
            upload_transactions.complete(t, found, upload, result, moment, changed)
            return result

        boot = self._session.boot
        with PartGathering(self._session, self._node, self._stage, found, parts) as gathering:
            with self._slots.joined(found, upload, parts, gathering, boot, step) as written:
                if written is not None:
                    return self._publisher.change_synced(
                        found, lambda t, changed: fn(t, written, changed, released=True)
                    )
            body = self._gathered(found, parts, gathering, step)
        return self._publisher.publish(body, fn)

    def _gathered(
        self, bucket: Bucket, parts: Sequence[UploadPart], gathering: PartGathering, step: Step
    ) -> Draft:
        """Returns a new body of these parts, one after the other."""
        body = self._stage.begin_one(bucket.new_file(sum(part.size for part in parts)))
        try:
            at = 0
            for part in parts:
                gathering.copy(part, body.fd, at, step)
                at += part.size
        except BaseException:
            self._stage.discard([body])
            raise
        return body

    def _commit_slot(
        self, slot: Slot, upload: Upload, number: int, etag: str, metadata: Metadata
    ) -> UploadPart:
        self._slots.sync(slot)

        def fn(t: Transaction, changed: Changed) -> UploadPart:
            return upload_transactions.put_part_in_place(
                t,
                slot.bucket,
                upload,
                number,
                slot.place,
                slot.size,
                etag,
                metadata,
                self._publisher.moment(),
                changed,
                synced=slot.bucket.durable,
            )

        part = self._publisher.change_synced(slot.bucket, fn)
        slot.close()
        return part
