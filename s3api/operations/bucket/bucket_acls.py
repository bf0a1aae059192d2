"""The access control list of a bucket."""

from typing import Final

from kvfs.http.api import Response
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import keep
from s3api.operations.object.object_acls import name_of
from s3api.rules.access import acl, ownership
from s3api.rules.access.acl import Acl
from s3api.rules.access.public_access import PublicAccessBlock
from s3api.storage.bucket_settings import ACL, PUBLIC_ACCESS


async def get_bucket_acl(call: Call) -> Response:
    return answer(call, acl.document(authorization.bucket_acl(call)))


async def put_bucket_acl(call: Call) -> Response:
    """Sets the ACL: a canned one, grants in headers, or a document."""
    if not ownership.has_acls(call.settings.ownership):
        raise acl.not_supported()
    given = _given(call)
    PublicAccessBlock.parse(call.settings.get(PUBLIC_ACCESS) or {}).check_acl(given)
    await keep(call, ACL, acl.document(given))
    return answer(call)


def _given(call: Call) -> Acl:
    owner = authorization.owner_of(call.owner)
    found = acl.from_params(call.params, owner, owner, name_of(call))
    if found is not None:
        return found
    document = call.params.get("AccessControlPolicy")
    if document is None:
        raise S3Error("MissingSecurityHeader")
    return acl.from_document(document, owner, name_of(call))


HANDLERS: Final[dict[str, Handler]] = {
    "GetBucketAcl": get_bucket_acl,
    "PutBucketAcl": put_bucket_acl,
}
