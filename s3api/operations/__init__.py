"""The operations: a module for each group of verbs, `Call` in, response out.

A handler finds its parameters parsed and its caller allowed. Its exceptions become S3's errors.
"""

from collections.abc import Callable
from typing import Final

from s3api.http.request_context import Call, Handler
from s3api.model.routing import OPTIONS_OBJECT, POST_OBJECT, STS
from s3api.operations import cors_headers, sts
from s3api.operations.bucket import (
    bucket_acls,
    bucket_cors,
    bucket_encryption,
    bucket_lifecycle,
    bucket_logging,
    bucket_object_lock,
    bucket_ownership,
    bucket_policies,
    bucket_public_access,
    bucket_tags,
    bucket_versioning,
    buckets,
    refused_configurations,
)
from s3api.operations.object import (
    copy_object,
    delete_objects,
    get_object,
    list_objects,
    object_acls,
    object_attributes,
    object_tags,
    post_object,
    put_object,
    retention,
)
from s3api.operations.upload import complete_upload, multipart, upload_part

HANDLERS: Final[dict[str, Handler]] = {
    **object_acls.HANDLERS,
    **object_attributes.HANDLERS,
    **bucket_acls.HANDLERS,
    **bucket_logging.HANDLERS,
    **bucket_tags.HANDLERS,
    **buckets.HANDLERS,
    **complete_upload.HANDLERS,
    **copy_object.HANDLERS,
    **bucket_cors.HANDLERS,
    **delete_objects.HANDLERS,
    **bucket_encryption.HANDLERS,
    **bucket_lifecycle.HANDLERS,
    **list_objects.HANDLERS,
    **retention.HANDLERS,
    **multipart.HANDLERS,
    **bucket_object_lock.HANDLERS,
    **bucket_ownership.HANDLERS,
    **upload_part.HANDLERS,
    **bucket_policies.HANDLERS,
    **bucket_public_access.HANDLERS,
    **get_object.HANDLERS,
    **refused_configurations.HANDLERS,
    **object_tags.HANDLERS,
    **bucket_versioning.HANDLERS,
    **put_object.HANDLERS,
}

SPECIAL: Final[dict[str, Handler]] = {
    OPTIONS_OBJECT: cors_headers.preflight,
    POST_OBJECT: post_object.post_object,
    STS: sts.answer,
}
"""Operations whose caller is nobody, or that find out themselves who it is."""

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
"""Operations whose permission may depend on the object's own ACL and tags."""

OPEN: Final = frozenset(("DeleteObjects", "CopyObject", "UploadPartCopy"))
"""Operations that ask for permission themselves: for each object, or for two."""

BEFORE_DOCUMENT: Final[dict[str, Callable[[Call], None]]] = {
    "DeleteObjects": delete_objects.refuse_strangers
}
"""The checks among them that can be made before the document has been read."""
