"""The target of a bucket's access logs."""

from collections.abc import Mapping
from typing import Any, Final

from kvfs.base.errors import NotFound
from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.model.addressing import KEY_LIMIT_BYTES, is_bucket_name
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.server.log_delivery import key_of
from s3api.storage.bucket_settings import LOGGING, OWNER


async def get_bucket_logging(call: Call) -> Response:
    kept = call.settings.get(LOGGING)
    return answer(call, {} if kept is None else {"LoggingEnabled": kept})


async def put_bucket_logging(call: Call) -> Response:
    """Sets the target, a bucket of the same owner; without one, logging is switched off. Only the
    owner may, whatever a policy allows others."""
    if not call.is_owner and call.caller.name != call.service.identities.administrator:
        raise S3Error("AccessDenied")
    wanted = call.params["BucketLoggingStatus"].get("LoggingEnabled")
    if wanted is None:
        await forget(call, LOGGING)
        return answer(call)
    _check(call, wanted)
    await keep(call, LOGGING, wanted)
    return answer(call)


def _check(call: Call, wanted: Mapping[str, Any]) -> None:
    if wanted.get("TargetGrants"):
        raise S3Error("NotImplemented", "Grants on log objects are not implemented: use a policy")
    forms = wanted.get("TargetObjectKeyFormat") or {}
    if len(forms) > 1:
        raise S3Error("MalformedXML")
    target: str = wanted["TargetBucket"]
    if not is_bucket_name(target):
        raise S3Error("InvalidTargetBucketForLogging")
    try:
        settings = call.service.settings.of(target.encode())
    except NotFound:
        raise S3Error("InvalidTargetBucketForLogging") from None
    owner = settings.get(OWNER) or call.service.identities.administrator
    if owner != call.owner or settings.has_lock:
        raise S3Error("InvalidTargetBucketForLogging")
    key = key_of(wanted, owner, call.service.region, call.bucket, 0.0)
    if len(key.encode()) > KEY_LIMIT_BYTES:  # no object could have it: nothing would be delivered
        raise S3Error("KeyTooLongError")


HANDLERS: Final[dict[str, Handler]] = {
    "GetBucketLogging": get_bucket_logging,
    "PutBucketLogging": put_bucket_logging,
}
