"""What handlers make their responses of."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvfs.wire.http import Response
from s3api.call import Call
from s3api.errors import S3Error
from s3api.model.serialising import serialise
from s3api.rules import metadata


def answer(call: Call, result: Mapping[str, Any] | None = None) -> Response:
    """The operation's answer with these members, as botocore names them."""
    status, headers, document = serialise(call.operation, result or {})
    return Response(status, headers, document)


def stored_headers(kept: Mapping[str, str], key: str) -> dict[str, str]:
    """The headers that GET and HEAD give for what is said about an object."""
    raw = {f"user.s3.{name}".encode(): value.encode() for name, value in kept.items()}
    return metadata.headers(raw, key)


def metadata_of(call: Call) -> dict[str, str]:
    """What the request's headers say about the object that it makes. Raises S3Error."""
    found = metadata.attributes(call.headers())
    return {
        name.removeprefix(b"user.s3.").decode(): value.decode("utf-8", "replace")
        for name, value in found.items()
    }


def no_such(code: str, **extra: str) -> S3Error:
    """The error for what is not there, with its name in the document."""
    return S3Error(code, extra=extra)


def encoded(value: object) -> str:
    """The form in which a document is kept with an object."""
    return msgspec.json.encode(value).decode()
