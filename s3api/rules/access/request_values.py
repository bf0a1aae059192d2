"""The condition keys of a request: the values that policies can ask about.

Source: "Condition keys for Amazon S3" in the Service Authorization Reference, and the global
condition keys of the IAM User Guide. Keys are in lower case; a key that has no value in a request
is absent. Headers have names in lower case, both headers and query are decoded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import unquote

from s3api.rules.access.policy import Requester

Values = dict[str, tuple[str, ...]]
REQUEST_TAGS: Final = "s3:requestobjecttag"
"""The beginning of the condition keys of a request's own tags."""

_HEADERS: Final = {
    "aws:referer": "referer",
    "aws:useragent": "user-agent",
    "s3:if-match": "if-match",
    "s3:if-none-match": "if-none-match",
    "s3:object-lock-legal-hold": "x-amz-object-lock-legal-hold",
    "s3:object-lock-mode": "x-amz-object-lock-mode",
    "s3:object-lock-retain-until-date": "x-amz-object-lock-retain-until-date",
    "s3:x-amz-acl": "x-amz-acl",
    "s3:x-amz-content-sha256": "x-amz-content-sha256",
    "s3:x-amz-grant-full-control": "x-amz-grant-full-control",
    "s3:x-amz-grant-read": "x-amz-grant-read",
    "s3:x-amz-grant-read-acp": "x-amz-grant-read-acp",
    "s3:x-amz-grant-write": "x-amz-grant-write",
    "s3:x-amz-grant-write-acp": "x-amz-grant-write-acp",
    "s3:x-amz-metadata-directive": "x-amz-metadata-directive",
    "s3:x-amz-object-ownership": "x-amz-object-ownership",
    "s3:x-amz-server-side-encryption": "x-amz-server-side-encryption",
    "s3:x-amz-storage-class": "x-amz-storage-class",
    "s3:x-amz-website-redirect-location": "x-amz-website-redirect-location",
}
_QUERY: Final = {
    "s3:delimiter": "delimiter",
    "s3:max-keys": "max-keys",
    "s3:prefix": "prefix",
    "s3:versionid": "versionId",
}


@dataclass(frozen=True, slots=True)
class SignatureKind:
    """The way in which a request is signed: `version` AWS4-HMAC-SHA256 or AWS, `place` REST-HEADER,
    REST-QUERY-STRING or POST, `age_ms` the signature's age."""

    version: str
    place: str
    age_ms: int


def request_values(
    *,
    caller: Requester,
    source_ip: str,
    secure: bool,
    now: datetime,
    headers: Mapping[str, str],
    query: Mapping[str, str],
    signed: SignatureKind | None,
) -> Values:
    """Returns the values of a request; tags come with `with_request_tags`, `with_existing_tags`."""
    values: Values = {
        "aws:sourceip": (source_ip,),
        "aws:securetransport": ("true" if secure else "false",),
        "aws:currenttime": (now.isoformat(),),
        "aws:epochtime": (str(int(now.timestamp())),),
        "aws:principaltype": ("Anonymous" if caller.name is None else "User",),
    }
    values |= {key: (headers[name],) for key, name in _HEADERS.items() if name in headers}
    values |= {key: (query[name],) for key, name in _QUERY.items() if name in query}
    if "x-amz-copy-source" in headers:
        values["s3:x-amz-copy-source"] = (_source(headers["x-amz-copy-source"]),)
    if caller.name is not None:
        values["aws:username"] = (caller.name,)
        values["aws:userid"] = (caller.canonical_id,)
        values["aws:principalarn"] = (caller.arn,)
        values["aws:principalaccount"] = (caller.account,)
    if signed is not None:
        values["s3:signatureversion"] = (signed.version,)
        values["s3:authtype"] = (signed.place,)
        values["s3:signatureage"] = (str(signed.age_ms),)
    return values


def with_request_tags(values: Values, tags: Mapping[str, str]) -> Values:
    """Returns the values, with the tags that a request brings for its object."""
    if not tags:
        return values
    named = {f"{REQUEST_TAGS}/{key.lower()}": (value,) for key, value in tags.items()}
    return values | named | {f"{REQUEST_TAGS}keys": tuple(tags)}


def with_existing_tags(values: Values, tags: Mapping[str, str]) -> Values:
    """Returns the values, with the tags that the object has."""
    return values | {f"s3:existingobjecttag/{key.lower()}": (value,) for key, value in tags.items()}


def _source(header: str) -> str:
    """Returns `bucket/key` of a copy's source, without its version."""
    return unquote(header.partition("?versionId=")[0]).removeprefix("/")
