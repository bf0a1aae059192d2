"""Exit codes, and how an error is shown: one line, no traceback.

The table is exhaustive: a test fails on a class of `kvfs.base.errors` that has no row.
"""

import errno
import os
import sys
from typing import Final, NoReturn

from kvfs.base import errors
from kvfs.base.fuse_device import UNSERVED, unserved_mount
from kvfs.base.printable import printable

USAGE: Final = 2
BUG: Final = 70

EXIT_CODES: Final[dict[type[errors.KvfsError], int]] = {
    errors.ConfigError: USAGE,
    errors.Invalid: USAGE,
    errors.NameTooLong: USAGE,
    errors.NotSupported: USAGE,
    errors.TooLarge: USAGE,
    errors.NotFound: 3,
    errors.OtherVersion: 3,
    errors.DirectoryGone: 3,
    errors.Unreached: 3,
    errors.NoAttribute: 3,
    errors.Stale: 3,
    errors.Exists: 4,
    errors.NotEmpty: 4,
    errors.NotADirectory: 4,
    errors.IsADirectory: 4,
    errors.CrossNamespace: 4,
    errors.Conflict: 4,
    errors.Busy: 4,
    errors.AccessDenied: 5,
    errors.NotPermitted: 5,
    errors.ReadOnly: 5,
    errors.NoSpace: 6,
    errors.NoLocks: 7,
    errors.TooManyOpenFiles: 7,
    errors.Unavailable: 7,
    errors.EngineAway: 7,
    errors.Paused: 7,
    errors.Corrupt: 8,
}

_SYSTEM_CODES: Final = {
    errno.EROFS: 5,
    errno.ENOSPC: 6,
    errno.EDQUOT: 6,
    errno.EIO: 8,
}
_OTHER_REFUSAL: Final = 7

HELP: Final = """\b
Exit codes:
  0    done
  1    fsck found problems that it did not repair, or upgrade --check something that hinders it
  2    wrong usage, setting or argument; not supported
  3    no such file, namespace or store
  4    in the way: exists, not empty, in use, wrong type
  5    not permitted, or read-only
  6    no space
  7    no node runs there, it did not answer in time, or the system refused for another reason
  8    damaged data or metadata, or a disk that fails
  70   a bug in KVFS
  130  interrupted"""


def exit_code(error: BaseException) -> int:
    """Returns the exit code for an error of the core or of the operating system."""
    for kind in type(error).__mro__:
        if kind in EXIT_CODES:
            return EXIT_CODES[kind]
    if isinstance(error, FileNotFoundError):
        return 3
    if isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError):
        return 4
    if isinstance(error, PermissionError):
        return 5
    if isinstance(error, OSError):
        return _SYSTEM_CODES.get(error.errno or 0, _OTHER_REFUSAL)
    return BUG


def describe(error: BaseException) -> str:
    """Describes the error in one line for people."""
    if isinstance(error, OSError) and error.strerror:
        name = error.filename
        where = f"{os.fsdecode(name)}: " if isinstance(name, str | bytes) else ""
        said = error.strerror
        if where and error.errno in UNSERVED:
            said = unserved_mount(os.fsdecode(name))
        return printable(f"{where}{said}")
    return printable(" ".join(str(error).split())) or type(error).__name__


def fail(error: BaseException) -> NoReturn:
    """Prints the error on standard error, and ends the process with the code of the table."""
    print(f"kvfs: {describe(error)}", file=sys.stderr)
    sys.exit(exit_code(error))
