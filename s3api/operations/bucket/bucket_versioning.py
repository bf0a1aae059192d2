"""Versioning of a bucket."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import keep
from s3api.rules import object_lock
from s3api.storage.bucket_settings import VERSIONING


async def get_bucket_versioning(call: Call) -> Response:
    """Returns the status; empty if versions were never kept."""
    return answer(call, call.settings.get(VERSIONING))


async def put_bucket_versioning(call: Call) -> Response:
    """Sets the status. Once on, it can be suspended, except in a bucket with object lock."""
    configuration = call.params["VersioningConfiguration"]
    status = configuration.get("Status")
    if status is None:
        raise S3Error("IllegalVersioningConfigurationException")
    if configuration.get("MFADelete") == "Enabled" or b"x-amz-mfa" in call.fields:
        raise S3Error("NotImplemented", "MFA delete is not implemented: there are no MFA devices")
    object_lock.check_versioning(status, enabled=call.settings.has_lock)
    await keep(call, VERSIONING, {"Status": status})
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "GetBucketVersioning": get_bucket_versioning,
    "PutBucketVersioning": put_bucket_versioning,
}
