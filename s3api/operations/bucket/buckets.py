"""Buckets themselves: create, delete, head, list, location."""

import base64
import binascii
from collections.abc import Iterator
from typing import Final

from kvfs.http.api import Response
from kvfs.objects.buckets import ListedBucket
from kvfs.objects.object_errors import BucketExists
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler, moment
from s3api.http.s3_errors import S3Error, invalid_argument
from s3api.model.addressing import check_bucket_name, is_bucket_name
from s3api.operations.acls import name_of
from s3api.operations.answers import answer
from s3api.rules import tagging
from s3api.rules.access import acl, ownership
from s3api.storage.bucket_settings import (
    ACL,
    OBJECT_LOCK,
    OWNER,
    OWNERSHIP,
    TAGGING,
    VERSIONING,
    pack,
)

_MOST: Final = 10_000
_EVERYBODY: Final = 0o055
"""The mode on the mount if an ACL shows a bucket to others than its owner."""
_LEGACY_REGION: Final = "us-east-1"
"""The region in which S3 lets an owner create its bucket again, and in which it names no
location."""


async def create_bucket(call: Call) -> Response:
    """Makes a durable namespace, with an owner; its settings exist as soon as it does."""
    check_bucket_name(call.bucket)
    if call.caller.name is None:
        raise S3Error("AccessDenied")
    _check_location(call)
    settings = _first_settings(call, call.caller.name)
    mode = call.service.bucket_mode | (_EVERYBODY if ACL in settings else 0)
    try:
        await call.blocking(
            lambda: call.store.buckets.create(call.raw_bucket, settings=settings, mode=mode)
        )
    except BucketExists:
        _check_again(call, settings)
    return answer(call, {"Location": f"/{call.bucket}"})


def _check_location(call: Call) -> None:
    configuration = call.params.get("CreateBucketConfiguration") or {}
    if configuration.get("Location") or configuration.get("Bucket"):
        raise S3Error("NotImplemented", "Directory buckets are not implemented")
    asked = configuration.get("LocationConstraint")
    if asked and asked != call.service.region:
        raise S3Error(
            "IllegalLocationConstraintException",
            f"The {asked} location constraint is incompatible for the region specific endpoint"
            " this request was sent to.",
        )


def _first_settings(call: Call, user: str) -> dict[str, bytes]:
    owned = call.params.get("ObjectOwnership") or call.service.object_ownership
    settings = {OWNER: pack(user), OWNERSHIP: pack(ownership.parse_ownership(owned))}
    acl.check_bucket(call.params, owned)
    owner = authorization.owner_of(user)
    given = acl.from_params(call.params, owner, owner, name_of(call))
    if given is not None and given != acl.canned(acl.PRIVATE, owner, owner):
        settings[ACL] = pack(acl.document(given))
    if call.params.get("ObjectLockEnabledForBucket"):
        settings[OBJECT_LOCK] = pack({"ObjectLockEnabled": "Enabled"})
        settings[VERSIONING] = pack({"Status": "Enabled"})
    tags = (call.params.get("CreateBucketConfiguration") or {}).get("Tags")
    if tags:
        settings[TAGGING] = pack(tagging.parse_document({"TagSet": tags}, tagging.BUCKET_TAGS))
    return settings


def _check_again(call: Call, settings: dict[str, bytes]) -> None:
    """Allows an owner in S3's first region to create its bucket again, with the ACL that it has;
    nobody gets an ACL changed this way."""
    if not call.is_owner:
        raise S3Error("BucketAlreadyExists", extra={"BucketName": call.bucket})
    if call.service.region != _LEGACY_REGION:
        raise S3Error("BucketAlreadyOwnedByYou", extra={"BucketName": call.bucket})
    kept = call.settings.get(ACL)
    if settings.get(ACL) != (None if kept is None else pack(kept)):
        raise S3Error("BucketAlreadyExists", extra={"BucketName": call.bucket})


async def delete_bucket(call: Call) -> Response:
    """Deletes an empty bucket; its incomplete uploads end with it."""
    await call.blocking(lambda: _delete(call))
    return answer(call)


def _delete(call: Call) -> None:
    store, bucket = call.store, call.raw_bucket
    if not store.list_versions(bucket, max_keys=1).versions:
        while uploads := store.uploads.list_all(bucket).uploads:
            for each in uploads:
                store.uploads.abort(bucket, each.key, each.id)
    store.buckets.delete(bucket)


async def head_bucket(call: Call) -> Response:
    call.store.buckets.head(call.raw_bucket)
    return answer(call, {"BucketRegion": call.service.region})


async def get_bucket_location(call: Call) -> Response:
    call.store.buckets.head(call.raw_bucket)
    region = call.service.region
    return answer(call, {"LocationConstraint": None if region == _LEGACY_REGION else region})


async def list_buckets(call: Call) -> Response:
    """Returns the caller's own buckets, or all to a caller that may see all, in the order of their
    names. Nobody has none."""
    limit = call.params.get("MaxBuckets", _MOST)
    if not 1 <= limit <= _MOST:
        raise invalid_argument(
            "max-buckets", str(limit), f"The value of max-buckets is between 1 and {_MOST}"
        )
    found: list[dict[str, object]] = []
    token = None
    for each in _seen(call):
        if len(found) == limit:
            token = base64.urlsafe_b64encode(str(found[-1]["Name"]).encode()).decode()
            break
        found.append(
            {
                "Name": each.name.decode(),
                "CreationDate": moment(each.created_ns),
                "BucketRegion": call.service.region,
            }
        )
    user = call.caller.name or "anonymous"
    members = {
        "Buckets": found,
        "Owner": {"ID": user, "DisplayName": user},
        "Prefix": call.params.get("Prefix"),
        "ContinuationToken": token,
    }
    return answer(call, members)


def _seen(call: Call) -> Iterator[ListedBucket]:
    prefix, after = call.params.get("Prefix", ""), _after(call)
    if call.params.get("BucketRegion", call.service.region) != call.service.region:
        return
    for each in call.store.buckets.list_all():
        name = each.name.decode("utf-8", "replace")
        wanted = name > after and name.startswith(prefix) and is_bucket_name(name)
        if wanted and _may_see(call, each.name):
            yield each


def _after(call: Call) -> str:
    token = call.params.get("ContinuationToken", "")
    try:
        return base64.b64decode(token, b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid_argument(
            "continuation-token", token, "The continuation token provided is incorrect"
        ) from None


def _may_see(call: Call, name: bytes) -> bool:
    administrator = call.service.identities.administrator
    if call.caller.name == administrator:
        return True
    kept = call.store.buckets.get_setting(name, OWNER)
    owner = pack(administrator) if kept is None else kept
    return call.caller.name is not None and owner == pack(call.caller.name)


HANDLERS: Final[dict[str, Handler]] = {
    "CreateBucket": create_bucket,
    "DeleteBucket": delete_bucket,
    "GetBucketLocation": get_bucket_location,
    "HeadBucket": head_bucket,
    "ListBuckets": list_buckets,
}
