"""Building blocks of the handlers' responses."""

from collections.abc import Mapping
from typing import Any

import msgspec

from kvfs.http.api import Response
from s3api.http.request_context import Call
from s3api.model.serialising import serialiser
from s3api.rules import metadata
from s3api.rules.checksums import ALGORITHMS


def answer(call: Call, result: Mapping[str, Any] | None = None) -> Response:
    """Returns the operation's answer with these members, as botocore names them."""
    status, headers, document = serialiser(call.operation).serialise(result or {})
    return Response(status, headers, None if status == 204 else document)


def stored_headers(kept: Mapping[str, str], key: str) -> dict[str, str]:
    """Returns the headers of GET and HEAD for an object's metadata."""
    raw = {f"user.s3.{name}".encode(): value.encode() for name, value in kept.items()}
    return metadata.headers(raw, key)


def metadata_of(call: Call) -> dict[str, str]:
    """Returns the metadata in a request's headers for the object that it makes. Raises S3Error."""
    if not metadata.are_named(call.fields):
        return {}
    found = metadata.attributes(call.headers())
    return {
        name.removeprefix(b"user.s3.").decode(): value.decode("utf-8", "replace")
        for name, value in found.items()
    }


def checksum_members(kept: Mapping[str, str]) -> dict[str, str]:
    """Returns the checksum that is kept with an object, as botocore names it; empty if there is
    none."""
    found = {
        each.member: kept[each.kept_as] for each in ALGORITHMS.values() if each.kept_as in kept
    }
    return found | {"ChecksumType": kept["checksum.type"]} if "checksum.type" in kept else found


def encoded(value: object) -> str:
    """Returns the form in which a document is kept with an object."""
    return msgspec.json.encode(value).decode()
