"""The permissions that operations need.

Source: "Actions, resources, and condition keys for Amazon S3" in the Service Authorization
Reference (https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html).
Every operation of botocore's model stands here; those that this server refuses too, so that a
caller that may not ask is told no more than that.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

BYPASS_GOVERNANCE: Final = "s3:BypassGovernanceRetention"
PUT_TAGS: Final = "s3:PutObjectTagging"


class Permissions(NamedTuple):
    """The action that an operation needs, and the one that it needs with a version id."""

    plain: str
    versioned: str


def _same(action: str, *operations: str) -> dict[str, Permissions]:
    return {each: Permissions(f"s3:{action}", f"s3:{action}") for each in operations}


def _versioned(plain: str, versioned: str, *operations: str) -> dict[str, Permissions]:
    return {each: Permissions(f"s3:{plain}", f"s3:{versioned}") for each in operations}


PERMISSIONS: Final[Mapping[str, Permissions]] = {
    # Objects
    **_versioned("GetObject", "GetObjectVersion", "GetObject", "HeadObject"),
    **_versioned("GetObject", "GetObjectVersion", "SelectObjectContent"),
    **_versioned("GetObjectAttributes", "GetObjectVersionAttributes", "GetObjectAttributes"),
    **_versioned("GetObjectTorrent", "GetObjectVersionTorrent", "GetObjectTorrent"),
    **_versioned("DeleteObject", "DeleteObjectVersion", "DeleteObject", "DeleteObjects"),
    **_versioned("GetObjectAcl", "GetObjectVersionAcl", "GetObjectAcl"),
    **_versioned("PutObjectAcl", "PutObjectVersionAcl", "PutObjectAcl"),
    **_versioned("GetObjectTagging", "GetObjectVersionTagging", "GetObjectTagging"),
    **_versioned("PutObjectTagging", "PutObjectVersionTagging", "PutObjectTagging"),
    **_versioned("DeleteObjectTagging", "DeleteObjectVersionTagging", "DeleteObjectTagging"),
    **_versioned("GetObjectAnnotation", "GetObjectVersionAnnotation", "GetObjectAnnotation"),
    **_versioned("GetObjectAnnotation", "GetObjectVersionAnnotation", "ListObjectAnnotations"),
    **_versioned("PutObjectAnnotation", "PutObjectVersionAnnotation", "PutObjectAnnotation"),
    **_versioned(
        "DeleteObjectAnnotation", "DeleteObjectVersionAnnotation", "DeleteObjectAnnotation"
    ),
    **_same("PutObject", "PutObject", "CopyObject", "RenameObject"),
    **_same("PutObject", "CreateMultipartUpload", "UploadPart", "UploadPartCopy"),
    **_same("PutObject", "CompleteMultipartUpload"),
    **_same("AbortMultipartUpload", "AbortMultipartUpload"),
    **_same("ListMultipartUploadParts", "ListParts"),
    **_same("GetObjectRetention", "GetObjectRetention"),
    **_same("PutObjectRetention", "PutObjectRetention"),
    **_same("GetObjectLegalHold", "GetObjectLegalHold"),
    **_same("PutObjectLegalHold", "PutObjectLegalHold"),
    **_same("RestoreObject", "RestoreObject"),
    **_same("UpdateObjectEncryption", "UpdateObjectEncryption"),
    # Buckets and their lists
    **_same("CreateBucket", "CreateBucket"),
    **_same("DeleteBucket", "DeleteBucket"),
    **_same("ListAllMyBuckets", "ListBuckets"),
    **_same("ListBucket", "HeadBucket", "ListObjects", "ListObjectsV2"),
    **_same("ListBucketVersions", "ListObjectVersions"),
    **_same("ListBucketMultipartUploads", "ListMultipartUploads"),
    **_same("GetBucketLocation", "GetBucketLocation"),
    # Their configuration
    **_same("GetBucketAcl", "GetBucketAcl"),
    **_same("PutBucketAcl", "PutBucketAcl"),
    **_same("GetBucketPolicy", "GetBucketPolicy"),
    **_same("PutBucketPolicy", "PutBucketPolicy"),
    **_same("DeleteBucketPolicy", "DeleteBucketPolicy"),
    **_same("GetBucketPolicyStatus", "GetBucketPolicyStatus"),
    **_same("GetBucketCORS", "GetBucketCors"),
    **_same("PutBucketCORS", "PutBucketCors", "DeleteBucketCors"),
    **_same("GetBucketTagging", "GetBucketTagging"),
    **_same("PutBucketTagging", "PutBucketTagging", "DeleteBucketTagging"),
    **_same("GetBucketVersioning", "GetBucketVersioning"),
    **_same("PutBucketVersioning", "PutBucketVersioning"),
    **_same("GetBucketObjectLockConfiguration", "GetObjectLockConfiguration"),
    **_same("PutBucketObjectLockConfiguration", "PutObjectLockConfiguration"),
    **_same("GetBucketOwnershipControls", "GetBucketOwnershipControls"),
    **_same("PutBucketOwnershipControls", "PutBucketOwnershipControls"),
    **_same("PutBucketOwnershipControls", "DeleteBucketOwnershipControls"),
    **_same("GetBucketPublicAccessBlock", "GetPublicAccessBlock"),
    **_same("PutBucketPublicAccessBlock", "PutPublicAccessBlock", "DeletePublicAccessBlock"),
    **_same("GetEncryptionConfiguration", "GetBucketEncryption"),
    **_same("PutEncryptionConfiguration", "PutBucketEncryption", "DeleteBucketEncryption"),
    **_same("GetLifecycleConfiguration", "GetBucketLifecycle", "GetBucketLifecycleConfiguration"),
    **_same("PutLifecycleConfiguration", "PutBucketLifecycle", "PutBucketLifecycleConfiguration"),
    **_same("PutLifecycleConfiguration", "DeleteBucketLifecycle"),
    **_same("GetReplicationConfiguration", "GetBucketReplication"),
    **_same("PutReplicationConfiguration", "PutBucketReplication", "DeleteBucketReplication"),
    **_same("GetBucketWebsite", "GetBucketWebsite"),
    **_same("PutBucketWebsite", "PutBucketWebsite"),
    **_same("DeleteBucketWebsite", "DeleteBucketWebsite"),
    **_same("GetBucketLogging", "GetBucketLogging"),
    **_same("PutBucketLogging", "PutBucketLogging"),
    **_same("GetBucketNotification", "GetBucketNotification", "GetBucketNotificationConfiguration"),
    **_same("PutBucketNotification", "PutBucketNotification", "PutBucketNotificationConfiguration"),
    **_same("GetBucketRequestPayment", "GetBucketRequestPayment"),
    **_same("PutBucketRequestPayment", "PutBucketRequestPayment"),
    **_same("GetAccelerateConfiguration", "GetBucketAccelerateConfiguration"),
    **_same("PutAccelerateConfiguration", "PutBucketAccelerateConfiguration"),
    **_same("GetBucketAbac", "GetBucketAbac"),
    **_same("PutBucketAbac", "PutBucketAbac"),
    **_same(
        "GetAnalyticsConfiguration",
        "GetBucketAnalyticsConfiguration",
        "ListBucketAnalyticsConfigurations",
    ),
    **_same(
        "PutAnalyticsConfiguration",
        "PutBucketAnalyticsConfiguration",
        "DeleteBucketAnalyticsConfiguration",
    ),
    **_same(
        "GetIntelligentTieringConfiguration",
        "GetBucketIntelligentTieringConfiguration",
        "ListBucketIntelligentTieringConfigurations",
    ),
    **_same(
        "PutIntelligentTieringConfiguration",
        "PutBucketIntelligentTieringConfiguration",
        "DeleteBucketIntelligentTieringConfiguration",
    ),
    **_same(
        "GetInventoryConfiguration",
        "GetBucketInventoryConfiguration",
        "ListBucketInventoryConfigurations",
    ),
    **_same(
        "PutInventoryConfiguration",
        "PutBucketInventoryConfiguration",
        "DeleteBucketInventoryConfiguration",
    ),
    **_same(
        "GetMetricsConfiguration",
        "GetBucketMetricsConfiguration",
        "ListBucketMetricsConfigurations",
    ),
    **_same(
        "PutMetricsConfiguration",
        "PutBucketMetricsConfiguration",
        "DeleteBucketMetricsConfiguration",
    ),
    **_same("CreateBucketMetadataTableConfiguration", "CreateBucketMetadataTableConfiguration"),
    **_same("CreateBucketMetadataTableConfiguration", "CreateBucketMetadataConfiguration"),
    **_same("DeleteBucketMetadataTableConfiguration", "DeleteBucketMetadataTableConfiguration"),
    **_same("DeleteBucketMetadataTableConfiguration", "DeleteBucketMetadataConfiguration"),
    **_same("GetBucketMetadataTableConfiguration", "GetBucketMetadataTableConfiguration"),
    **_same("GetBucketMetadataTableConfiguration", "GetBucketMetadataConfiguration"),
    **_same(
        "UpdateBucketMetadataAnnotationTableConfiguration",
        "UpdateBucketMetadataAnnotationTableConfiguration",
    ),
    **_same(
        "UpdateBucketMetadataInventoryTableConfiguration",
        "UpdateBucketMetadataInventoryTableConfiguration",
    ),
    **_same(
        "UpdateBucketMetadataJournalTableConfiguration",
        "UpdateBucketMetadataJournalTableConfiguration",
    ),
    # Of other services of the same model
    **_same("CreateSession", "CreateSession"),
    **_same("ListAllMyDirectoryBuckets", "ListDirectoryBuckets"),
    **_same("WriteGetObjectResponse", "WriteGetObjectResponse"),
}

_WRITES: Final = frozenset({"PutObject", "CopyObject", "CreateMultipartUpload"})
# Parameter of a write -> what the write needs besides s3:PutObject.
_BESIDES: Final = {
    "Tagging": PUT_TAGS,
    "ACL": "s3:PutObjectAcl",
    "GrantFullControl": "s3:PutObjectAcl",
    "GrantRead": "s3:PutObjectAcl",
    "GrantReadACP": "s3:PutObjectAcl",
    "GrantWrite": "s3:PutObjectAcl",
    "GrantWriteACP": "s3:PutObjectAcl",
    "ObjectLockMode": "s3:PutObjectRetention",
    "ObjectLockLegalHoldStatus": "s3:PutObjectLegalHold",
}


def needed(operation: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the actions that an operation with these parameters (botocore's names) needs on its
    own bucket or object. DeleteObjects takes its objects one by one; the source of a copy is
    `needed_of_source`."""
    permissions = PERMISSIONS[operation]
    first = permissions.versioned if params.get("VersionId") is not None else permissions.plain
    if operation == "GetObjectAttributes":
        return (first, needed_of_source(params.get("VersionId")))
    if operation not in _WRITES:
        return (first,)
    asked = _BESIDES.keys() & params.keys()
    if not asked:
        return (first,)
    # In the order of the table, and each once.
    besides = {
        action: None
        for name, action in _BESIDES.items()
        if name in asked and params[name] is not None
    }
    return (first, *besides)


def needed_of_source(version_id: str | None) -> str:
    """Returns the action that CopyObject and UploadPartCopy need on their source."""
    permissions = PERMISSIONS["GetObject"]
    return permissions.plain if version_id is None else permissions.versioned


def needed_for_tags(version_id: str | None) -> str:
    """Returns the action that CopyObject needs on its source if it takes the tags over."""
    permissions = PERMISSIONS["GetObjectTagging"]
    return permissions.plain if version_id is None else permissions.versioned


def concerns_bucket(action: str) -> bool:
    """Returns whether an action is one on a bucket, not on objects."""
    return action in _BUCKET_ACTIONS


_OBJECT_OPERATIONS: Final = frozenset(
    {
        "RestoreObject",
        "SelectObjectContent",
        "ListObjectAnnotations",
        "ListParts",
        "WriteGetObjectResponse",
        "UpdateObjectEncryption",
    }
)
_BUCKET_ACTIONS: Final = frozenset(
    permissions.plain
    for operation, permissions in PERMISSIONS.items()
    if operation not in _OBJECT_OPERATIONS
    and (
        "Bucket" in operation
        or operation.startswith("List")
        or "PublicAccessBlock" in operation
        or "ObjectLockConfiguration" in operation
    )
)
