"""The header `x-amz-copy-source` of CopyObject and UploadPartCopy.

    [/]BUCKET/KEY[?versionId=ID], the key (and the whole) in percent-encoding

https://docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html
"""

from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from s3api.http.s3_errors import S3Error

_VERSION: Final = "?versionId="


class CopySource(NamedTuple):
    """An object to copy from; the version is empty for the current one."""

    bucket: str
    key: str
    version: str


def parse_copy_source(header: str) -> CopySource:
    """Parses the header, a Latin-1 string. Raises InvalidArgument; NotImplemented for access
    points."""
    name, _, version = header.partition(_VERSION)
    if name.startswith("arn:"):
        raise S3Error("NotImplemented", "Copying from an access point is not supported")
    try:
        text = unquote_to_bytes(name.encode("latin-1")).decode()
    except UnicodeError:
        raise _invalid(header) from None
    bucket, slash, key = text.removeprefix("/").partition("/")
    if not bucket or not slash or not key:
        raise _invalid(header)
    if _VERSION in header and not version:
        raise _invalid(header, "Version id cannot be the empty string")
    return CopySource(bucket, key, version)


def _invalid(header: str, message: str = "") -> S3Error:
    return S3Error(
        "InvalidArgument",
        message or "Copy Source must mention the source bucket and key: sourcebucket/sourcekey",
        extra={"ArgumentName": "x-amz-copy-source", "ArgumentValue": header},
    )
