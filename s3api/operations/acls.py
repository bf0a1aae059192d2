"""Access control lists of buckets and objects."""

from typing import Final

from kvfs.http.api import Response
from s3api.auth import authorization
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer, encoded
from s3api.operations.bucket.bucket_configurations import keep, public_access_block
from s3api.operations.object.object_version import find_anywhere, update
from s3api.rules.access import acl, ownership
from s3api.rules.access.acl import Acl, NameOf, Owner
from s3api.storage.bucket_settings import ACL


def acl_of_new(call: Call) -> dict[str, str]:
    """Returns the form in which owner and ACL of a new object are kept: the writer owns it and may
    give it an ACL, unless the bucket's owner owns all. Raises S3Error."""
    owned = call.settings.ownership
    if owned == ownership.BUCKET_OWNER_ENFORCED:
        if acl.are_named(call.params):
            acl.check_object(call.params, owned)
        return {}
    bucket_owner = authorization.owner_of(call.owner)
    owner = authorization.owner_of(call.caller.name or call.owner)
    given = acl.from_params(call.params, owner, bucket_owner, name_of(call))
    if owned == ownership.BUCKET_OWNER_PREFERRED and (
        call.params.get("ACL") == "bucket-owner-full-control"
    ):
        owner = bucket_owner
        given = acl.canned(acl.PRIVATE, owner, bucket_owner)
    said = {} if owner == bucket_owner else {"owner": owner.id}
    if given is not None:
        said["acl"] = _kept(call, given)
    return said


def name_of(call: Call) -> NameOf:
    """Returns the look-up of users that grants may name: the existing ones."""
    return lambda name: name if call.service.identities.names(name) else None


async def get_object_acl(call: Call) -> Response:
    """Returns the object's ACL; if ACLs do not count, full control of the bucket's owner."""
    facts = await find_anywhere(call)
    if ownership.has_acls(call.settings.ownership):
        found = authorization.object_acl(call, facts)
    else:
        owner = authorization.owner_of(call.owner)
        found = acl.canned(acl.PRIVATE, owner, owner)
    return answer(call, acl.document(found))


async def put_object_acl(call: Call) -> Response:
    """Sets the ACL: a canned one, grants in headers, or a document. The owner stays."""
    if not ownership.has_acls(call.settings.ownership):
        raise acl.not_supported()
    owner = authorization.object_acl(call, await find_anywhere(call)).owner
    kept = _kept(call, _asked(call, owner))
    await update(call, lambda _: ({"acl": kept}, ()))
    return answer(call)


def _asked(call: Call, owner: Owner) -> Acl:
    names = name_of(call)
    document = call.params.get("AccessControlPolicy")
    given = acl.from_params(call.params, owner, authorization.owner_of(call.owner), names)
    if given is not None and document is not None:
        raise S3Error("UnexpectedContent")
    if document is not None:
        return acl.from_document(document, owner, names)
    if given is None:
        raise S3Error("MissingSecurityHeader", extra={"MissingHeaderName": "x-amz-acl"})
    return given


def _kept(call: Call, given: Acl) -> str:
    public_access_block(call).check_acl(given)
    return encoded(acl.document(given))


async def get_bucket_acl(call: Call) -> Response:
    return answer(call, acl.document(authorization.bucket_acl(call)))


async def put_bucket_acl(call: Call) -> Response:
    """Sets the ACL: a canned one, grants in headers, or a document."""
    if not ownership.has_acls(call.settings.ownership):
        raise acl.not_supported()
    given = _bucket_acl_asked(call)
    public_access_block(call).check_acl(given)
    await keep(call, ACL, acl.document(given))
    return answer(call)


def _bucket_acl_asked(call: Call) -> Acl:
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
    "GetObjectAcl": get_object_acl,
    "PutBucketAcl": put_bucket_acl,
    "PutObjectAcl": put_object_acl,
}
