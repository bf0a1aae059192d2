"""Changes of a bucket's settings by handlers."""

from s3api.http.request_context import Call
from s3api.storage.bucket_settings import pack


async def keep(call: Call, name: str, value: object) -> None:
    """Sets a setting; it is on disk when this returns."""
    await call.blocking(lambda: call.store.buckets.put_setting(call.raw_bucket, name, pack(value)))


async def forget(call: Call, name: str) -> None:
    """Removes a setting, if it is set."""
    await call.blocking(lambda: call.store.buckets.delete_setting(call.raw_bucket, name))
