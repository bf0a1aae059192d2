"""The core's errors as S3's: the only place of their translation.

The tables are exhaustive: a test fails on a class without a row. A message of the core is for the
log, for it names paths; the client gets the code's own text and the result of `_details`.
"""

import errno
from collections.abc import Mapping
from typing import Final

from kvfs.base import errors
from kvfs.objects import object_errors
from kvfs.objects.multipart.upload_transactions import MIN_PART_BYTES
from s3api.http.s3_errors import S3Error

CODES: Final[Mapping[type[errors.KvfsError], str]] = {
    errors.AccessDenied: "AccessDenied",
    errors.NoLocks: "ServiceUnavailable",
    errors.Busy: "OperationAborted",
    errors.ConfigError: "InternalError",
    errors.Conflict: "OperationAborted",
    errors.Corrupt: "InternalError",
    errors.CrossNamespace: "InvalidRequest",
    errors.Exists: "OperationAborted",
    errors.Invalid: "InvalidArgument",
    errors.IsADirectory: "InvalidRequest",
    errors.NameTooLong: "KeyTooLongError",
    errors.NoAttribute: "InternalError",
    errors.NoSpace: "InsufficientStorage",
    errors.NotADirectory: "InvalidRequest",
    errors.NotEmpty: "BucketNotEmpty",
    errors.NotFound: "NoSuchKey",
    errors.NotPermitted: "AccessDenied",
    errors.NotSupported: "NotImplemented",
    errors.OtherVersion: "NoSuchKey",
    errors.ReadOnly: "AccessDenied",
    errors.Stale: "NoSuchKey",
    errors.TooLarge: "MetadataTooLarge",
    errors.TooManyOpenFiles: "SlowDown",
    errors.Unavailable: "ServiceUnavailable",
    errors.EngineAway: "BucketReadOnly",
    errors.Paused: "SlowDown",
    errors.Unreached: "NoSuchKey",
    errors.DirectoryGone: "NoSuchKey",
    object_errors.BucketExists: "BucketAlreadyOwnedByYou",
    object_errors.BucketNotEmpty: "BucketNotEmpty",
    object_errors.InvalidPart: "InvalidPart",
    object_errors.NotAnObject: "InvalidRequest",
    object_errors.Locked: "AccessDenied",
    object_errors.MarkedDeleted: "NoSuchKey",
    object_errors.NoSuchBucket: "NoSuchBucket",
    object_errors.NoSuchKey: "NoSuchKey",
    object_errors.NotHere: "ServiceUnavailable",
    object_errors.NoSuchUpload: "NoSuchUpload",
    object_errors.NoSuchVersion: "NoSuchVersion",
    object_errors.PartOrder: "InvalidPartOrder",
    object_errors.PartTooSmall: "EntityTooSmall",
    object_errors.PreconditionFailed: "PreconditionFailed",
    object_errors.Unheld: "NoSuchKey",
    object_errors.WrittenElsewhere: "NoSuchKey",
}

_SYSTEM_CODES: Final = {
    errno.EDQUOT: "InsufficientStorage",
    errno.EMFILE: "SlowDown",
    errno.ENFILE: "SlowDown",
    errno.ENOSPC: "InsufficientStorage",
    errno.EROFS: "AccessDenied",
}


def s3_error(error: Exception) -> S3Error:
    """Returns the client's form of `error`; InternalError for any that is not known."""
    if isinstance(error, S3Error):
        return error
    if isinstance(error, OSError):
        return S3Error(_SYSTEM_CODES.get(error.errno or 0, "InternalError"))
    if isinstance(error, object_errors.MarkedDeleted):
        marker = {"x-amz-delete-marker": "true", "x-amz-version-id": error.version}
        return S3Error("NoSuchKey", headers=marker)
    if isinstance(error, object_errors.NotAnObject):
        return S3Error(
            "InvalidRequest",
            "The mount has a symbolic link, fifo, socket or device under this key, which S3 neither"
            " shows nor replaces: remove it there first.",
        )
    for kind in type(error).__mro__:
        if kind in CODES:
            return S3Error(CODES[kind], extra=_details(error))
    return S3Error("InternalError")


def _details(error: Exception) -> dict[str, str]:
    """Returns the details that S3 tells beside the code: the bucket, the part."""
    if isinstance(error, object_errors.NoSuchBucket) and error.bucket:
        return {"BucketName": error.bucket}
    if isinstance(error, object_errors.InvalidPart | object_errors.PartTooSmall) and error.number:
        told = {"PartNumber": str(error.number), "ETag": error.etag}
        if isinstance(error, object_errors.PartTooSmall):
            told |= {"ProposedSize": str(error.size), "MinSizeAllowed": str(MIN_PART_BYTES)}
        return told
    return {}
