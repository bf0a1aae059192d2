"""The policy of a bucket."""

from typing import Final

from kvfs.http.api import Response
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules.access import ownership, policy
from s3api.rules.access.public_access import PublicAccessBlock
from s3api.storage.bucket_settings import POLICY, PUBLIC_ACCESS


async def get_bucket_policy(call: Call) -> Response:
    document = call.settings.get(POLICY)
    if document is None:
        raise S3Error("NoSuchBucketPolicy", extra={"BucketName": call.bucket})
    return answer(call, {"Policy": document})


async def put_bucket_policy(call: Call) -> Response:
    """Keeps the policy as it was sent."""
    document = call.params["Policy"]
    parsed = policy.new_bucket_policy(document, call.bucket)
    _block(call).check_policy(parsed)
    await keep(call, POLICY, document)
    return Response(204)


async def delete_bucket_policy(call: Call) -> Response:
    await forget(call, POLICY)
    return answer(call)


async def get_bucket_policy_status(call: Call) -> Response:
    """Returns whether the policy or the ACL allows everybody something."""
    document = call.settings.get(POLICY)
    is_public = document is not None and policy.is_public(
        authorization.parsed_bucket_policy(document)
    )
    if ownership.has_acls(call.settings.ownership):
        is_public = (
            is_public or _block(call).effective_acl(authorization.bucket_acl(call)).is_public
        )
    return answer(call, {"PolicyStatus": {"IsPublic": is_public}})


def _block(call: Call) -> PublicAccessBlock:
    return PublicAccessBlock.parse(call.settings.get(PUBLIC_ACCESS) or {})


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketPolicy": delete_bucket_policy,
    "GetBucketPolicy": get_bucket_policy,
    "GetBucketPolicyStatus": get_bucket_policy_status,
    "PutBucketPolicy": put_bucket_policy,
}
