"""Addresses of requests: bucket, key and query parameters from target and host, and the legal
names.

Keys are percent-decoded exactly once and otherwise left as they are: empty segments, a leading `/`,
`.` and `..`, `+` and any UTF-8 are parts of a key like others. It knows nothing of operations.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote_to_bytes

from s3api.http.s3_errors import S3Error, invalid_argument

KEY_LIMIT_BYTES: Final = 1024

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html; that a label
# neither begins nor ends with a hyphen is older than that page, and DNS's.
_BUCKET: Final = re.compile(
    r"(?=.{3,63}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*\Z"
)
_RESERVED_STARTS: Final = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_ENDS: Final = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
# Parameters of the signature itself.
_PRESIGNING: Final = frozenset(
    f"x-amz-{name}"
    for name in (
        *("algorithm", "content-sha256", "credential", "date"),
        *("expires", "security-token", "signature", "signedheaders"),
    )
)
_HOSTS: Final = 256
_PLAIN_FIELD: Final = re.compile(rb"[A-Za-z0-9=._~-]*").fullmatch
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]").search
_IN_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")


ResourceAddress = tuple[str | None, str | None]
"""Bucket and key of a request. No bucket: the service itself; no key: the bucket."""


def split_target(target: bytes) -> tuple[bytes, dict[str, str]]:
    """Returns the raw path and the decoded query parameters of a request target.

    The first value of a repeated parameter counts. `+` in a query is a space, as in forms. Raises
    InvalidURI.
    """
    path, _, query = target.partition(b"?")
    parameters: dict[str, str] = {}
    for field in query.split(b"&") if query else ():
        if _PLAIN_FIELD(field):  # most are, and decode() costs more
            name, _, value = field.decode("ascii").partition("=")
        else:
            raw_name, _, raw_value = field.replace(b"+", b" ").partition(b"=")
            name, value = decode(raw_name), decode(raw_value)
        if name or value:
            parameters.setdefault(name, value)
    return path, parameters


def address(path: bytes, host: str, domains: tuple[str, ...]) -> ResourceAddress:
    """Returns bucket and key of a raw path, for a request to `host` (the Host header as it came).

    A host that is a subdomain of one of `domains` names the bucket (virtual-hosted addressing), any
    other host leaves it to the path. Raises InvalidURI and KeyTooLongError.
    """
    if not path.startswith(b"/"):
        raise S3Error("InvalidURI")
    bucket = bucket_of_host(host, domains)
    if bucket is None and b"%" not in path and path.isascii() and len(path) <= KEY_LIMIT_BYTES:
        name, _, plain = path.decode("ascii")[1:].partition("/")  # as most are
        if plain:
            return name, plain
    rest = path[1:]
    if bucket is None:
        if not rest:
            return None, None
        raw_bucket, _, rest = rest.partition(b"/")
        bucket = decode(raw_bucket)
    if not rest:
        return bucket, None
    key = unquote_to_bytes(rest) if b"%" in rest else rest
    if len(key) > KEY_LIMIT_BYTES:
        limits = {"Size": str(len(key)), "MaxSizeAllowed": str(KEY_LIMIT_BYTES)}
        raise S3Error("KeyTooLongError", extra=limits)
    return bucket, decode(rest)


@functools.lru_cache(_HOSTS)
def bucket_of_host(host: str, domains: tuple[str, ...]) -> str | None:
    """Returns the bucket that a Host header names under one of `domains`, None if it names none."""
    name = host.lower()
    if not name.endswith("]"):  # an IPv6 address without a port has colons of its own
        name = name.rsplit(":", 1)[0] if ":" in name else name
    found = None
    for domain in domains:
        if name == domain:
            return None
        if name.endswith("." + domain):
            bucket = name[: -len(domain) - 1]
            # Of domains within each other the longest counts.
            found = bucket if found is None or len(bucket) < len(found) else found
    return found


def decode(raw: bytes) -> str:
    """Percent-decodes once. Raises InvalidURI for an invalid escape or invalid UTF-8."""
    if b"%" in raw:
        if _IN_ESCAPE.search(raw):
            raise S3Error("InvalidURI")
        raw = unquote_to_bytes(raw)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise S3Error("InvalidURI") from None


def is_bucket_name(name: str) -> bool:
    """Returns whether S3's naming rules allow a bucket of this name."""
    return (
        _BUCKET.match(name) is not None
        and not name.startswith(_RESERVED_STARTS)
        and not name.endswith(_RESERVED_ENDS)
        and not _is_ip_address(name)
    )


def check_bucket_name(name: str) -> None:
    """Raises InvalidBucketName for a name that S3's naming rules do not allow."""
    if not is_bucket_name(name):
        raise S3Error("InvalidBucketName", extra={"BucketName": name})


def with_hoisted(headers: Mapping[bytes, bytes], query: Mapping[str, str]) -> Mapping[bytes, bytes]:
    """Returns the headers of a request with those that presigning of version 4 moved into its
    query, as some SDKs do with every x-amz- header; one that was sent as a header wins. Version 2
    signs other ones: `auth.authenticate.hoisted`. Only for a query whose signature is verified:
    nothing vouches for another.

    Raises InvalidArgument for a value that no header could have.
    """
    hoisted: dict[bytes, bytes] = {}
    for sent, value in query.items():
        name = sent.lower()
        if name.startswith("x-amz-") and name not in _PRESIGNING:
            if not value.isprintable() and _CONTROL(value):
                raise invalid_argument(sent, "", "A header holds no control characters")
            hoisted[name.encode("latin-1", "replace")] = value.encode()
    return {**hoisted, **headers} if hoisted else headers


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.IPv4Address(name)
    except ValueError:
        return False
    return True
