"""DeleteObject, DeleteObjects."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec

from kvfs.base.errors import KvfsError
from kvfs.http.api import Response
from kvfs.objects.mutations import Check, Deleted, anything
from kvfs.objects.object_errors import PreconditionFailed
from kvfs.objects.object_info import Facts
from kvfs.objects.object_store import Doomed
from s3api.http.error_map import s3_error
from s3api.http.outcome import AccessLogEntry
from s3api.http.request_context import Call, Handler, target
from s3api.http.s3_errors import S3Error
from s3api.model.addressing import KEY_LIMIT_BYTES
from s3api.operations.answers import answer
from s3api.operations.object.object_version import check_version_id, search
from s3api.rules.access import actions
from s3api.rules.conditions import check_delete

KEYS_LIMIT: Final = 1000
_OF_BATCH: Final = "BATCH.DELETE.OBJECT"
_VERSIONED: Final = {"VersionId": ""}


async def delete_object(call: Call) -> Response:
    """Deletes an object. A missing one counts as deleted already: 204 all the same."""
    params, settings = call.params, call.settings
    check = _check(
        params.get("IfMatch"), params.get("IfMatchLastModifiedTime"), params.get("IfMatchSize")
    )
    await search(call, [call.key])
    done = await call.service.deleter.delete(
        call.bucket.encode(),
        settings.bucket,
        Doomed(call.key.encode(), params.get("VersionId") or "", check),
        versioning=settings.versioning,
        bypass="BypassGovernanceRetention" in params and _bypasses(call, call.key),
    )
    told = {"DeleteMarker": done.delete_marker or None, "VersionId": done.version or None}
    return answer(call, told)


async def delete_objects(call: Call) -> Response:
    """Deletes each key separately: allowed, deleted, reported, in the order of the request."""
    wanted = call.params["Delete"]["Objects"]
    if not 0 < len(wanted) <= KEYS_LIMIT:
        raise S3Error("MalformedXML")
    versioning = call.settings.versioning
    told: list[S3Error | KvfsError | Deleted | None] = [_refusal(call, each) for each in wanted]
    # Whoever bypasses a retention must be allowed to for each of the keys.
    bypass = all(_bypasses(call, each["Key"]) for each in wanted)
    open_ones = [at for at, refusal in enumerate(told) if refusal is None]
    doomed = [_doomed(wanted[at]) for at in open_ones]
    await search(call, [wanted[at]["Key"] for at in open_ones])
    step = partial(
        call.store.delete_many, call.raw_bucket, doomed, versioning=versioning, bypass=bypass
    )
    results = await call.committing(lambda later: step(later=later))
    for at, result in zip(open_ones, results, strict=True):
        told[at] = result
    call.entries = partial(_entries, call, wanted, told)
    quiet = bool(call.params["Delete"].get("Quiet"))
    deleted, errors = [], []
    for each, done in zip(wanted, told, strict=True):
        if isinstance(done, Exception):
            errors.append(_failed(each, s3_error(done)))
        elif done is not None and not quiet:
            deleted.append(_deleted(each, done))
    return answer(call, {"Deleted": deleted, "Errors": errors})


def refuse_strangers(call: Call) -> None:
    """Refuses an anonymous caller that may delete no key whatever, before the list of keys is read.
    Users get an answer for each key. Raises AccessDenied."""
    needed = (*actions.needed("DeleteObject", {}), *actions.needed("DeleteObject", _VERSIONED))
    if call.is_anonymous and not call.service.access.could_allow(call, needed):
        raise S3Error("AccessDenied")


def _refusal(call: Call, wanted: Mapping[str, Any]) -> S3Error | None:
    """Returns why this one is not deleted whatever exists."""
    key, version = wanted["Key"], wanted.get("VersionId")
    if not key:
        return S3Error("UserKeyMustBeSpecified")
    if len(key.encode()) > KEY_LIMIT_BYTES:
        return S3Error("KeyTooLongError")
    try:
        check_version_id(version)
        needed = actions.needed("DeleteObject", {"VersionId": version})
        # Policies see each of them as if it were deleted alone.
        if version is not None:
            call = msgspec.structs.replace(call, query={**call.query, "versionId": version})
        if (etag := wanted.get("ETag")) is not None:
            call = msgspec.structs.replace(call, fields={**call.fields, b"if-match": etag.encode()})
        if not all(call.service.access.allows(call, action, key) for action in needed):
            raise S3Error("AccessDenied")
    except S3Error as error:
        return error
    return None


def _doomed(wanted: Mapping[str, Any]) -> Doomed:
    check = _check(wanted.get("ETag"), wanted.get("LastModifiedTime"), wanted.get("Size"))
    return Doomed(wanted["Key"].encode(), wanted.get("VersionId") or "", check)


def _check(etag: str | None, modified: datetime | None, size: int | None) -> Check:
    if etag is None and modified is None and size is None:
        return anything

    def check(facts: Facts | None) -> None:
        there = None if facts is None else target(facts)
        try:
            check_delete(there, if_match=etag, if_modified=modified, if_size=size)
        except S3Error as error:
            # The store goes on with the other keys after its own errors alone.
            raise PreconditionFailed(error.message) from None

    return check


def _bypasses(call: Call, key: str) -> bool:
    """Returns whether the request asks to bypass retentions of mode GOVERNANCE, and may."""
    if not call.params.get("BypassGovernanceRetention"):
        return False
    return call.service.access.allows(call, actions.BYPASS_GOVERNANCE, key)


def _entries(
    call: Call, wanted: Sequence[Mapping[str, Any]], told: Sequence[Exception | Deleted | None]
) -> Iterator[AccessLogEntry]:
    """Yields a line for each key."""
    for each, done in zip(wanted, told, strict=True):
        error = s3_error(done) if isinstance(done, Exception) else None
        status, code = (204, "") if error is None else (error.status, error.code)
        version = each.get("VersionId") or ""
        yield AccessLogEntry(_OF_BATCH, call.bucket, call.owner, each["Key"], version, status, code)


def _deleted(wanted: Mapping[str, Any], done: Deleted) -> dict[str, Any]:
    told: dict[str, Any] = {"Key": wanted["Key"]}
    if wanted.get("VersionId"):
        told["VersionId"] = wanted["VersionId"]
    if done.delete_marker:
        told |= {"DeleteMarker": True, "DeleteMarkerVersionId": done.version}
    return told


def _failed(wanted: Mapping[str, Any], error: S3Error) -> dict[str, Any]:
    told = {"Key": wanted["Key"], "Code": error.code, "Message": error.message}
    if wanted.get("VersionId"):
        told["VersionId"] = wanted["VersionId"]
    return told


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteObject": delete_object,
    "DeleteObjects": delete_objects,
}
