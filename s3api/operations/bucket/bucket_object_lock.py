"""Object lock of a bucket, and the retention of new objects."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import keep
from s3api.rules import object_lock
from s3api.storage.bucket_settings import OBJECT_LOCK


async def get_object_lock_configuration(call: Call) -> Response:
    kept = call.settings.get(OBJECT_LOCK)
    if kept is None:
        raise S3Error("ObjectLockConfigurationNotFoundError", extra={"BucketName": call.bucket})
    return answer(call, {"ObjectLockConfiguration": kept})


async def put_object_lock_configuration(call: Call) -> Response:
    """Sets object lock. Locks protect versions: the bucket must keep them. Once it has a lock it
    has it for good."""
    if call.settings.versioning != "Enabled":
        raise S3Error(
            "InvalidBucketState", "Versioning must be 'Enabled' on the bucket to apply Object Lock"
        )
    document = call.params.get("ObjectLockConfiguration")
    if document is None:
        raise S3Error("MissingRequestBodyError")
    await keep(call, OBJECT_LOCK, object_lock.parse_configuration(document))
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "GetObjectLockConfiguration": get_object_lock_configuration,
    "PutObjectLockConfiguration": put_object_lock_configuration,
}
