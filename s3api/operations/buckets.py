"""Buckets as such: create, delete, look at, list, location."""

from typing import Final

from kvfs.objects.problems import BucketExists
from kvfs.wire.http import Response
from s3api import access
from s3api.call import Call, Handler, moment
from s3api.errors import S3Error
from s3api.model.addressing import check_bucket_name, is_bucket_name
from s3api.operations.answers import answer
from s3api.rules import acl, ownership
from s3api.settings import ACL, OBJECT_LOCK, OWNER, OWNERSHIP, VERSIONING, Settings, pack


async def create_bucket(call: Call) -> Response:
    """A durable namespace, with an owner."""
    check_bucket_name(call.bucket)
    user = call.caller.name
    if user is None:
        raise S3Error("AccessDenied")
    settings = _first_settings(call, user)
    try:
        await call.blocking(lambda: call.store.create_bucket(call.raw_bucket))
    except BucketExists:
        owned = call.owner == user
        raise S3Error("BucketAlreadyOwnedByYou" if owned else "BucketAlreadyExists") from None

    def set_all() -> None:
        for name, value in settings.items():
            call.store.put_setting(call.raw_bucket, name, value)

    await call.blocking(set_all)
    return answer(call, {"Location": f"/{call.bucket}"})


def _first_settings(call: Call, user: str) -> dict[str, bytes]:
    settings = {OWNER: pack(user)}
    owned = call.params.get("ObjectOwnership")
    if owned is not None:
        settings[OWNERSHIP] = pack(ownership.parse_ownership(owned))
    acl.check_bucket(call.params, owned or "ObjectWriter")
    owner = access.owner_of(user)
    given = acl.from_params(call.params, owner, owner, lambda name: name)
    if given is not None:
        settings[ACL] = pack(acl.document(given))
    if call.params.get("ObjectLockEnabledForBucket"):
        settings[OBJECT_LOCK] = pack({"ObjectLockEnabled": "Enabled"})
        settings[VERSIONING] = pack({"Status": "Enabled"})
    return settings


async def delete_bucket(call: Call) -> Response:
    """Empty ones alone."""
    await call.blocking(lambda: call.store.delete_bucket(call.raw_bucket))
    return answer(call)


async def head_bucket(call: Call) -> Response:
    call.store.head_bucket(call.raw_bucket)
    return answer(call, {"BucketRegion": call.service.region})


async def get_bucket_location(call: Call) -> Response:
    call.store.head_bucket(call.raw_bucket)
    region = call.service.region
    return answer(call, {"LocationConstraint": None if region == "us-east-1" else region})


async def list_buckets(call: Call) -> Response:
    """The caller's own, and to who may see them all, all; in the order of their names."""
    user = call.caller.name
    if user is None:
        raise S3Error("AccessDenied")
    prefix, limit = call.params.get("Prefix", ""), call.params.get("MaxBuckets", 10_000)
    after = call.params.get("ContinuationToken", "")
    found: list[dict[str, object]] = []
    for each in call.store.list_buckets():
        name = each.name.decode("utf-8", "replace")
        if not is_bucket_name(name) or not name.startswith(prefix) or name <= after:
            continue
        if not _may_see(call, user, each.name):
            continue
        if len(found) == limit:
            return _listed(call, user, found, found[-1]["Name"])
        found.append({"Name": name, "CreationDate": moment(each.created_ns)})
    return _listed(call, user, found, None)


def _may_see(call: Call, user: str, name: bytes) -> bool:
    owner = Settings(call.store.get_settings(name)).get(OWNER)
    return (owner or call.service.identities.administrator) == user or _is_administrator(call)


def _is_administrator(call: Call) -> bool:
    return call.caller.name == call.service.identities.administrator


def _listed(call: Call, user: str, found: list[dict[str, object]], token: object) -> Response:
    members: dict[str, object] = {
        "Buckets": found,
        "Owner": {"ID": user, "DisplayName": user},
        "Prefix": call.params.get("Prefix"),
        "ContinuationToken": token,
    }
    return answer(call, members)


HANDLERS: Final[dict[str, Handler]] = {
    "CreateBucket": create_bucket,
    "DeleteBucket": delete_bucket,
    "GetBucketLocation": get_bucket_location,
    "HeadBucket": head_bucket,
    "ListBuckets": list_buckets,
}
