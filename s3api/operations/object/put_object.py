"""PutObject: received, hashed and written through one buffer, then put under its key at once."""

from typing import Any, Final

import trio

from kvfs.http.api import Response
from kvfs.objects.mutations import ENABLED, Check, anything
from kvfs.objects.object_drafts import ObjectDraft
from kvfs.objects.object_info import Facts
from s3api.http.body_receiver import Receiver
from s3api.http.request_context import Call, Handler, target
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer, checksum_name, metadata_of
from s3api.operations.object.object_acls import acl_of_new
from s3api.operations.object.object_version import expiration
from s3api.operations.object.retention import lock_of_new
from s3api.rules import tagging
from s3api.rules.checksums import Digests
from s3api.rules.conditions import NONE, Conditions, check_write, conditions_of

PUT_LIMIT_BYTES: Final = 5 << 30


async def put_object(call: Call) -> Response:
    """Puts an object. Atomic under races: conditions are checked in the transaction that puts the
    object."""
    said = said_of_new(call)
    receiver = Receiver(call)
    if "WriteOffsetBytes" in call.params:
        raise S3Error("NotImplemented", "Appending to an object is not implemented")
    size = receiver.announced
    if size is None and not call.head.chunked:
        raise S3Error("MissingContentLength")
    if size is not None and size > PUT_LIMIT_BYTES:
        raise S3Error("EntityTooLarge")
    check = check_of(conditions_of(call.params))
    draft = await _begin(call, size or 0)
    try:
        digests = await receiver.into(draft)
        said |= checksum_attributes(digests)
        call.look_again()  # whether versions are kept counts as it is when the object is put
        versioning = call.settings.versioning
        facts = await call.committing(
            lambda later: call.store.commit(
                draft, digests.etag, said, versioning=versioning, check=check, later=later
            ),
            waits=draft.durable or call.store.is_shared,
        )
    except BaseException:
        with trio.CancelScope(shield=True):
            await call.blocking(lambda: call.store.discard(draft))
        raise
    return answer(call, put_result(call, facts, digests))


async def _begin(call: Call, size: int) -> ObjectDraft:
    """Begins the draft, at once if possible: a change of thread costs more than a small body."""
    draft = call.store.begin_now(call.settings.bucket, call.key.encode(), size)
    if draft is None:
        return await call.blocking(lambda: call.store.begin(call.raw_bucket, call.raw_key, size))
    return draft


def check_of(conditions: Conditions) -> Check:
    """Returns the check of a put: `anything` without conditions, since the present object need not
    be read then."""
    if conditions is NONE or not conditions:
        return anything
    return lambda found: check_write(conditions, found and target(found))


def said_of_new(call: Call) -> dict[str, str]:
    """Returns the metadata that are kept with a new object: headers, tags, lock, ACL and owner.
    Raises S3Error."""
    return metadata_of(call) | tags_of_new(call) | lock_of_new(call) | acl_of_new(call)


def tags_of_new(call: Call) -> dict[str, str]:
    """Returns the form in which the tags in a request's header are kept. Raises S3Error."""
    named = call.params.get("Tagging")
    tags = tagging.parse_header(named) if named else {}
    return {"tagging": tagging.encode(tags)} if tags else {}


def checksum_attributes(digests: Digests) -> dict[str, str]:
    """Returns the form in which a checksum is kept."""
    found = digests.checksum
    return {checksum_name(found.algorithm): found.value, "checksum.type": found.type}


def put_result(call: Call, facts: Facts, digests: Digests) -> dict[str, Any]:
    """Returns the members of an answer to a put."""
    found = digests.checksum
    return {
        "ETag": f'"{facts.etag}"',
        found.algorithm.member: found.value,
        "ChecksumType": found.type,
        # S3 tells it of new versions alone, not of what takes the place of the null one.
        "VersionId": facts.version if call.settings.versioning == ENABLED else None,
        "Expiration": expiration(call, facts),
    }


HANDLERS: Final[dict[str, Handler]] = {"PutObject": put_object}
