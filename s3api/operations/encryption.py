"""Default encryption: there is none, and none is promised."""

from typing import Final

from kvfs.wire.http import Response
from s3api.call import Call, Handler
from s3api.operations.answers import answer
from s3api.rules import encryption


async def get_bucket_encryption(_: Call) -> Response:
    raise encryption.no_configuration()


async def put_bucket_encryption(_: Call) -> Response:
    raise encryption.refuse_configuration()


async def delete_bucket_encryption(call: Call) -> Response:
    """Nothing is there to delete, as after S3's own."""
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketEncryption": delete_bucket_encryption,
    "GetBucketEncryption": get_bucket_encryption,
    "PutBucketEncryption": put_bucket_encryption,
}
