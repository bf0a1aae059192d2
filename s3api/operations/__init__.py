"""The operations: a module for each group of verbs, `Call` in, response out.

A handler finds its parameters parsed and its caller allowed. Its exceptions become S3's errors.
"""

from collections.abc import Callable
from typing import Final

from s3api.http.request_context import Call, Handler
from s3api.model.routing import OPTIONS_OBJECT, POST_OBJECT, STS
from s3api.operations import acls, cors_headers, sts
from s3api.operations.bucket import bucket_configurations, buckets, refused_configurations
from s3api.operations.object import (
    copy_object,
    delete_objects,
    get_object,
    list_objects,
    object_attributes,
    post_object,
    put_object,
    version_settings,
)
from s3api.operations.upload import complete_upload, multipart, upload_part

HANDLERS: Final[dict[str, Handler]] = {
    **acls.HANDLERS,
    **object_attributes.HANDLERS,
    **bucket_configurations.HANDLERS,
    **buckets.HANDLERS,
    **complete_upload.HANDLERS,
    **copy_object.HANDLERS,
    **delete_objects.HANDLERS,
    **list_objects.HANDLERS,
    **version_settings.HANDLERS,
    **multipart.HANDLERS,
    **upload_part.HANDLERS,
    **get_object.HANDLERS,
    **refused_configurations.HANDLERS,
    **put_object.HANDLERS,
}

SPECIAL: Final[dict[str, Handler]] = {
    OPTIONS_OBJECT: cors_headers.preflight,
    POST_OBJECT: post_object.post_object,
    STS: sts.answer,
}
"""Operations whose caller is nobody, or that find out themselves who it is."""

STEPS: Final = frozenset(("DeleteObject", "GetObject", "HeadObject", "PutObject"))
"""Operations that go aside (`kvfs.base.detach`) before they wait, which they seldom do; others run
in a task from their beginning."""

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
