"""The settings of a version that are made after it: tags, retention and legal hold."""

from datetime import UTC, datetime
from typing import Final

from kvfs.http.api import Response
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_info import Facts
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.object.object_version import find_anywhere, update, version_id
from s3api.rules import object_lock, tagging
from s3api.rules.access import actions
from s3api.rules.object_lock import ObjectLock, Retention
from s3api.storage.bucket_settings import OBJECT_LOCK

HELD: Final = "ON"
NOT_HELD: Final = "OFF"


async def get_object_tagging(call: Call) -> Response:
    """Returns the tags; an empty set if there are none."""
    facts = await find_anywhere(call)
    tags = tagging.parse_kept(facts.metadata.get("tagging", ""))
    return answer(call, {**tagging.document(tags), "VersionId": version_id(call, facts)})


async def put_object_tagging(call: Call) -> Response:
    """Replaces all tags."""
    tags = tagging.parse_document(call.params["Tagging"])
    return await _set_tags(call, tagging.encode(tags))


async def delete_object_tagging(call: Call) -> Response:
    """Deletes all tags."""
    return await _set_tags(call, "")


async def _set_tags(call: Call, encoded: str) -> Response:
    def change(_: Facts) -> tuple[Metadata, tuple[str, ...]]:
        return ({"tagging": encoded}, ()) if encoded else ({}, ("tagging",))

    facts = await update(call, change)
    return answer(call, {"VersionId": version_id(call, facts)})


def lock_of_new(call: Call) -> dict[str, str]:
    """Returns the form in which the lock of a new version is kept: the request's, else the bucket's
    default. Raises S3Error."""
    settings = call.settings
    if not settings.has_lock and object_lock.PARAMS.isdisjoint(call.params):
        return {}
    lock = object_lock.new_lock(call.params, settings.get(OBJECT_LOCK), call.now)
    return lock_attributes(lock)


def lock_attributes(lock: ObjectLock) -> dict[str, str]:
    """Returns the form in which a lock is kept."""
    said = {}
    if lock.retention is not None:
        said["retention"] = _kept(lock.retention)
    if lock.legal_hold:
        said["legal-hold"] = HELD
    return said


def retention_of(facts: Facts) -> Retention | None:
    """Returns the retention that was put on a version, even if it is over."""
    mode, _, until_s = facts.metadata.get("retention", "").partition(" ")
    return Retention(mode, datetime.fromtimestamp(int(until_s), UTC)) if mode else None


async def get_object_retention(call: Call) -> Response:
    """Returns the retention. Raises NoSuchObjectLockConfiguration if there is none."""
    _check_bucket(call)
    found = retention_of(await find_anywhere(call))
    if found is None:
        raise S3Error("NoSuchObjectLockConfiguration")
    told = {"Mode": found.mode, "RetainUntilDate": found.until}
    return answer(call, {"Retention": told})


async def put_object_retention(call: Call) -> Response:
    """Sets the retention. A longer one is free; a shorter one, another mode or none need the right
    to bypass governance."""
    _check_bucket(call)
    document = call.params.get("Retention")
    if document is None:
        raise S3Error("MalformedXML")
    new = object_lock.parse_retention(document, call.now)
    may_bypass = bool(call.params.get("BypassGovernanceRetention")) and (
        call.service.access.allows(call, actions.BYPASS_GOVERNANCE, call.key)
    )

    def change(facts: Facts) -> tuple[Metadata, tuple[str, ...]]:
        old = retention_of(facts)
        object_lock.check_change(old, new, call.now, may_bypass=may_bypass)
        return ({}, ("retention",)) if new is None else ({"retention": _kept(new)}, ())

    await update(call, change)
    return answer(call)


async def get_object_legal_hold(call: Call) -> Response:
    """Returns the legal hold. Raises NoSuchObjectLockConfiguration if none was ever set."""
    _check_bucket(call)
    status = (await find_anywhere(call)).metadata.get("legal-hold")
    if status is None:
        raise S3Error("NoSuchObjectLockConfiguration")
    return answer(call, {"LegalHold": {"Status": status}})


async def put_object_legal_hold(call: Call) -> Response:
    """Sets the legal hold on or off."""
    _check_bucket(call)
    held = object_lock.parse_legal_hold(call.params.get("LegalHold") or {})
    status = HELD if held else NOT_HELD
    await update(call, lambda _: ({"legal-hold": status}, ()))
    return answer(call)


def _check_bucket(call: Call) -> None:
    object_lock.check_enabled(enabled=call.settings.has_lock)


def _kept(retention: Retention) -> str:
    return f"{retention.mode} {int(retention.until.timestamp())}"


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteObjectTagging": delete_object_tagging,
    "GetObjectTagging": get_object_tagging,
    "PutObjectTagging": put_object_tagging,
    "GetObjectLegalHold": get_object_legal_hold,
    "GetObjectRetention": get_object_retention,
    "PutObjectLegalHold": put_object_legal_hold,
    "PutObjectRetention": put_object_retention,
}
