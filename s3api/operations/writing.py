"""PutObject: received, hashed and written through one buffer, then put under its key at once."""

from typing import Any, Final

from kvfs.objects.finding import Facts
from kvfs.wire.http import Response
from s3api import access
from s3api.call import Call, Handler, target
from s3api.errors import S3Error
from s3api.operations.answers import answer, encoded, metadata_of
from s3api.receiving import Receiver
from s3api.rules import acl, object_lock, ownership
from s3api.rules.checksums import Digests
from s3api.rules.conditions import Conditions, check_write
from s3api.rules.object_lock import Lock
from s3api.rules.public_access import PublicAccessBlock
from s3api.rules.tagging import encode as encode_tags
from s3api.rules.tagging import parse_header
from s3api.settings import OBJECT_LOCK, PUBLIC_ACCESS

PUT_LIMIT_BYTES: Final = 5 << 30


async def put_object(call: Call) -> Response:
    """Atomic under races: conditions are held against what is there in the transaction that puts
    the object."""
    said = said_of_new(call)
    receiver = Receiver(call)
    size = receiver.announced
    if size is None and not call.head.chunked:
        raise S3Error("MissingContentLength")
    if size is not None and size > PUT_LIMIT_BYTES:
        raise S3Error("EntityTooLarge")
    conditions = Conditions.of(call.params)
    draft = await call.blocking(lambda: call.store.begin(call.raw_bucket, call.raw_key, size or 0))
    try:
        digests = await receiver.into(draft.fd, lambda length: call.store.grow(draft, length))
        said |= checksum_attributes(digests)
        facts = await call.blocking(
            lambda: call.store.commit(
                draft,
                digests.etag,
                said,
                versioning=call.settings.versioning,
                check=lambda found: check_write(conditions, found and target(found)),
            )
        )
    finally:
        await call.blocking(lambda: call.store.discard(draft))
    return answer(call, put_result(call, facts, digests))


def said_of_new(call: Call) -> dict[str, str]:
    """What is kept with a new object: headers, tags, lock, ACL and owner. Raises S3Error."""
    said = metadata_of(call)
    if (tags := call.params.get("Tagging")) is not None:
        said["tagging"] = encode_tags(parse_header(tags))
    configuration = call.settings.get(OBJECT_LOCK)
    said |= lock_attributes(object_lock.new_lock(call.params, configuration, call.now))
    return said | _owner_attributes(call)


def lock_attributes(lock: Lock) -> dict[str, str]:
    """How a lock is kept."""
    said = {}
    if lock.retention is not None:
        said["retention"] = f"{lock.retention.mode} {int(lock.retention.until.timestamp())}"
    if lock.legal_hold:
        said["legal-hold"] = "ON"
    return said


def _owner_attributes(call: Call) -> dict[str, str]:
    """The writer owns the object and may give it an ACL, unless the bucket's owner owns all."""
    owned = call.settings.ownership
    acl.check_object(call.params, owned)
    if not ownership.has_acls(owned):
        return {}
    bucket_owner = access.owner_of(call.owner)
    owner = access.owner_of(call.caller.name or call.owner)
    given = acl.from_params(call.params, owner, bucket_owner, lambda name: name)
    said = {} if owner == bucket_owner else {"owner": owner.id}
    if given is not None:
        block = PublicAccessBlock.parse(call.settings.get(PUBLIC_ACCESS) or {})
        block.check_acl(given)
        said["acl"] = encoded(acl.document(given))
    return said


def checksum_attributes(digests: Digests) -> dict[str, str]:
    """How a checksum is kept."""
    found = digests.checksum
    return {
        f"checksum.{found.algorithm.name.lower()}": found.value,
        "checksum.type": found.type,
    }


def put_result(call: Call, facts: Facts, digests: Digests) -> dict[str, Any]:
    """The members of an answer to a put."""
    found = digests.checksum
    result: dict[str, Any] = {
        "ETag": f'"{facts.etag}"',
        found.algorithm.member: found.value,
        "ChecksumType": found.type,
    }
    if call.settings.versioning:
        result["VersionId"] = facts.version
    return result


HANDLERS: Final[dict[str, Handler]] = {"PutObject": put_object}
