"""User metadata and standard headers of objects, and the extended attributes that keep them.

`getfattr -d` on the mount shows them: `user.s3.content-type`, `user.s3.meta.<name>`. Values are
UTF-8. In headers, characters beyond printable ASCII travel as RFC 2047 encoded words, which S3
writes and reads: https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingMetadata.html.
"""

import base64
import binascii
import mimetypes
import re
from collections.abc import Mapping
from typing import Final

from s3api.http.s3_errors import S3Error

DEFAULT_CONTENT_TYPE: Final = "binary/octet-stream"
USER_METADATA_BYTES: Final = 2048
STORAGE_CLASS: Final = "STANDARD"

_META_ATTRIBUTE: Final = b"user.s3.meta."
_WORD: Final = re.compile(r"=\?utf-8\?([bq])\?([^?\s]*)\?=", re.IGNORECASE)
_BETWEEN_WORDS: Final = re.compile(r"(?<=\?=)\s+(?==\?utf-8\?)", re.IGNORECASE)
_META_HEADER: Final = "x-amz-meta-"
# Header -> attribute.
_STORED: Final = {
    "cache-control": b"user.s3.cache-control",
    "content-disposition": b"user.s3.content-disposition",
    "content-encoding": b"user.s3.content-encoding",
    "content-language": b"user.s3.content-language",
    "content-type": b"user.s3.content-type",
    "expires": b"user.s3.expires",
    "x-amz-website-redirect-location": b"user.s3.website-redirect-location",
}
_NAMES: Final = frozenset((*(name.encode() for name in _STORED), b"x-amz-storage-class"))
_HEADER_OF: Final = {attribute: header for header, attribute in _STORED.items()}
_OVERRIDES: Final = {
    f"response-{name}": name
    for name in (
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
    )
}
# The table that comes with Python: the host's own would make answers differ from host to host.
_TYPES: Final = mimetypes.MimeTypes().types_map[True] | {
    ".bz2": "application/x-bzip2",
    ".gz": "application/gzip",
    ".xz": "application/x-xz",
    ".zst": "application/zstd",
}
_ATTRIBUTE_NAME_BYTES: Final = 255


def are_named(fields: Mapping[bytes, bytes]) -> bool:
    """Returns whether headers (names in lower case) name anything that `attributes` takes."""
    return not _NAMES.isdisjoint(fields) or b"x-amz-meta-" in b" ".join(fields)


def attributes(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """Returns the attributes that a PUT, POST or CreateMultipartUpload with these headers (names in
    lower case) stores: attribute -> value. Raises MetadataTooLarge, InvalidStorageClass,
    InvalidArgument."""
    _check_storage_class(headers.get("x-amz-storage-class"))
    _check_redirect(headers.get("x-amz-website-redirect-location"))
    stored: dict[bytes, bytes] = {}
    for name, value in headers.items():
        if name.startswith(_META_HEADER):
            stored[_META_ATTRIBUTE + _meta_name(name)] = _bytes(decode(value))
        elif name in _STORED:
            kept = _without_aws_chunked(value) if name == "content-encoding" else value
            if kept:
                stored[_STORED[name]] = _bytes(kept)
    _check_size(stored)
    return stored


def headers(stored: Mapping[bytes, bytes], key: str) -> dict[str, str]:
    """Returns the headers that a GET or HEAD of `key` gives for the stored attributes; the content
    type is guessed from the key if none was given. Other attributes are ignored."""
    answer = {"content-type": guess_type(key)}
    for attribute, value in stored.items():
        if attribute in _HEADER_OF:
            answer[_HEADER_OF[attribute]] = _text(value)
        elif attribute.startswith(_META_ATTRIBUTE):
            name = _text(attribute.removeprefix(_META_ATTRIBUTE))
            answer[_META_HEADER + name] = encode(_text(value))
    return answer


def is_metadata(attribute: bytes) -> bool:
    """Returns whether a copy that replaces metadata drops this attribute."""
    return attribute in _HEADER_OF or attribute.startswith(_META_ATTRIBUTE)


def overrides(query: Mapping[str, str], *, anonymous: bool) -> dict[str, str]:
    """Returns the headers that `response-*` parameters set. Raises InvalidRequest,
    InvalidArgument."""
    found = {_OVERRIDES[name]: value for name, value in query.items() if name in _OVERRIDES}
    if found and anonymous:
        raise S3Error(
            "InvalidRequest",
            "Request specific response headers cannot be used for anonymous GET requests.",
        )
    for value in found.values():
        if not value.isascii() or not value.isprintable():
            raise S3Error("InvalidArgument", "Header value cannot be represented using ISO-8859-1.")
    return found


def guess_type(key: str) -> str:
    """Returns the content type that a key's name suggests."""
    _, dot, suffix = key.rpartition("/")[2].rpartition(".")
    return _TYPES.get(dot + suffix.lower(), DEFAULT_CONTENT_TYPE)


def encode(value: str) -> str:
    """Returns the form of a metadata value in a header."""
    if value.isascii() and value.isprintable():
        return value
    return f"=?UTF-8?B?{base64.b64encode(value.encode()).decode('ascii')}?="


def decode(value: str) -> str:
    """Returns the value that a header means: encoded words of UTF-8 are decoded, anything else is
    taken as it is. White space between two encoded words is none (RFC 2047, section 6.2)."""
    if "=?" not in value:
        return value
    return _WORD.sub(_decode_word, _BETWEEN_WORDS.sub("", value))


def _decode_word(match: re.Match[str]) -> str:
    try:
        data = match[2].encode("ascii")
        if match[1] in "bB":
            return base64.b64decode(data, validate=True).decode()
        return binascii.a2b_qp(data, header=True).decode()
    except ValueError:
        return match[0]


def _meta_name(header: str) -> bytes:
    name = _bytes(header.removeprefix(_META_HEADER))
    if not name or len(_META_ATTRIBUTE) + len(name) > _ATTRIBUTE_NAME_BYTES:
        raise S3Error("InvalidArgument", f"The name of the metadata header {header} is not valid")
    return name


def _without_aws_chunked(value: str) -> str:
    """Removes `aws-chunked`, which is how the body travelled and no property of the object; a value
    without it stays as it was written."""
    codings = [each.strip() for each in value.split(",")]
    kept = [each for each in codings if each.lower() != "aws-chunked"]
    return value if len(kept) == len(codings) else ", ".join(kept)


def _check_size(stored: Mapping[bytes, bytes]) -> None:
    size = sum(
        len(name) - len(_META_ATTRIBUTE) + len(value)
        for name, value in stored.items()
        if name.startswith(_META_ATTRIBUTE)
    )
    if size > USER_METADATA_BYTES:
        raise S3Error(
            "MetadataTooLarge",
            "Your metadata headers exceed the maximum allowed metadata size",
            extra={"Size": str(size), "MaxSizeAllowed": str(USER_METADATA_BYTES)},
        )


def _check_storage_class(value: str | None) -> None:
    if value is not None and value != STORAGE_CLASS:
        raise S3Error("InvalidStorageClass", extra={"StorageClassRequested": value})


def _check_redirect(value: str | None) -> None:
    if value is not None and not value.startswith(("/", "http://", "https://")):
        raise S3Error(
            "InvalidArgument",
            "The website redirect location must have a prefix of 'http://' or 'https://' or '/'.",
        )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
