"""CORS, for browsers of other origins: preflight requests, and the headers of all answers."""

from kvfs.http.api import Response
from kvfs.objects.object_errors import NoSuchBucket
from s3api.http.request_context import Call
from s3api.http.s3_errors import Headers
from s3api.rules import cors
from s3api.storage.bucket_settings import CORS


async def preflight(call: Call) -> Response:
    """Returns the answer to OPTIONS, which nobody signs. Raises S3Error."""
    told = cors.preflight(
        call.settings.get(CORS),
        _header(call, b"origin"),
        _header(call, b"access-control-request-method"),
        _header(call, b"access-control-request-headers"),
    )
    return Response(200, _fields(told))


def headers(call: Call) -> Headers:
    """Returns the headers to add to the answer to a request that names its origin, even an error.
    Never raises."""
    origin = _header(call, b"origin")
    try:
        rules = call.settings.get(CORS) if call.bucket else None
    except NoSuchBucket:
        return []
    if rules is None or origin is None:
        return []
    # A request that names a method, as a preflight does, is answered for that one.
    method = _header(call, b"access-control-request-method") or call.head.method
    return _fields(cors.response_headers(rules, origin, method))


def _header(call: Call, name: bytes) -> str | None:
    value = call.fields.get(name)
    return None if value is None else value.decode("latin-1")


def _fields(told: dict[str, str]) -> Headers:
    return [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
