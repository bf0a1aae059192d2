"""The tags of a bucket."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules import tagging
from s3api.storage.bucket_settings import TAGGING


async def get_bucket_tagging(call: Call) -> Response:
    tags = call.settings.get(TAGGING)
    if not tags:
        raise S3Error("NoSuchTagSet", extra={"BucketName": call.bucket})
    return answer(call, tagging.document(tags))


async def put_bucket_tagging(call: Call) -> Response:
    """Replaces all tags."""
    tags = tagging.parse_document(call.params["Tagging"], tagging.BUCKET_TAGS)
    await keep(call, TAGGING, tags)
    return Response(204)


async def delete_bucket_tagging(call: Call) -> Response:
    await forget(call, TAGGING)
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketTagging": delete_bucket_tagging,
    "GetBucketTagging": get_bucket_tagging,
    "PutBucketTagging": put_bucket_tagging,
}
