"""The objects of one store: what the S3 front door calls.

Every method is blocking and may be called from any thread. What a method that changes anything
returned survives SIGKILL, and in a durable bucket power loss; the node's mount has forgotten what
was there before, unless Unavailable says that it did not answer in time (the change is committed
then).
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from kvfs.client import session, transfer
from kvfs.client.finish import Changed, Finisher
from kvfs.client.link import Link
from kvfs.client.placing import Dropped, Written
from kvfs.client.remembering import Remembering
from kvfs.client.room import Room
from kvfs.client.touches import Touches
from kvfs.client.transfer import Step
from kvfs.errors import Conflict, Invalid, KvfsError
from kvfs.meta.interface import Transaction
from kvfs.objects import assembly, buckets, changing, finding, listing, moving, uploads
from kvfs.objects.attributes import Metadata
from kvfs.objects.bodies import Bodies, Body
from kvfs.objects.buckets import Described
from kvfs.objects.changing import Check, Deleted, Moment, New, anything
from kvfs.objects.finding import Bucket, Facts
from kvfs.objects.listing import Page, VersionPage
from kvfs.objects.names import check_key
from kvfs.objects.opening import Opener
from kvfs.objects.problems import NoSuchKey
from kvfs.objects.slots import Slot, Slots
from kvfs.objects.uploads import Part, Upload, UploadPage, Wanted
from kvfs.store.writeback import start_writing

T = TypeVar("T")
_ATTEMPTS: Final = 3
_BUCKETS: Final = 1024
"""Whose settings are remembered."""
_DELETED_AT_ONCE: Final = 256
_COPIED_ATTRIBUTES: Final = frozenset(("retention", "legal-hold", "acl", "owner", "parts"))
"""What a copy does not take over from its source."""


def _on(_: int) -> None:
    """Lets what takes long go on."""


class Draft:
    """An object or part in the making: write to `fd`, then `commit` or `discard`."""

    __slots__ = ("body", "key", "part", "upload")

    def __init__(
        self, body: Body | Slot, key: bytes, upload: Upload | None = None, part: int = 0
    ) -> None:
        self.body = body
        self.key = key
        self.upload = upload
        self.part = part

    @property
    def fd(self) -> int:
        """Of the data file, open for reading and writing."""
        return self.body.fd

    @property
    def offset(self) -> int:
        """Where in the data file its bytes begin."""
        return self.body.place.offset if isinstance(self.body, Slot) else 0

    @property
    def durable(self) -> bool:
        """Whether to commit it waits for the disk."""
        return self.body.bucket.durable


class Doomed(NamedTuple):
    """What is to be deleted."""

    key: bytes
    version: str = ""
    check: Check = anything


class ObjectStore:
    """Opens the store in `root`, which others may use at the same time; `close` it.

    Raises NotFound (no store there), Invalid, Corrupt.
    """

    def __init__(self, root: Path) -> None:
        self._session = session.acquire(root)
        opened = self._session
        self._link = Link(opened.store.socket)
        self._finisher = Finisher(opened, self._link)
        self._touches = Touches(opened, self._link)
        self._bodies = Bodies(opened, Room(opened.files.root, self._link))
        self._slots = Slots(opened, self._bodies)
        self._opener = Opener(opened, self._touches)
        self.find = self._opener.find
        self.open = self._opener.open
        self.reopen = self._opener.reopen
        self.is_same = self._opener.is_same
        self._settings = Remembering[bytes, Mapping[str, bytes]](opened, _BUCKETS)
        opened.files.keep_spares()

    def close(self) -> None:
        """Let go of the store."""
        self._bodies.give_back()
        self._touches.flush()
        self._finisher.close()
        self._link.close()
        session.release(self._session)

    @property
    def session(self) -> session.Session:
        """For what else is kept in the same engine."""
        return self._session

    # ---- buckets

    def create_bucket(
        self, name: bytes, kind: str = "durable", settings: Mapping[str, bytes] | None = None
    ) -> Bucket:
        """With settings from its beginning. Raises BucketExists, Invalid, NameTooLong, NoSpace."""
        author = self._session.author()

        def fn(t: Transaction, changed: Changed) -> Bucket:
            made = buckets.create(t, name, kind, author.uid, author.gid, author.now, changed)
            for setting, value in (settings or {}).items():
                buckets.put_setting(t, made, setting, value)
            return made

        made = self._change(fn)
        self._session.sync()
        return made

    def delete_bucket(self, name: bytes) -> None:
        """Raises NoSuchBucket, BucketNotEmpty."""
        self._change(lambda t, changed: buckets.remove(t, name, self._moment(), changed))
        self._session.sync()

    def head_bucket(self, name: bytes) -> Described:
        """Raises NoSuchBucket."""
        return self._session.read(lambda t: buckets.describe(t, name))

    def list_buckets(self) -> list[Described]:
        """All namespaces, in the order of their names."""
        return self._session.read(buckets.list_all)

    def get_setting(self, bucket: bytes, name: str) -> bytes | None:
        """A setting of a bucket (policy, versioning ...) as it was put. Raises NoSuchBucket."""
        return self._session.read(
            lambda t: buckets.get_setting(t, finding.find_bucket(t, bucket), name)
        )

    def get_settings(self, bucket: bytes) -> Mapping[str, bytes]:
        """All settings of a bucket; the same object while they are the same. Raises
        NoSuchBucket."""
        return self._settings.get(
            bucket, lambda t: buckets.settings(t, finding.find_bucket(t, bucket))
        )

    def put_setting(self, bucket: bytes, name: str, value: bytes) -> None:
        """Raises NoSuchBucket. On disk when it returns."""
        self._session.write(
            lambda t: buckets.put_setting(t, finding.find_bucket(t, bucket), name, value)
        )
        self._session.sync()

    def delete_setting(self, bucket: bytes, name: str) -> bool:
        """Whether anything was set. Raises NoSuchBucket."""
        found = self._session.write(
            lambda t: buckets.delete_setting(t, finding.find_bucket(t, bucket), name)
        )
        self._session.sync()
        return found

    # ---- reading

    def find_many(self, bucket: bytes, wanted: Sequence[bytes]) -> list[Facts | None]:
        """The current version of each key, None where there is none. Raises NoSuchBucket,
        Invalid."""
        boot = self._session.boot
        return self._session.read(
            lambda t: finding.find_many(t, finding.find_bucket(t, bucket), wanted, boot)
        )

    def list_objects(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        max_keys: int = 1000,
    ) -> Page:
        """See `listing.list_objects`. Raises NoSuchBucket."""
        return self._session.read(
            lambda t: listing.list_objects(
                t,
                finding.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                max_keys=max_keys,
                boot=self._session.boot,
            )
        )

    def list_versions(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        start_version: str = "",
        max_keys: int = 1000,
    ) -> VersionPage:
        """See `listing.list_versions`. Raises NoSuchBucket."""
        return self._session.read(
            lambda t: listing.list_versions(
                t,
                finding.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                start_version=start_version,
                max_keys=max_keys,
                boot=self._session.boot,
            )
        )

    # ---- putting

    def begin(self, bucket: bytes, key: bytes, size_hint: int) -> Draft:
        """A draft of about so many bytes; nothing is seen of it. Raises NoSuchBucket, Invalid (no
        possible key), NoSpace, ReadOnly, Unavailable, OSError."""
        check_key(key)
        found = self._session.read(lambda t: finding.find_bucket(t, bucket))
        return Draft(self._bodies.begin(found, size_hint), key)

    def begin_now(self, bucket: bytes, key: bytes, size_hint: int) -> Draft | None:
        """As `begin`, for an event loop: it waits neither for the disk nor for the node. None where
        only `begin` can: a large body, or space that must be asked for first."""
        check_key(key)
        found = self._session.read(lambda t: finding.find_bucket(t, bucket))
        body = self._bodies.begin_now(found, size_hint)
        return None if body is None else Draft(body, key)

    def grow(self, draft: Draft, size: int) -> None:
        """Call before more is written than was hinted; seldom does anything. Raises NoSpace,
        Unavailable."""
        if isinstance(draft.body, Body):
            self._bodies.grow(draft.body, size)
        else:
            assert size <= draft.body.size, "the size of a part in its place is known"

    def written(self, draft: Draft, start: int, end: int) -> None:
        """Tell that these bytes of a draft are written, of a long one now and then: what is to be
        on disk at the end is put on its way."""
        if draft.body.bucket.durable:
            start_writing(draft.fd, draft.offset + start, end - start)

    def discard(self, draft: Draft) -> None:
        """Forget a draft; nothing where it was committed. Idempotent."""
        if isinstance(draft.body, Body):
            self._bodies.discard(draft.body)
        else:
            self._slots.discard(draft.body)

    def commit(
        self,
        draft: Draft,
        etag: str,
        metadata: Metadata,
        *,
        versioning: str = "",
        check: Check = anything,
        later: list[Changed] | None = None,
    ) -> Facts:
        """Put the draft under its key, whole or not at all; the draft is spent, also by an error.

        `later`: the node is not told yet; its list is for `finish`, which tells of many commits in
        one round trip, and before which nobody may be told of success.

        Raises what `check` raises, NoSuchBucket, TooLarge, NoSpace, ReadOnly, Unavailable,
        Conflict, OSError.
        """
        assert draft.upload is None, "a part is put with commit_part"
        assert isinstance(draft.body, Body)
        bucket = draft.body.bucket

        def fn(t: Transaction, body: Written, changed: Changed) -> Facts:
            new = New(body, etag, metadata)
            return changing.put(
                t, bucket, draft.key, new, versioning, check, self._moment(), changed
            )

        return self._publish(draft.body, fn, later)

    def finish(self, changed: Sequence[Changed]) -> None:
        """The node's mount has forgotten what these commits replaced when it returns. Raises
        Unavailable."""
        self._finisher.finish(*changed)

    def put_off(self, changed: Sequence[Changed]) -> Sequence[Changed]:
        """As `finish`, but for what it gives back for `tell`: the mount cannot know what the others
        replaced. Never waits."""
        return self._finisher.put_off(changed)

    def tell(self, changed: Sequence[Changed]) -> None:
        """The rest of `finish`, after `put_off`. Raises Unavailable."""
        self._finisher.tell(changed)

    def copy(
        self,
        source: tuple[bytes, bytes, str],
        target: tuple[bytes, bytes],
        *,
        metadata: Metadata | None = None,
        etag: str | None = None,
        versioning: str = "",
        check_source: Check = anything,
        check: Check = anything,
        step: Step = _on,
    ) -> Facts:
        """Copy an object (bucket, key, version) to (bucket, key) without moving its bytes where the
        filesystem can; onto itself in a bucket without versions, only its facts change.

        `metadata` None: the source's, but locks and access list; `etag` None: the source's. `step`
        is called with the bytes copied, every 64 MiB at least; what it raises ends the copy, and
        nothing is left of it. Raises as `open` and `commit`; Conflict when the source was written
        to meanwhile.
        """
        opened = self.open(*source)
        try:
            check_source(opened.facts)
            facts = opened.facts
            kept = facts.metadata if metadata is None else metadata
            if metadata is None:
                kept = {k: v for k, v in kept.items() if k not in _COPIED_ATTRIBUTES}
            if source[:2] == target and facts.latest and not versioning:
                return self._restate(source, facts, kept, check)
            draft = self.begin(*target, facts.size)
            try:
                transfer.copy(opened.fd, draft.fd, step)
                if not opened.is_unchanged():
                    raise Conflict("the source of the copy was written to meanwhile")
                tag = facts.etag if etag is None else etag
                return self.commit(draft, tag, kept, versioning=versioning, check=check)
            finally:
                self.discard(draft)
        finally:
            os.close(opened.fd)

    def update(
        self,
        bucket: bytes,
        key: bytes,
        version: str,
        change: Callable[[Facts], tuple[Metadata, Sequence[str]]],
    ) -> Facts:
        """Change what is said about one version: `change` is given the facts and returns what to
        set and which names to remove. Raises as `find`, and what `change` raises."""

        def fn(t: Transaction) -> Facts:
            author = self._session.author()
            found = finding.find(t, finding.find_bucket(t, bucket), key, version, author.boot)
            metadata, removed = change(found)
            changing.update(t, found, metadata, removed, Moment(author.now, author.boot))
            return found

        found = self._session.write(fn)
        self._sync_if_durable(found.ino)
        return found

    # ---- deleting

    def delete(
        self,
        bucket: bytes,
        key: bytes,
        *,
        version: str = "",
        versioning: str = "",
        check: Check = anything,
        bypass: bool = False,
        later: list[Changed] | None = None,
    ) -> Deleted:
        """Delete the current version, or one for good. `later`: as for `commit`. Raises
        NoSuchBucket, Invalid, Locked, what `check` raises."""
        doomed = [Doomed(key, version, check)]
        (result,) = self.delete_many(
            bucket, doomed, versioning=versioning, bypass=bypass, later=later
        )
        if isinstance(result, KvfsError):
            raise result
        return result

    def delete_many(
        self,
        bucket: bytes,
        doomed: Sequence[Doomed],
        *,
        versioning: str = "",
        bypass: bool = False,
        later: list[Changed] | None = None,
    ) -> list[Deleted | KvfsError]:
        """As `delete` for each, with the error in its place. Raises NoSuchBucket."""
        results: list[Deleted | KvfsError] = []
        durable = False
        for start in range(0, len(doomed), _DELETED_AT_ONCE):
            part = doomed[start : start + _DELETED_AT_ONCE]

            def fn(
                t: Transaction, changed: Changed, part: Sequence[Doomed] = part
            ) -> list[Deleted | KvfsError]:
                nonlocal durable
                found = finding.find_bucket(t, bucket)
                durable = found.durable
                return [self._delete(t, found, each, versioning, bypass, changed) for each in part]

            results += self._change(fn, later)
        if durable:
            self._session.sync()
        return results

    def delete_now(
        self,
        bucket: bytes,
        doomed: Doomed,
        later: list[Changed],
        *,
        versioning: str = "",
        bypass: bool = False,
    ) -> Deleted | None:
        """As `delete`, for an event loop: None, and nothing is done, where that waits for the
        disk."""

        def fn(t: Transaction, changed: Changed) -> Deleted | KvfsError | None:
            found = finding.find_bucket(t, bucket)
            if found.durable:
                return None
            return self._delete(t, found, doomed, versioning, bypass, changed)

        result = self._change(fn, later)
        if isinstance(result, KvfsError):
            raise result
        return result

    # ---- uploads in parts

    def create_upload(self, bucket: bytes, key: bytes, metadata: Metadata) -> Upload:
        """Raises NoSuchBucket, Invalid, TooLarge."""

        def fn(t: Transaction) -> Upload:
            found = finding.find_bucket(t, bucket)
            # The exact clock: ids are in the order of their beginning.
            moment = Moment(time.time_ns(), self._session.boot)
            return uploads.create(t, found, key, metadata, moment)

        upload = self._session.write(fn)
        self._sync_if_durable(upload.directory)
        return upload

    def find_upload(self, bucket: bytes, key: bytes, upload_id: str) -> Upload:
        """Raises NoSuchBucket, NoSuchUpload."""
        return self._session.read(
            lambda t: uploads.find(t, finding.find_bucket(t, bucket), key, upload_id)
        )

    def begin_part(
        self, bucket: bytes, key: bytes, upload_id: str, number: int, size_hint: int
    ) -> Draft:
        """As `begin`, of a part, whose size is as hinted unless that is 0. Raises NoSuchUpload,
        Invalid too."""
        uploads.check_number(number)

        def fn(t: Transaction) -> tuple[Bucket, Upload]:
            found = finding.find_bucket(t, bucket)
            return found, uploads.find(t, found, key, upload_id)

        found, upload = self._session.read(fn)
        slot = self._slots.begin(found, upload, number, size_hint, self._moment())
        body = self._bodies.begin(found, size_hint) if slot is None else slot
        return Draft(body, key, upload, number)

    def commit_part(self, draft: Draft, etag: str, metadata: Metadata) -> Part:
        """As `commit`. Raises NoSuchUpload when the upload has ended meanwhile."""
        upload = draft.upload
        assert upload is not None, "an object is put with commit"
        if isinstance(draft.body, Slot):
            return self._commit_slot(draft.body, upload, draft.part, etag, metadata)
        bucket = draft.body.bucket

        def fn(t: Transaction, body: Written, changed: Changed) -> Part:
            new = New(body, etag, metadata)
            return uploads.put_part(t, bucket, upload, draft.part, new, self._moment(), changed)

        return self._publish(draft.body, fn)

    def copy_part(
        self,
        source: tuple[bytes, bytes, str],
        draft: Draft,
        offset: int,
        size: int,
        *,
        check_source: Check = anything,
        step: Step = _on,
    ) -> Facts:
        """Fill a draft with a range of an object; the facts of the source. `step`: as for `copy`.

        Raises as `open`; Invalid when the range is not within it, Conflict when it was written to
        meanwhile.
        """
        opened = self.open(*source)
        try:
            check_source(opened.facts)
            if not 0 <= offset <= offset + size <= opened.size:
                raise Invalid(f"the source has {opened.size} bytes: the range is not within")
            self.grow(draft, size)
            moving.copy_range(opened.fd, offset, size, draft.fd, draft.offset, step)
            if not opened.is_unchanged():
                raise Conflict("the source of the copy was written to meanwhile")
            return opened.facts
        finally:
            os.close(opened.fd)

    def list_parts(
        self, bucket: bytes, key: bytes, upload_id: str, after: int = 0, limit: int = 1000
    ) -> tuple[Upload, list[Part], bool]:
        """The upload, its parts with numbers above `after`, and whether there are more. Raises
        NoSuchBucket, NoSuchUpload."""

        def fn(t: Transaction) -> tuple[Upload, list[Part], bool]:
            upload = uploads.find(t, finding.find_bucket(t, bucket), key, upload_id)
            return upload, *uploads.list_parts(t, upload, after, limit, self._session.boot)

        return self._session.read(fn)

    def list_uploads(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        start_id: str = "",
        max_uploads: int = 1000,
    ) -> UploadPage:
        """See `uploads.list_all`. Raises NoSuchBucket."""
        return self._session.read(
            lambda t: uploads.list_all(
                t,
                finding.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                start_id=start_id,
                max_uploads=max_uploads,
            )
        )

    def abort_upload(self, bucket: bytes, key: bytes, upload_id: str) -> None:
        """Raises NoSuchBucket, NoSuchUpload."""

        def fn(t: Transaction, changed: Changed) -> None:
            found = finding.find_bucket(t, bucket)
            uploads.abort(t, found, key, upload_id, self._moment(), changed)

        self._change(fn)

    def completed_upload(self, bucket: bytes, key: bytes, upload_id: str) -> tuple[str, str] | None:
        """(ETag, version) that completing this upload gave within the last hour. Raises
        NoSuchBucket."""
        return self._session.read(
            lambda t: uploads.completed(t, finding.find_bucket(t, bucket), key, upload_id)
        )

    def choose_parts(
        self, bucket: bytes, key: bytes, upload_id: str, wanted: Sequence[Wanted]
    ) -> tuple[Upload, list[Part]]:
        """What `complete_upload` is to put together. Raises NoSuchBucket, NoSuchUpload, Invalid,
        PartOrder, InvalidPart, PartTooSmall."""

        def fn(t: Transaction) -> tuple[Upload, list[Part]]:
            upload = uploads.find(t, finding.find_bucket(t, bucket), key, upload_id)
            return upload, uploads.choose_parts(t, upload, wanted, self._session.boot)

        return self._session.read(fn)

    def complete_upload(
        self,
        bucket: bytes,
        upload: Upload,
        parts: Sequence[Part],
        etag: str,
        metadata: Metadata,
        *,
        versioning: str = "",
        check: Check = anything,
        step: Step = _on,
    ) -> Facts:
        """Put an object together from chosen parts, and end the upload. `step`: as for `copy`,
        where bytes are copied; what it raises leaves the upload as it was. Raises as `commit`,
        NoSuchUpload and InvalidPart (the upload or a part was changed meanwhile)."""
        found = self._session.read(lambda t: finding.find_bucket(t, bucket))

        def fn(t: Transaction, body: Written, changed: Changed, *, released: bool = False) -> Facts:
            moment = self._moment()
            uploads.check_unchanged(t, found, upload, parts, moment.boot)
            if released:
                assembly.release(t, upload.directory, body.ino)
            new = New(body, etag, metadata)
            result = changing.put(t, found, upload.key, new, versioning, check, moment, changed)
            uploads.complete(t, found, upload, result, moment, changed)
            return result

        with self._slots.joined(found, upload, parts, self._session.boot, step) as written:
            if written is not None:
                return self._change_synced(
                    found, lambda t, changed: fn(t, written, changed, released=True)
                )
        body = self._bodies.begin(found, sum(part.size for part in parts))
        try:
            at = 0
            for part in parts:
                self._slots.copy(part, body.fd, at, step)
                at += part.size
        except BaseException:
            self._bodies.discard(body)
            raise
        return self._publish(body, fn)

    # ---- how it is done

    def _commit_slot(
        self, slot: Slot, upload: Upload, number: int, etag: str, metadata: Metadata
    ) -> Part:
        self._slots.sync(slot)

        def fn(t: Transaction, changed: Changed) -> Part:
            return uploads.put_part_in_place(
                t,
                slot.bucket,
                upload,
                number,
                slot.place,
                slot.size,
                etag,
                metadata,
                self._moment(),
                changed,
                synced=slot.bucket.durable,
            )

        part = self._change_synced(slot.bucket, fn)
        slot.close()
        return part

    def _change_synced(self, bucket: Bucket, fn: Callable[[Transaction, Changed], T]) -> T:
        """`_change`, and of a durable bucket on disk before anybody is told."""
        later: list[Changed] = []
        result = self._change(fn, later)
        if bucket.durable:
            self._session.sync()
        self.finish(later)
        return result

    def _publish(
        self,
        body: Body,
        fn: Callable[[Transaction, Written, Changed], T],
        later: list[Changed] | None = None,
    ) -> T:
        try:
            self._bodies.sync(body)
            result, changed = self._place(body, fn)
        except BaseException:
            self._bodies.discard(body)
            raise
        self._bodies.close(body)
        body.ino = 0
        if body.bucket.durable:
            self._session.sync()
        if later is None:
            self._finisher.finish(changed)
        else:
            later.append(changed)
        return result

    def _place(
        self, body: Body, fn: Callable[[Transaction, Written, Changed], T]
    ) -> tuple[T, Changed]:
        for _ in range(_ATTEMPTS):
            written = self._bodies.written(body)

            def step(t: Transaction, written: Written = written) -> tuple[T, Changed]:
                changed = Changed()
                self._finisher.clear(t)
                result = fn(t, written, changed)
                self._finisher.post(t, changed, session.now_ns())
                return result, changed

            try:
                return self._session.write(step)
            except Dropped:
                self._bodies.rescue(body)
        raise Conflict("starting nodes dropped the new file again and again: try once more")

    def _change(
        self, fn: Callable[[Transaction, Changed], T], later: list[Changed] | None = None
    ) -> T:
        def step(t: Transaction) -> tuple[T, Changed]:
            changed = Changed()
            self._finisher.clear(t)
            result = fn(t, changed)
            if changed.changes:
                self._finisher.post(t, changed, session.now_ns())
            return result, changed

        result, changed = self._session.write(step)
        if changed.changes and later is None:
            self._finisher.finish(changed)
        elif changed.changes and later is not None:
            later.append(changed)
        return result

    def _delete(
        self,
        t: Transaction,
        bucket: Bucket,
        doomed: Doomed,
        versioning: str,
        bypass: bool,
        changed: Changed,
    ) -> Deleted | KvfsError:
        moment, key = self._moment(), doomed.key
        try:
            if doomed.version:
                return changing.delete_version(
                    t, bucket, key, doomed.version, doomed.check, moment, changed, bypass=bypass
                )
            return changing.delete(t, bucket, key, versioning, doomed.check, moment, changed)
        except KvfsError as error:
            return error

    def _restate(
        self,
        source: tuple[bytes, bytes, str],
        facts: Facts,
        metadata: Metadata,
        check: Check,
    ) -> Facts:
        def fn(t: Transaction, changed: Changed) -> Facts:
            author = self._session.author()
            bucket, key, version = source
            found = finding.find(t, finding.find_bucket(t, bucket), key, version, author.boot)
            check(found)
            if found.ino != facts.ino:
                raise NoSuchKey("the object was replaced while it was copied onto itself")
            moment = Moment(time.time_ns(), author.boot)
            return changing.restate(t, found, metadata, moment, changed)

        result = self._change(fn)
        times = (result.inode.atime_ns, result.inode.mtime_ns)
        os.utime(self._session.files.path(result.ino, result.inode.version), ns=times)
        self._sync_if_durable(result.ino)
        return result

    def _sync_if_durable(self, ino: int) -> None:
        if self._session.read(lambda t: finding.bucket_of(t, ino >> 48)).durable:
            self._session.sync()

    def _moment(self) -> Moment:
        return Moment(session.now_ns(), self._session.boot)
