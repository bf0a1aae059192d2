"""The owner of the objects of a bucket, and whether ACLs count there."""

from typing import Final

from kvfs.http.api import Response
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules.access import ownership
from s3api.storage.bucket_settings import OWNERSHIP


async def get_bucket_ownership_controls(call: Call) -> Response:
    kept = call.settings.get(OWNERSHIP)
    if kept is None:
        raise S3Error("OwnershipControlsNotFoundError", extra={"BucketName": call.bucket})
    return answer(call, {"OwnershipControls": ownership.controls(kept)})


async def put_bucket_ownership_controls(call: Call) -> Response:
    """Sets the ownership. ACLs can be switched off if the bucket's own grants nothing to others."""
    owned = ownership.parse_controls(call.params["OwnershipControls"])
    if not ownership.has_acls(owned):
        found = authorization.bucket_acl(call)
        if any(each.user != found.owner for each in found.grants):
            raise S3Error("InvalidBucketAclWithObjectOwnership")
    await keep(call, OWNERSHIP, owned)
    return answer(call)


async def delete_bucket_ownership_controls(call: Call) -> Response:
    await forget(call, OWNERSHIP)
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketOwnershipControls": delete_bucket_ownership_controls,
    "GetBucketOwnershipControls": get_bucket_ownership_controls,
    "PutBucketOwnershipControls": put_bucket_ownership_controls,
}
