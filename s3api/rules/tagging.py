"""Tags of objects and buckets: the header's form, the document's form, and S3's limits.

Both forms become a dict in the client's order; documents are in the order of keys. `encode` is the
form of the header, in which tags are also kept. Limits: https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html.
"""

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote_plus, urlencode

from s3api.http.s3_errors import S3Error, invalid_argument

OBJECT_TAGS: Final = 10
BUCKET_TAGS: Final = 50
_KEY_CHARACTERS: Final = 128
_VALUE_CHARACTERS: Final = 256
_PUNCTUATION: Final = frozenset("_.:/=+-@")


def parse_header(text: str) -> dict[str, str]:
    """Returns the tags of `x-amz-tagging`. Raises InvalidArgument, InvalidTag."""
    if not text:
        return {}
    # A tag without a value may lack the sign too.
    halves = [field.partition("=")[::2] for field in text.split("&")]
    try:
        pairs = [(_decoded(name), _decoded(value)) for name, value in halves]
    except UnicodeDecodeError:
        raise _bad_header(text) from None
    if len({key for key, _ in pairs}) != len(pairs):
        raise _bad_header(text)
    return _checked(pairs, OBJECT_TAGS)


def parse_kept(text: str) -> dict[str, str]:
    """Returns the tags that are kept with an object; none if they were overwritten on the mount
    with invalid ones."""
    try:
        return parse_header(text)
    except S3Error:
        return {}


def parse_document(tagging: Mapping[str, Any], limit: int = OBJECT_TAGS) -> dict[str, str]:
    """Returns the tags of a Tagging document. Raises InvalidTag."""
    return _checked(((each["Key"], each["Value"]) for each in tagging.get("TagSet", ())), limit)


def document(tags: Mapping[str, str]) -> dict[str, list[dict[str, str]]]:
    """Returns the Tagging document of `tags`."""
    return {"TagSet": [{"Key": key, "Value": value} for key, value in sorted(tags.items())]}


def encode(tags: Mapping[str, str]) -> str:
    """Returns the header's form."""
    return urlencode(tags)


def _checked(pairs: Iterable[tuple[str, str]], limit: int) -> dict[str, str]:
    tags: dict[str, str] = {}
    for key, value in pairs:
        if not key or len(key) > _KEY_CHARACTERS or not _is_allowed(key):
            raise S3Error(
                "InvalidTag", "The TagKey you have provided is invalid", extra={"TagKey": key}
            )
        if key.lower().startswith("aws:"):
            raise S3Error(
                "InvalidTag", "System tags cannot be added or updated", extra={"TagKey": key}
            )
        if len(value) > _VALUE_CHARACTERS or not _is_allowed(value):
            raise S3Error(
                "InvalidTag",
                "The TagValue you have provided is invalid",
                extra={"TagKey": key, "TagValue": value},
            )
        if key in tags:
            raise S3Error(
                "InvalidTag",
                "Cannot provide multiple Tags with the same key",
                extra={"TagKey": key},
            )
        tags[key] = value
    if len(tags) > limit:
        raise S3Error("InvalidTag", f"There can be at most {limit} tags")
    return tags


def _decoded(text: str) -> str:
    return unquote_plus(text, errors="strict")


def _is_allowed(text: str) -> bool:
    """Returns whether S3 takes the text: letters, digits and separators of every script, and some
    punctuation."""
    return all(each in _PUNCTUATION or unicodedata.category(each)[0] in "LNZ" for each in text)


def _bad_header(text: str) -> S3Error:
    return invalid_argument(
        "x-amz-tagging",
        text,
        "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters"
        " without tag name duplicates.",
    )
