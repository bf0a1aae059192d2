"""The four switches of a bucket against public access."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.http.s3_errors import S3Error
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules.access.public_access import PublicAccessBlock
from s3api.storage.bucket_settings import PUBLIC_ACCESS


async def get_public_access_block(call: Call) -> Response:
    kept = call.settings.get(PUBLIC_ACCESS)
    if kept is None:
        raise S3Error("NoSuchPublicAccessBlockConfiguration", extra={"BucketName": call.bucket})
    return answer(call, {"PublicAccessBlockConfiguration": kept})


async def put_public_access_block(call: Call) -> Response:
    block = PublicAccessBlock.parse(call.params["PublicAccessBlockConfiguration"])
    await keep(call, PUBLIC_ACCESS, block.document())
    return answer(call)


async def delete_public_access_block(call: Call) -> Response:
    await forget(call, PUBLIC_ACCESS)
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeletePublicAccessBlock": delete_public_access_block,
    "GetPublicAccessBlock": get_public_access_block,
    "PutPublicAccessBlock": put_public_access_block,
}
