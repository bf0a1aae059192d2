"""CopyObject, and the sources of copies: the caller must be allowed to read them. The kernel copies
the bytes, or shares them where the filesystem can."""

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from kvfs.base.errors import Conflict
from kvfs.http.api import Response
from kvfs.objects.object_errors import MarkedDeleted, NoSuchKey, NoSuchVersion
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import marked_deleted
from s3api.auth.authorization import Access
from s3api.http.buffer_pool import BUFFER_BYTES
from s3api.http.outcome import AccessLogEntry
from s3api.http.request_context import Call, Handler, moment, target
from s3api.http.s3_errors import S3Error
from s3api.operations.acls import acl_of_new
from s3api.operations.answers import checksum_members, metadata_of
from s3api.operations.long_running import WorkPace, answer_lasting
from s3api.operations.object.object_version import (
    check_version_id,
    expiration,
    search,
    version_id,
)
from s3api.operations.object.put_object import PUT_LIMIT_BYTES, check_of, tags_of_new
from s3api.operations.object.version_settings import lock_of_new
from s3api.rules import checksums, etag, metadata
from s3api.rules.access import actions
from s3api.rules.checksums import ALGORITHMS, FULL_OBJECT, Hasher
from s3api.rules.conditions import WRITE_CONDITIONS, Conditions, check_copy_source
from s3api.rules.copy_source import parse_copy_source

T = TypeVar("T")
_READ: Final = {"CopyObject": "REST.COPY.OBJECT_GET", "UploadPartCopy": "REST.COPY.PART_GET"}
_READS: Final = "GetObject"
_ATTEMPTS: Final = 3


class Source:
    """An object that a call copies from, allowed to be read, its conditions met.

    `triple` names it for the store. The store may later open another object: `check` compares that
    with this."""

    def __init__(self, call: Call) -> None:
        """Raises S3Error, NoSuchBucket."""
        reading = _reading(call)
        self.triple = reading.raw_bucket, reading.raw_key, reading.version
        self._conditions = Conditions.of(call.params, "CopySource")
        expected = call.params.get("ExpectedSourceBucketOwner")
        if expected is not None and expected != reading.owner:
            raise S3Error("AccessDenied")
        self.settings = reading.settings
        self._reading, self._access = reading, call.service.access
        self.facts = self._find(reading, self._access)
        call.entries = self._entries

    def check(self, found: Facts | None) -> None:
        """Raises PreconditionFailed, and Conflict if it is another one than was allowed to be
        read."""
        self._check_conditions(found)
        if found is None or (found.ino, found.etag) != (self.facts.ino, self.facts.etag):
            raise Conflict("the source of the copy was replaced meanwhile")

    def require_tags(self) -> None:
        """Raises AccessDenied unless the caller may read the tags too."""
        action = actions.needed_for_tags(self._reading.version or None)
        self._access.require(self._reading, (action,), self.facts)

    def _entries(self) -> list[AccessLogEntry]:
        """Returns the entry in the log of the source's own bucket: it was read."""
        operation = _READ.get(self._reading.operation, "")
        named = self._reading
        version = version_id(named, self.facts) or ""
        size = self.facts.size
        return [AccessLogEntry(operation, named.bucket, named.owner, named.key, version, size=size)]

    def _check_conditions(self, found: Facts | None) -> None:
        if found is not None and self._conditions:
            check_copy_source(self._conditions, target(found))

    def _find(self, reading: Call, access: Access) -> Facts:
        action = actions.needed_of_source(reading.version or None)
        try:
            found = reading.store.find(*self.triple)
        except NoSuchVersion as error:
            reading.store.misses.found_nothing(error)
            access.require(reading, (action,))
            raise
        except NoSuchKey as error:
            reading.store.misses.found_nothing(error)
            access.require(reading, (action,))
            if isinstance(error, MarkedDeleted) or access.allows(reading, "s3:ListBucket"):
                raise S3Error("NoSuchKey", extra={"Key": reading.key}) from None
            raise S3Error("AccessDenied") from None
        access.require(reading, (action,), None if found.delete_marker else found)
        if found.delete_marker and reading.version:
            raise S3Error(
                "InvalidRequest",
                "The source of a copy request may not specifically refer to a delete marker by"
                " version id.",
            )
        if found.delete_marker:
            reading.store.misses.found_nothing(marked_deleted(found))
            raise S3Error("NoSuchKey", extra={"Key": reading.key})
        try:
            self._check_conditions(found)
        except S3Error:
            reading.store.misses.count("other_version")
            raise
        return found


def _reading(call: Call) -> Call:
    """Returns the call that would read the source. Raises S3Error."""
    named = parse_copy_source(call.params["CopySource"])
    check_version_id(named.version or None)
    return msgspec.structs.replace(
        call,
        bucket=named.bucket,
        key=named.key,
        query={"versionId": named.version} if named.version else {},
        params={"VersionId": named.version} if named.version else {},
        _settings=None,
    )


async def search_source(call: Call) -> None:
    """Makes the metadata of a copy's source as fresh as they must be, and has it taken over from
    another node that holds it, if the caller may read what is there. Raises S3Error, NoSuchBucket,
    Unavailable."""
    reading = _reading(call)
    if reading.bucket != call.bucket:
        await call.service.freshness.before(
            reading.raw_bucket, _READS, partial(_may_follow, reading)
        )
        call.look_again()
        reading = _reading(call)
    action = actions.needed_of_source(reading.version or None)
    if call.service.access.allows(reading, action, reading.key):
        await search(reading, [reading.key])


def _may_follow(reading: Call) -> bool:
    reading.service.access.refuse_excluded(reading)
    return True


def copied(call: Call, look: Callable[[Call], Source], copy: Callable[[Source], T]) -> T:
    """Returns the result of `copy` for the source as it is at one moment. `look` finds the source
    and asks for permission, again after a wait for a thread; a source that is written to meanwhile
    is looked for anew. Raises Conflict if it always is. Blocking."""
    for attempt in range(_ATTEMPTS):
        call.look_again()
        try:
            return copy(look(call))
        except Conflict:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


_REPLACE: Final = "REPLACE"
_CHANGES: Final = ("StorageClass", "WebsiteRedirectLocation", "ChecksumAlgorithm")
"""Parameters that give a reason to copy an object onto itself."""
_REDIRECT: Final = "website-redirect-location"
"""The one of the source's headers that no copy takes over."""


async def copy_object(call: Call) -> Response:
    """Copies the source as it was at one moment; if it is written to meanwhile, the copy begins
    anew, and at last fails with OperationAborted."""
    call.service.access.require(call, actions.needed(call.operation, call.params))
    await search_source(call)
    if not WRITE_CONDITIONS.isdisjoint(call.params):
        await search(call, [call.key])
    size = _source(call).facts.size
    return await answer_lasting(call, partial(_copied, call), size)


def _source(call: Call) -> Source:
    """Returns the source as it is now. Raises S3Error if it may not or cannot be copied there."""
    call.service.access.require(call, actions.needed(call.operation, call.params))
    source = Source(call)
    _check_itself(call, source)
    if source.facts.size > PUT_LIMIT_BYTES:
        raise S3Error(
            "InvalidRequest",
            "The specified copy source is larger than the maximum allowable size for a copy"
            f" source: {PUT_LIMIT_BYTES}",
        )
    if call.params.get("TaggingDirective") != _REPLACE and source.facts.metadata.get("tagging"):
        source.require_tags()
        call.service.access.require(call, (actions.PUT_TAGS,))
    return source


def _copied(call: Call, pace: WorkPace) -> dict[str, Any]:
    """Returns the members of the answer. Blocking."""

    def copy(source: Source) -> dict[str, Any]:
        pace.begin(source.facts.size)
        return _result(call, source, _copy(call, source, _said(call, source.facts), pace))

    return copied(call, _source, copy)


def _check_itself(call: Call, source: Source) -> None:
    """Checks that a copy of an object onto itself changes something."""
    bucket, key, version = source.triple
    if (bucket, key) != (call.raw_bucket, call.raw_key) or version:
        return
    replaces = call.params.get("MetadataDirective") == _REPLACE
    if not replaces and not any(name in call.params for name in _CHANGES):
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without"
            " changing the object's metadata, storage class, website redirect location or"
            " encryption attributes.",
        )


def _said(call: Call, source: Facts) -> dict[str, str]:
    """Returns the metadata that are kept with the copy, except its checksum. Raises S3Error."""
    said = metadata_of(call)
    if call.params.get("MetadataDirective") != _REPLACE:
        said = {name: value for name, value in said.items() if name == _REDIRECT} | {
            name: value
            for name, value in source.metadata.items()
            if metadata.is_metadata(f"user.s3.{name}".encode()) and name != _REDIRECT
        }
    if call.params.get("TaggingDirective") == _REPLACE:
        said |= tags_of_new(call)
    elif tags := source.metadata.get("tagging"):
        said["tagging"] = tags
    return said | lock_of_new(call) | acl_of_new(call)


def _copy(call: Call, source: Source, said: dict[str, str], pace: WorkPace) -> Facts:
    """Copies. Raises Conflict if the source is another one than was checked. Blocking."""
    checksum, tag = _digests(call, source, pace)
    return call.store.copy(
        source.triple,
        (call.raw_bucket, call.raw_key),
        metadata=said | checksum,
        etag=tag,
        versioning=call.settings.versioning,
        check_source=source.check,
        check=check_of(Conditions.of(call.params)),
        step=pace.step,
    )


def _digests(call: Call, source: Source, pace: WorkPace) -> tuple[dict[str, str], str]:
    """Returns the copy's checksum as it is kept, and its ETag. The checksum is the source's,
    computed anew if another algorithm is asked for, or if the source's is one of parts, which a
    copy does not have; the ETag is computed if the source's is no MD5."""
    kept, tag = source.facts.metadata, source.facts.etag
    asked = call.params.get("ChecksumAlgorithm")
    there = [each for each in ALGORITHMS.values() if each.kept_as in kept]
    algorithm, said, hashers = None, dict[str, str](), list[Hasher]()
    if asked is not None or there:
        algorithm = checksums.algorithm(asked) if asked is not None else there[0]
        name = algorithm.kept_as
        if name in kept and kept.get("checksum.type") == FULL_OBJECT:
            said = {name: kept[name], "checksum.type": FULL_OBJECT}
        else:
            hashers.append(algorithm.new())
    if not (etag.is_md5(tag) or call.store.buckets.has_fast_etags(call.raw_bucket)):
        hashers.append(hashlib.md5(usedforsecurity=False))
        tag = ""
    if hashers:
        _read(call, source, hashers, pace)
    if algorithm is not None and not said:
        value = checksums.encode(hashers[0].digest())
        said = {algorithm.kept_as: value, "checksum.type": FULL_OBJECT}
    return said, tag or hashers[-1].digest().hex()


def _read(call: Call, source: Source, hashers: Sequence[Hasher], pace: WorkPace) -> None:
    """Reads the source. Raises Conflict if it is written to meanwhile. Blocking."""
    opened = call.store.open(*source.triple)
    try:
        at = 0
        with call.service.buffers.lent() as buffer:
            while count := os.preadv(opened.fd, [buffer[:BUFFER_BYTES]], at):
                for hasher in hashers:
                    hasher.update(buffer[:count])
                at += count
                pace.step(at)
        if not opened.is_unchanged():
            raise Conflict("the source of the copy was written to meanwhile")
    finally:
        os.close(opened.fd)


def _result(call: Call, source: Source, facts: Facts) -> dict[str, Any]:
    told = {"ETag": f'"{facts.etag}"', "LastModified": moment(facts.mtime_ns)}
    result: dict[str, Any] = {
        "CopyObjectResult": told | checksum_members(facts.metadata),
        "VersionId": version_id(call, facts),
        "Expiration": expiration(call, facts),
    }
    if source.settings.versioning:
        result["CopySourceVersionId"] = source.facts.version
    return result


HANDLERS: Final[dict[str, Handler]] = {"CopyObject": copy_object}
