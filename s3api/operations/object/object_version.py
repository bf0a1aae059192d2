"""The version of an object that a request names, or S3's refusal if it does not exist."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import trio

from kvfs.base.detach import aside
from kvfs.base.errors import Busy
from kvfs.meta import keys
from kvfs.meta.records import Flag
from kvfs.objects import versions
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_errors import (
    BeingWritten,
    MarkedDeleted,
    NoSuchKey,
    NoSuchVersion,
    NotHere,
)
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import OpenedObject, marked_deleted
from kvfs.objects.store_cache import NOW
from kvfs.vfs.names.name_search import LOOKS
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
        facts = _look(call)
    except NoSuchVersion as error:
        raise _no_such_version(call, error) from None
    except NoSuchKey as error:
        raise _absent(call, error) from None
    if facts.delete_marker:
        raise marked(call, facts)
    return facts


def _look(call: Call) -> Facts:
    return call.store.find(call.raw_bucket, call.raw_key, call.version, call.generation)


async def _searched(call: Call, look: Callable[[], T]) -> T:
    """Returns what `look` returns; for a key that is missing here and that other nodes may hold,
    they are asked first. Raises what `look` raises."""
    for _ in range(LOOKS):
        try:
            return look()
        except NoSuchKey as error:
            names = call.service.store.names
            if isinstance(error, MarkedDeleted) or not names.may_find(error.at):
                raise
            missing = [error.at] if error.at is not None else []
        await aside()
        call.generation = NOW
        if not await trio.to_thread.run_sync(names.find, missing, limiter=_bringings()):
            break
    return look()


async def search(call: Call, wanted: Sequence[str]) -> None:
    """Has these keys taken over from other nodes that hold them, where names are each node's own:
    what is done to them here then reaches all copies."""
    if not call.service.store.names.may_find(keys.file_entry(call.settings.bucket.root, b"-")):
        return
    raw = [key.encode() for key in wanted]
    await aside()
    await trio.to_thread.run_sync(call.store.search, call.raw_bucket, raw, limiter=_bringings())
    call.generation = NOW


async def find_anywhere(call: Call) -> Facts:
    """Like `find`; what other nodes hold is found too."""
    await search(call, [call.key])
    return find(call)


async def find_to_tell(call: Call) -> Facts:
    """Like `find`, with an ETag that stays; what other nodes hold is found too."""
    with contextlib.suppress(NoSuchKey, NoSuchVersion):  # `find` says so
        await _searched(call, lambda: _look(call))
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
    await aside()
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
    version = call.params.get("VersionId") or ""

    def look() -> OpenedObject:
        return call.service.store.open_here(
            call.bucket.encode(), call.key.encode(), version, call.generation, waits=False
        )

    try:
        return await _searched(call, look)
    except (NotHere, BeingWritten):
        call.generation = NOW  # what follows takes long
    except (NoSuchKey, NoSuchVersion) as error:
        raise _refusal(call, error) from None
    await aside()
    return await trio.to_thread.run_sync(_open_coming, call, limiter=_bringings())


def _open_coming(call: Call) -> OpenedObject:
    try:
        return call.store.open_coming(call.raw_bucket, call.raw_key, call.version)
    except (NoSuchKey, NoSuchVersion) as error:
        raise _refusal(call, error) from None
    except Busy:  # clients ask again by themselves
        raise S3Error("ServiceUnavailable") from None


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


Change = Callable[[Facts], tuple[Metadata, Sequence[str]]]
"""Returns the attributes to set and the names to remove, given the version; may be called more than
once."""


async def update(call: Call, change: Change) -> Facts:
    """Returns the version as it was found, in the transaction that changed it. Raises the S3Error
    of `find`, and what `change` raises."""
    await find_anywhere(call)

    def checked(facts: Facts) -> tuple[Metadata, Sequence[str]]:
        if facts.delete_marker:
            raise marked(call, facts)
        return change(facts)

    return await call.blocking(
        lambda: call.store.update(call.raw_bucket, call.raw_key, call.version, checked)
    )
