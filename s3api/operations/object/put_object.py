"""PutObject: received, hashed and written through one buffer, then put under its key at once."""

from functools import partial
from typing import Any, Final

import trio

from kvfs.base.detach import aside
from kvfs.http.api import Response
from kvfs.objects.mutations import ENABLED, Check, anything
from kvfs.objects.object_info import Facts
from kvfs.vfs.post_commit import Changed
from s3api.http.body_receiver import Receiver
from s3api.http.request_context import Call, Handler, target
from s3api.http.s3_errors import S3Error
from s3api.operations.acls import acl_of_new
from s3api.operations.answers import answer, metadata_of
from s3api.operations.object.object_version import expiration, search
from s3api.operations.object.version_settings import lock_of_new
from s3api.rules import object_lock, tagging
from s3api.rules.access import acl
from s3api.rules.access.ownership import BUCKET_OWNER_ENFORCED
from s3api.rules.checksums import Digests
from s3api.rules.conditions import NONE, WRITE_CONDITIONS, Conditions, check_write

PUT_LIMIT_BYTES: Final = 5 << 30
_SAID_OF_NEW: Final = acl.PARAMS | object_lock.PARAMS | {"Tagging"}
"""Parameters of tags, locks and ACLs."""


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
    check: Check = anything
    if not WRITE_CONDITIONS.isdisjoint(call.params):
        check = check_of(Conditions.of(call.params))
        await search(call, [call.key])
    draft = call.store.begin_now(call.settings.bucket, call.key.encode(), size or 0)
    if draft is None:  # at once if possible: a change of thread costs more than a small body
        begin = partial(call.store.begin, call.raw_bucket, call.raw_key, size or 0)
        draft = await call.blocking(begin)
    try:
        digests = await receiver.into(draft)
        said |= checksum_attributes(digests)
        call.look_again()  # whether versions are kept counts as it is when the object is put
        versioning = call.settings.versioning
        later: list[Changed] = []
        commit = partial(
            call.store.commit,
            *(draft, digests.etag, said),
            versioning=versioning,
            check=check,
            later=later,
        )
        facts = await call.blocking(commit) if draft.waits else commit()
        await call.service.teller.tell(later)
    except BaseException:
        await aside()
        with trio.CancelScope(shield=True):
            await call.blocking(lambda: call.store.discard(draft))
        raise
    return answer(call, put_result(call, facts, digests))


def check_of(conditions: Conditions) -> Check:
    """Returns the check of a put: `anything` without conditions, since the present object need not
    be read then."""
    if conditions is NONE or not conditions:
        return anything
    return lambda found: check_write(conditions, None if found is None else target(found))


def said_of_new(call: Call) -> dict[str, str]:
    """Returns the metadata that are kept with a new object: headers, tags, lock, ACL and owner.
    Raises S3Error."""
    settings, said = call.settings, metadata_of(call)
    if (
        settings.has_lock
        or settings.ownership != BUCKET_OWNER_ENFORCED
        or not _SAID_OF_NEW.isdisjoint(call.params)
    ):
        return said | tags_of_new(call) | lock_of_new(call) | acl_of_new(call)
    return said


def tags_of_new(call: Call) -> dict[str, str]:
    """Returns the form in which the tags in a request's header are kept. Raises S3Error."""
    named = call.params.get("Tagging")
    tags = tagging.parse_header(named) if named else {}
    return {"tagging": tagging.encode(tags)} if tags else {}


def checksum_attributes(digests: Digests) -> dict[str, str]:
    """Returns the form in which a checksum is kept."""
    found = digests.checksum
    return {found.algorithm.kept_as: found.value, "checksum.type": found.type}


def put_result(call: Call, facts: Facts, digests: Digests) -> dict[str, Any]:
    """Returns the members of an answer to a put."""
    found, settings = digests.checksum, call.settings
    return {
        "ETag": f'"{facts.etag}"',
        found.algorithm.member: found.value,
        "ChecksumType": found.type,
        # S3 tells it of new versions alone, not of what takes the place of the null one.
        "VersionId": facts.version if settings.versioning == ENABLED else None,
        "Expiration": expiration(call, facts) if settings.has_lifecycle else None,
    }


HANDLERS: Final[dict[str, Handler]] = {"PutObject": put_object}
