"""The version of an object that a request names, or S3's refusal if it does not exist."""

import functools
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeVar

import trio

from kvfs.base.errors import Busy
from kvfs.meta.records import Flag
from kvfs.objects import versions
from kvfs.objects.object_errors import MarkedDeleted, NoSuchKey, NoSuchVersion, NotHere
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import OpenedObject, marked_deleted
from kvfs.objects.store_cache import NOW
from s3api.http.request_context import Call, moment
from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model.time_formats import http_date
from s3api.rules import lifecycle
from s3api.rules.tagging import parse_kept
from s3api.storage.bucket_settings import LIFECYCLE

T = TypeVar("T")
_DELETE_MARKER: Final = {"x-amz-delete-marker": "true"}
_THREADS: Final = 64
"""Threads that wait for other nodes, in each worker."""
_WAITS: Final = 16
"""Threads that wait for seals."""
_NO_MARKER: Final = {"x-amz-delete-marker": "false"}
"""A header that S3 leaves out and Ceph's gateway sends."""


@functools.cache
def _bringings() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(_THREADS)


@functools.cache
def _waits() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(_WAITS)


def find(call: Call) -> Facts:
    """Returns an object as it is now. Raises S3Error: NoSuchKey, NoSuchVersion, MethodNotAllowed
    for a delete marker, AccessDenied for a missing key if the caller may not list the bucket."""
    try:
        facts = call.store.find(call.raw_bucket, call.raw_key, call.version, call.generation)
    except NoSuchVersion as error:
        raise _no_such_version(call, error) from None
    except NoSuchKey as error:
        raise _absent(call, error) from None
    if facts.delete_marker:
        raise marked(call, facts)
    return facts


async def find_to_tell(call: Call) -> Facts:
    """Like `find`, with an ETag that stays."""
    facts = find(call)
    if not call.store.seals.is_awaited(call.raw_bucket, facts):
        return facts
    call.generation = NOW  # it is sealed meanwhile
    return await settled(call, lambda: find(call), partial(_awaited, call))


async def settled(
    call: Call, look: Callable[[], T], awaited: Callable[[T], Mapping[int, str]]
) -> T:
    """Does what `Seals.settled` describes."""
    step = partial(call.store.seals.settled, look, awaited)
    return await trio.to_thread.run_sync(step, limiter=_waits())


def _awaited(call: Call, facts: Facts) -> Mapping[int, str]:
    if not call.store.seals.is_awaited(call.raw_bucket, facts):
        return {}
    return {facts.ino: facts.etag}


async def open_for_reading(call: Call) -> OpenedObject:
    """Like `find`, with an ETag that stays and a descriptor that the caller closes. Data on other
    nodes are fetched: small objects first, large ones as they are read."""
    opened = await _open(call)
    if opened.facts.inode.flags & Flag.SEALED:
        return opened
    told, bucket, seals = "", call.bucket.encode(), call.service.store.seals
    while opened.facts.etag != told and seals.is_awaited(bucket, opened.facts):
        os.close(opened.fd)
        told = (await find_to_tell(call)).etag
        opened = await _open(call)
    return opened


async def _open(call: Call) -> OpenedObject:
    try:
        return open_here(call)
    except NotHere:
        call.generation = NOW  # what follows takes long
        return await trio.to_thread.run_sync(_open_coming, call, limiter=_bringings())


def _open_coming(call: Call) -> OpenedObject:
    try:
        return call.store.open_coming(call.raw_bucket, call.raw_key, call.version)
    except (NoSuchKey, NoSuchVersion) as error:
        raise _refusal(call, error) from None
    except Busy:  # clients ask again by themselves
        raise S3Error("ServiceUnavailable") from None


def open_here(call: Call) -> OpenedObject:
    """Like `open_for_reading`, for objects on this host. Also raises NotHere."""
    version = call.params.get("VersionId") or ""
    try:
        return call.service.store.open_here(
            call.bucket.encode(), call.key.encode(), version, call.generation
        )
    except (NoSuchKey, NoSuchVersion) as error:
        raise _refusal(call, error) from None


def _refusal(call: Call, error: NoSuchKey | NoSuchVersion) -> Exception:
    if isinstance(error, NoSuchVersion):
        return _no_such_version(call, error)
    if isinstance(error, MarkedDeleted):
        find(call)
        return error
    return _absent(call, error)


def marked(call: Call, facts: Facts) -> S3Error:
    """Returns the answer to a request for a delete marker: by its id it can be deleted, and no
    more."""
    told = _DELETE_MARKER | {"x-amz-version-id": facts.version}
    if not call.version:
        call.store.misses.found_nothing(marked_deleted(facts))
        if not call.service.access.allows(call, "s3:ListBucket"):
            return S3Error("AccessDenied")
        return S3Error("NoSuchKey", extra={"Key": call.key}, headers=told)
    told |= {"allow": "DELETE", "last-modified": http_date(moment(facts.mtime_ns))}
    extra = {"Method": call.head.method, "ResourceType": "DeleteMarker"}
    return S3Error("MethodNotAllowed", extra=extra, headers=told)


def check_version_id(version: str | None) -> None:
    """Raises InvalidArgument for a text that cannot be the id of a version."""
    if version is None or version == versions.NULL:
        return
    if not version:
        raise invalid_argument("versionId", version, "Version id cannot be the empty string")
    if not versions.is_valid(version.encode(errors="replace")):
        raise invalid_argument("versionId", version, "Invalid version id specified")


def version_id(call: Call, facts: Facts) -> str | None:
    """Returns the version id that an answer tells: none in a bucket that never kept versions."""
    if call.settings.versioning or facts.version != versions.NULL:
        return facts.version
    return None


def expiration(call: Call, facts: Facts) -> str | None:
    """Returns when a rule of the bucket's lifecycle ends the object, in the form of
    `x-amz-expiration`."""
    rules = call.settings.get(LIFECYCLE)
    return None if rules is None else lifecycle.expiration_header(rules, version_of(facts))


def version_of(facts: Facts) -> lifecycle.Version:
    """Returns the version that lifecycle rules are applied to."""
    return lifecycle.Version(
        key=facts.key.decode(),
        size=facts.size,
        tags=parse_kept(facts.metadata.get("tagging", "")),
        modified=moment(facts.mtime_ns),
    )


def _absent(call: Call, error: NoSuchKey) -> S3Error:
    """Returns the error for a missing key. Only a caller that may list the bucket learns that the
    key is missing."""
    call.store.misses.found_nothing(error)
    if not call.service.access.allows(call, "s3:ListBucket"):
        return S3Error("AccessDenied")
    return S3Error("NoSuchKey", extra={"Key": call.key}, headers=_NO_MARKER)


def _no_such_version(call: Call, error: NoSuchVersion) -> S3Error:
    call.store.misses.found_nothing(error)
    return S3Error("NoSuchVersion", extra={"Key": call.key, "VersionId": call.version})
