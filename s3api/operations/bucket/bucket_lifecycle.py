"""The lifecycle rules of a bucket; `s3api.server.lifecycle_worker` carries them out."""

import secrets
from collections.abc import Iterator
from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules import lifecycle
from s3api.storage.bucket_settings import LIFECYCLE


async def get_bucket_lifecycle_configuration(call: Call) -> Response:
    rules = call.settings.get(LIFECYCLE)
    if rules is None:
        raise S3Error("NoSuchLifecycleConfiguration", extra={"BucketName": call.bucket})
    return answer(call, {"Rules": rules})


async def put_bucket_lifecycle_configuration(call: Call) -> Response:
    """Replaces all rules."""
    configuration = call.params.get("LifecycleConfiguration")
    if configuration is None:
        raise S3Error("MissingRequestBodyError")
    rules = lifecycle.validate(configuration["Rules"], _ids())
    await keep(call, LIFECYCLE, rules)
    return answer(call)


async def delete_bucket_lifecycle(call: Call) -> Response:
    await forget(call, LIFECYCLE)
    return answer(call)


def _ids() -> Iterator[str]:
    while True:
        yield secrets.token_hex(16)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketLifecycle": delete_bucket_lifecycle,
    "GetBucketLifecycleConfiguration": get_bucket_lifecycle_configuration,
    "PutBucketLifecycleConfiguration": put_bucket_lifecycle_configuration,
}
