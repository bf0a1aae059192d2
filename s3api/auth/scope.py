"""The parts that a signature of version 4 names besides itself: the access key with its scope, and
the headers.

A client sends few of them, so the last 1,024 of each are remembered; their length is limited before
that.
"""

import functools
import re
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from s3api.auth.signing import TERMINATOR

Names = tuple[tuple[bytes, ...], frozenset[bytes]]
"""The names in the order in which they are signed, and as a set."""
MAX_CREDENTIAL: Final = 256
MAX_NAMES: Final = 4096
_credential_of: Final = re.compile(
    rb"([!-.0-~]+)/(([0-9]{8})/([A-Za-z0-9._-]+)/([a-z0-9-]+)/%b)" % TERMINATOR
).fullmatch
_are_names: Final = re.compile(rb"[a-z0-9!#$&'*+.^_`|~-]+(?:;[a-z0-9!#$&'*+.^_`|~-]+)*").fullmatch


class Credential(msgspec.Struct, frozen=True):
    """The access key and the scope that a signature names."""

    access_key: str
    date: bytes
    region: bytes
    service: bytes
    scope: bytes


def parse_credential(text: bytes) -> Credential | None:
    """Parses `KEY/20130524/us-east-1/s3/aws4_request`, encoded or not; None if it is not of that
    form."""
    return short_credential(text) if len(text) <= MAX_CREDENTIAL else None


@functools.lru_cache(maxsize=1024)
def short_credential(text: bytes) -> Credential | None:
    """Does what `parse_credential` does, for a text of up to MAX_CREDENTIAL bytes."""
    match = _credential_of(unquote_to_bytes(text))
    if match is None:
        return None
    access_key, scope, date, region, service = match.groups()
    return Credential(access_key.decode(), date, region, service, scope)


def parse_names(text: bytes) -> Names | None:
    """Parses the signed headers `host;x-amz-date`, encoded or not; None if they are no names of
    headers in lower case."""
    return short_names(text) if len(text) <= MAX_NAMES else None


@functools.lru_cache(maxsize=1024)
def short_names(text: bytes) -> Names | None:
    """Does what `parse_names` does, for a text of up to MAX_NAMES bytes."""
    decoded = unquote_to_bytes(text)
    if not _are_names(decoded):
        return None
    names = tuple(decoded.split(b";"))
    return names, frozenset(names)
