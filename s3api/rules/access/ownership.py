"""Object ownership: whether a bucket's ACLs count."""

from collections.abc import Mapping
from typing import Any, Final

from s3api.http.s3_errors import S3Error

BUCKET_OWNER_ENFORCED: Final = "BucketOwnerEnforced"
BUCKET_OWNER_PREFERRED: Final = "BucketOwnerPreferred"
OBJECT_WRITER: Final = "ObjectWriter"
_ALL: Final = frozenset({BUCKET_OWNER_ENFORCED, BUCKET_OWNER_PREFERRED, OBJECT_WRITER})


def parse_controls(controls: Mapping[str, Any]) -> str:
    """Returns the ownership that an OwnershipControls document sets. Raises MalformedXML."""
    rules = controls.get("Rules", ())
    if len(rules) != 1:
        raise S3Error("MalformedXML")
    return parse_ownership(rules[0].get("ObjectOwnership", ""))


def parse_ownership(value: str) -> str:
    """Returns the ownership of `x-amz-object-ownership`. Raises MalformedXML."""
    if value not in _ALL:
        raise S3Error("MalformedXML", f"{value} is no object ownership")
    return value


def controls(ownership: str) -> dict[str, list[dict[str, str]]]:
    """Returns the OwnershipControls document."""
    return {"Rules": [{"ObjectOwnership": ownership}]}


def has_acls(ownership: str) -> bool:
    """Returns whether ACLs count under this ownership."""
    return ownership != BUCKET_OWNER_ENFORCED
