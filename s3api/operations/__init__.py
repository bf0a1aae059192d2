"""The operations: a module for each group of verbs, `Call` in, response out.

A handler finds its parameters parsed and its caller allowed. What it raises becomes S3's error.
"""

from typing import Final

from s3api.call import Handler
from s3api.operations import (
    acls,
    attributes,
    buckets,
    completing,
    copying,
    deleting,
    listing,
    locks,
    multipart,
    parts,
    reading,
    tags,
    writing,
)

HANDLERS: Final[dict[str, Handler]] = {
    **acls.HANDLERS,
    **attributes.HANDLERS,
    **buckets.HANDLERS,
    **completing.HANDLERS,
    **copying.HANDLERS,
    **deleting.HANDLERS,
    **listing.HANDLERS,
    **locks.HANDLERS,
    **multipart.HANDLERS,
    **parts.HANDLERS,
    **reading.HANDLERS,
    **tags.HANDLERS,
    **writing.HANDLERS,
}

OF_EXISTING_OBJECTS: Final = frozenset(
    (
        "DeleteObjectTagging",
        "GetObject",
        "GetObjectAcl",
        "GetObjectAttributes",
        "GetObjectLegalHold",
        "GetObjectRetention",
        "GetObjectTagging",
        "HeadObject",
        "PutObjectAcl",
        "PutObjectLegalHold",
        "PutObjectRetention",
        "PutObjectTagging",
        "RestoreObject",
    )
)
"""Whether they are allowed may depend on the object's own ACL and tags."""

OPEN: Final = frozenset(("DeleteObjects", "CopyObject", "UploadPartCopy"))
"""These ask for permission themselves: for each object, or for two."""
