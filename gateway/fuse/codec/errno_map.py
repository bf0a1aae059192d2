"""The core's errors as errno: one row per class."""

import errno
from typing import Final

from kvfs.base import errors

ERRNO: Final[dict[type[errors.KvfsError], int]] = {
    errors.NotFound: errno.ENOENT,
    errors.DirectoryGone: errno.ESTALE,
    errors.OtherVersion: errno.ENOENT,
    errors.Unreached: errno.ENOENT,
    errors.Exists: errno.EEXIST,
    errors.NotADirectory: errno.ENOTDIR,
    errors.IsADirectory: errno.EISDIR,
    errors.NotEmpty: errno.ENOTEMPTY,
    errors.Invalid: errno.EINVAL,
    errors.NameTooLong: errno.ENAMETOOLONG,
    errors.CrossNamespace: errno.EXDEV,
    errors.NotPermitted: errno.EPERM,
    errors.AccessDenied: errno.EACCES,
    errors.NoSpace: errno.ENOSPC,
    errors.ReadOnly: errno.EROFS,
    errors.Conflict: errno.EAGAIN,
    errors.Corrupt: errno.EIO,
    errors.Unavailable: errno.EIO,
    errors.EngineAway: errno.EROFS,
    errors.Paused: errno.EBUSY,
    errors.Stale: errno.ESTALE,
    errors.NotSupported: errno.EOPNOTSUPP,
    errors.NoAttribute: errno.ENODATA,
    errors.TooLarge: errno.E2BIG,
    errors.NoLocks: errno.ENOLCK,
    errors.TooManyOpenFiles: errno.EMFILE,
    errors.Busy: errno.EBUSY,
    errors.ConfigError: errno.EINVAL,
}


def errno_of(error: BaseException) -> int:
    """Returns the errno that the caller of the system call gets."""
    if isinstance(error, errors.KvfsError):
        return ERRNO.get(type(error), errno.EIO)
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return errno.EIO
