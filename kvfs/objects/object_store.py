"""The objects of one store: the interface of the S3 front door.

Every method is blocking and may be called from any thread. A change survives SIGKILL once its
method has returned, and in a durable bucket power loss; the node's mount has forgotten the earlier
state, unless Unavailable says that it did not answer in time (the change is committed then).
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvfs.base.clock import file_time_ns
from kvfs.base.errors import Conflict, KvfsError
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects import listing, lookup, mutations
from kvfs.objects.bucket_store import Buckets
from kvfs.objects.listing import ListingPage, VersionPage
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart.part_slots import Slots
from kvfs.objects.multipart.upload_store import Uploads
from kvfs.objects.mutations import Check, Deleted, Moment, New, anything
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_drafts import ObjectDraft, ObjectDrafts
from kvfs.objects.object_errors import NoSuchKey
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import ObjectOpener
from kvfs.objects.publish import Publisher
from kvfs.objects.seals import Seals
from kvfs.objects.store_cache import StoreCache
from kvfs.session import byte_transfer, session
from kvfs.session.byte_transfer import Step, go_on
from kvfs.tree import lifecycle
from kvfs.vfs.miss_counters import Misses
from kvfs.vfs.names.name_search import LOOKS, NameSearch
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.post_commit import Changed, Finisher
from kvfs.vfs.space_reservation import SpaceReservation
from kvfs.vfs.stage import Draft, Drafts
from kvfs.vfs.stage_records import WrittenData
from kvfs.vfs.touches import Touches

_DELETED_AT_ONCE: Final = 256
_KEPT_METADATA: Final = 4096
"""Characters of metadata beyond which an object is found anew each time."""
_OWN: Final = frozenset(("retention", "legal-hold", "acl", "owner", "parts", "part-checksums"))
"""Attributes of an object alone, and not of its copies; long ones continue in `parts.1` ..."""


class Doomed(msgspec.Struct, frozen=True):
    """An object or a version that is to be deleted."""

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
        self._node = NodeClient(opened.store.socket)
        self._finisher = Finisher(opened, self._node)
        self._touches = Touches(opened, self._node)
        room = SpaceReservation(opened.files.root, self._node, self._finisher.flush)
        self._stage = Drafts(opened, room, self._finisher)
        self._publisher = Publisher(opened, self._finisher, self._stage)
        self.cache = StoreCache(opened, keeps=_is_kept)
        """Cached reads of the store; a front door keeps its own reads there too."""
        opener = ObjectOpener(opened, self._touches, self._node, self.cache)
        self.seals = Seals(opened, self._node)
        slots = Slots(opened, self._stage)
        drafts = ObjectDrafts(opened, self._stage, slots)
        self.buckets = Buckets(opened, self._publisher)
        self.uploads = Uploads(
            opened, self._stage, slots, drafts, opener, self._publisher, self._node
        )
        self.begin = drafts.begin
        self.begin_now = drafts.begin_now
        self.grow = drafts.grow
        self.written = drafts.written
        self.discard = drafts.discard
        self.finish = self._finisher.finish
        self.put_off = self._finisher.put_off
        self.tell = self._finisher.tell
        self.tell_in_loop = self._finisher.tell_in_loop
        self.expire = self._node.expire
        self.find = opener.find
        self.open = opener.open
        self.open_here = opener.open_here
        self.open_coming = opener.open_coming
        self.reopen = opener.reopen
        self.wanted = opener.wanted
        self.current = opener.current
        self.misses = Misses(opened.gone)
        self.names = NameSearch(opened, self._node)
        opened.files.keep_spares()

    def close(self) -> None:
        """Lets go of the store."""
        self._stage.give_back()
        self._touches.flush()
        self._finisher.close()
        self._node.close()
        session.release(self._session)

    @property
    def session(self) -> session.Session:
        """The session, for other records in the same engine."""
        return self._session

    @property
    def is_shared(self) -> bool:
        """Whether it belongs to a node of a cluster: commits wait for another host."""
        return self._session.replica is not None

    # ---- reading

    def find_many(self, bucket: bytes, wanted: Sequence[bytes]) -> list[Facts | None]:
        """Returns the current version of each key, None if there is none. Raises NoSuchBucket,
        Invalid."""
        boot = self._session.boot
        return self._session.read(
            lambda t: lookup.find_many(t, lookup.find_bucket(t, bucket), wanted, boot)
        )

    def search(self, bucket: bytes, wanted: Sequence[bytes]) -> None:
        """Has those of these keys taken over that other nodes have and this one not, in a bucket
        whose names are each node's own. Blocking. Raises NoSuchBucket, Invalid."""
        boot = self._session.boot
        for _ in range(LOOKS):
            missing = self._session.read(
                lambda t: lookup.missing_entries(t, lookup.find_bucket(t, bucket), wanted, boot)
            )
            if not missing or not self.names.find(dict.fromkeys(missing)):
                return

    def list_objects(
        self,
        bucket: bytes,
        *,
        prefix: bytes = b"",
        delimiter: bytes = b"",
        start_after: bytes = b"",
        max_keys: int = 1000,
    ) -> ListingPage:
        """See `listing.list_objects`. Raises NoSuchBucket."""
        return self.names.listed(
            lambda t: listing.list_objects(
                t,
                lookup.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                max_keys=max_keys,
                boot=self._session.boot,
            ),
            of=lambda t: lookup.find_bucket(t, bucket).id,
            detail="records",
            limit=max_keys + 1,
            is_deep=True,
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
        """See `listing.list_versions`. Where names are each node's own, the versions that are not
        current are those of this node. Raises NoSuchBucket."""
        return self.names.listed(
            lambda t: listing.list_versions(
                t,
                lookup.find_bucket(t, bucket),
                prefix=prefix,
                delimiter=delimiter,
                start_after=start_after,
                start_version=start_version,
                max_keys=max_keys,
                boot=self._session.boot,
            ),
            of=lambda t: lookup.find_bucket(t, bucket).id,
            detail="attributes",
            limit=max_keys + 1,
            is_deep=True,
        )

    # ---- putting

    def commit(
        self,
        draft: ObjectDraft,
        etag: str,
        metadata: Metadata,
        *,
        versioning: str = "",
        check: Check = anything,
        later: list[Changed] | None = None,
    ) -> Facts:
        """Puts the draft under its key, whole or not at all; the draft is spent, even after an
        error.

        `later`: the node is not told yet; its list is for `finish`, which tells of many commits in
        one round trip, and before which no caller may be told of success.

        Raises what `check` raises, NoSuchBucket, TooLarge, NoSpace, ReadOnly, Unavailable,
        Conflict, OSError.
        """
        assert draft.upload is None, "a part is put with commit_part"
        assert isinstance(draft.body, Draft)
        bucket = draft.bucket

        def put(bodies: Sequence[WrittenData], t: Transaction, changed: Changed) -> Facts:
            new = New(bodies[0], etag, metadata)
            moment = Moment(file_time_ns(), self._session.boot)
            return mutations.put(t, bucket, draft.key, new, versioning, check, moment, changed)

        if not versioning:  # no order of versions to keep
            return self._stage.publish([draft.body], put, later)
        return self._publisher.publish(
            draft.body, lambda t, body, changed: put([body], t, changed), later
        )

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
        step: Step = go_on,
    ) -> Facts:
        """Copies an object (bucket, key, version) to (bucket, key) without moving its bytes if the
        filesystem can; onto itself in a bucket without versions, only its facts change.

        `metadata` None: the source's, except locks and access list; `etag` None: the source's.
        `step` is called with the bytes copied, every 64 MiB at least; an exception of it ends the
        copy, and nothing is left of it. Raises what `open` and `commit` raise; Conflict when the
        source was written to meanwhile.
        """
        opened = self.open(*source)
        try:
            check_source(opened.facts)
            facts = opened.facts
            kept = facts.metadata if metadata is None else metadata
            if metadata is None:
                kept = {k: v for k, v in kept.items() if k.partition(".")[0] not in _OWN}
            if source[:2] == target and facts.latest and not versioning:
                return self._restate(source, facts, kept, etag or facts.etag, check)
            draft = self.begin(*target, facts.size)
            try:
                byte_transfer.copy(opened.fd, draft.fd, step)
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
        """Changes the metadata of one version: `change` is given the facts and returns the
        attributes to set and the names to remove. Raises what `find` and `change` raise."""

        def fn(t: Transaction, changed: Changed) -> Facts:
            moment = self._publisher.moment()
            found = lookup.find(t, lookup.find_bucket(t, bucket), key, version, moment.boot)
            metadata, removed = change(found)
            mutations.update(t, found, metadata, removed, moment, changed)
            return found

        found = self._publisher.change(fn)
        self._publisher.sync_if_durable(found.ino)
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
        """Deletes the current version, or one for good. `later`: as for `commit`. Raises
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
        expired: bool = False,
        later: list[Changed] | None = None,
    ) -> list[Deleted | KvfsError]:
        """Like `delete` for each, with the error in its place. `expired`: callers that look for
        them are told that they expired. Raises NoSuchBucket."""
        results: list[Deleted | KvfsError] = []
        durable = False
        for start in range(0, len(doomed), _DELETED_AT_ONCE):
            part = doomed[start : start + _DELETED_AT_ONCE]

            def fn(
                t: Transaction, changed: Changed, part: Sequence[Doomed] = part
            ) -> list[Deleted | KvfsError]:
                nonlocal durable
                found = lookup.find_bucket(t, bucket)
                durable = found.durable
                deleted = [
                    self._delete(t, found, each, versioning, bypass, changed) for each in part
                ]
                if expired:  # before the commit: nobody misses them earlier
                    self._session.gone.add(_entries_of(found, part, changed), "expired")
                    for ino, inode in changed.orphans:
                        lifecycle.lose(t, ino, inode, "expired")
                return deleted

            results += self._publisher.change(fn, later)
        if durable:
            self._session.sync()
        return results

    def delete_now(
        self,
        bucket: Bucket,
        doomed: Doomed,
        later: list[Changed],
        *,
        versioning: str = "",
        bypass: bool = False,
    ) -> Deleted | None:
        """Like `delete`, for an event loop: None, and nothing is done, if that waits for the disk,
        or for another host. `bucket` is as the request found it."""
        if bucket.durable or self._session.replica is not None:
            return None

        def fn(t: Transaction, changed: Changed) -> Deleted | KvfsError:
            return self._delete(t, bucket, doomed, versioning, bypass, changed)

        result = self._publisher.change(fn, later)
        if isinstance(result, KvfsError):
            raise result
        return result

    # ---- how it is done

    def _delete(
        self,
        t: Transaction,
        bucket: Bucket,
        doomed: Doomed,
        versioning: str,
        bypass: bool,
        changed: Changed,
    ) -> Deleted | KvfsError:
        moment = Moment(file_time_ns(), self._session.boot)
        key = doomed.key
        try:
            if doomed.version:
                return mutations.delete_version(
                    t, bucket, key, doomed.version, doomed.check, moment, changed, bypass=bypass
                )
            return mutations.delete(t, bucket, key, versioning, doomed.check, moment, changed)
        except KvfsError as error:
            return error

    def _restate(
        self,
        source: tuple[bytes, bytes, str],
        facts: Facts,
        metadata: Metadata,
        etag: str,
        check: Check,
    ) -> Facts:
        def fn(t: Transaction, changed: Changed) -> Facts:
            author = self._session.author()
            bucket, key, version = source
            found = lookup.find(t, lookup.find_bucket(t, bucket), key, version, author.boot)
            check(found)
            if found.ino != facts.ino:
                raise NoSuchKey("the object was replaced while it was copied onto itself")
            moment = Moment(time.time_ns(), author.boot)
            restated = mutations.restate(
                t, msgspec.structs.replace(found, etag=etag), metadata, moment, changed
            )
            # Before anybody sees the record: who seals would take the file's own time for newer.
            times = (restated.inode.atime_ns, restated.inode.mtime_ns)
            path = self._session.files.path(restated.ino, restated.inode.version)
            os.utime(path, ns=times, follow_symlinks=False)
            return restated

        result = self._publisher.change(fn)
        self._publisher.sync_if_durable(result.ino)
        return result


def _is_kept(value: object) -> bool:
    """Returns whether the cache keeps it: no absent objects, nor objects of long metadata."""
    if isinstance(value, Facts):
        return not value.metadata or sum(map(len, value.metadata.values())) <= _KEPT_METADATA
    return value is not None


def _entries_of(bucket: Bucket, doomed: Sequence[Doomed], changed: Changed) -> list[bytes]:
    """Returns the entries by which deleted objects are known: the names that changed, directories
    that went with them too, and versions."""
    names = [keys.file_entry(each.parent, each.name) for each in changed.changes]
    versions = [
        lookup.version_entry(bucket, each.key, each.version) for each in doomed if each.version
    ]
    return names + versions
