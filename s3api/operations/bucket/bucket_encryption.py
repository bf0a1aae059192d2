"""Default encryption: AES256 if the storage encrypts, else none."""

from typing import Final

from kvfs.http.api import Response
from s3api.http.request_context import Call, Handler
from s3api.operations.answers import answer
from s3api.operations.bucket.bucket_config import forget, keep
from s3api.rules import encryption
from s3api.storage.bucket_settings import ENCRYPTION


async def get_bucket_encryption(call: Call) -> Response:
    """Returns the configuration that was put, as long as objects are encrypted so."""
    kept = call.settings.get(ENCRYPTION)
    if kept is None or not call.service.encrypted:
        raise encryption.no_configuration()
    return answer(call, {"ServerSideEncryptionConfiguration": kept})


async def put_bucket_encryption(call: Call) -> Response:
    configuration = call.params["ServerSideEncryptionConfiguration"]
    encryption.check_configuration(configuration, encrypted=call.service.encrypted)
    await keep(call, ENCRYPTION, configuration)
    return answer(call)


async def delete_bucket_encryption(call: Call) -> Response:
    await forget(call, ENCRYPTION)
    return answer(call)


HANDLERS: Final[dict[str, Handler]] = {
    "DeleteBucketEncryption": delete_bucket_encryption,
    "GetBucketEncryption": get_bucket_encryption,
    "PutBucketEncryption": put_bucket_encryption,
}
