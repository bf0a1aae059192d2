"""The operations: a module for each group of verbs, `Call` in, response out.

A handler finds its parameters parsed and its caller allowed. What it raises becomes S3's error.
"""

from collections.abc import Callable
from typing import Final

from s3api.call import Call, Handler
from s3api.model.routing import OPTIONS_OBJECT, POST_OBJECT, STS
from s3api.operations import (
    acls,
    attributes,
    bucket_acls,
    bucket_logging,
    bucket_tags,
    buckets,
    completing,
    copying,
    cors,
    cors_settings,
    deleting,
    encryption,
    forms,
    lifecycle,
    listing,
    locks,
    multipart,
    object_lock,
    ownership,
    parts,
    policies,
    public_access,
    reading,
    refused,
    sts,
    tags,
    versioning,
    writing,
)

HANDLERS: Final[dict[str, Handler]] = {
    **acls.HANDLERS,
    **attributes.HANDLERS,
    **bucket_acls.HANDLERS,
    **bucket_logging.HANDLERS,
    **bucket_tags.HANDLERS,
    **buckets.HANDLERS,
    **completing.HANDLERS,
    **copying.HANDLERS,
    **cors_settings.HANDLERS,
    **deleting.HANDLERS,
    **encryption.HANDLERS,
    **lifecycle.HANDLERS,
    **listing.HANDLERS,
    **locks.HANDLERS,
    **multipart.HANDLERS,
    **object_lock.HANDLERS,
    **ownership.HANDLERS,
    **parts.HANDLERS,
    **policies.HANDLERS,
    **public_access.HANDLERS,
    **reading.HANDLERS,
    **refused.HANDLERS,
    **tags.HANDLERS,
    **versioning.HANDLERS,
    **writing.HANDLERS,
}

SPECIAL: Final[dict[str, Handler]] = {
    OPTIONS_OBJECT: cors.preflight,
    POST_OBJECT: forms.post_object,
    STS: sts.answer,
}
"""These are asked by nobody, or find out themselves by whom."""

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

BEFORE_DOCUMENT: Final[dict[str, Callable[[Call], None]]] = {
    "DeleteObjects": deleting.refuse_strangers
}
"""What of that can be asked before the document has been read."""
