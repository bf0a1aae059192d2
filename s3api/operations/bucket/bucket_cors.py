"""The rules of a bucket for requests that pages of other origins make."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules import cors
from s3api.storage.bucket_settings import CORS


async def get_bucket_cors(call: Call) -> Response:
    rules = call.settings.get(CORS)
    if rules is None:
        raise S3Error("NoSuchCORSConfiguration", extra={"BucketName": call.bucket})
    return answer(call, {"CORSRules": rules})


async def put_bucket_cors(call: Call) -> Response:
    rules = call.params["CORSConfiguration"]["CORSRules"]
    cors.validate(rules)
    await keep(call, CORS, rules)
    return answer(call)


async def delete_bucket_cors(call: Call) -> Response:
    await forget(call, CORS)
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketCors": delete_bucket_cors,
    "GetBucketCors": get_bucket_cors,
    "PutBucketCors": put_bucket_cors,
}
