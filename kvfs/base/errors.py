"""The errors that the core raises. Each front door has one exhaustive table from them to its own
codes.

A message names the thing and, where there is one, the remedy. The core never raises a bare OSError
on purpose: what the operating system refuses is translated where it happens, or passes through
unchanged when only the system knows why."""


class KvfsError(Exception):
    """Base of every error that KVFS raises on purpose."""


class NotFound(KvfsError):
    """No such file, namespace or key."""

    at: bytes | None = None
    """The name that is missing, as the engine's key of a file's entry; None: it is not said."""


class OtherVersion(NotFound):
    """The version that is there is not the one that was asked for."""


class Unreached(NotFound):
    """A cache's file, or its names, cannot be had now: nobody who has them answers."""


class Exists(KvfsError):
    """The name is taken."""


class NotADirectory(KvfsError):
    """A directory was needed."""


class IsADirectory(KvfsError):
    """Anything but a directory was needed."""


class NotEmpty(KvfsError):
    """The directory or namespace still holds names."""


class Invalid(KvfsError):
    """An argument makes no sense here."""


class NameTooLong(KvfsError):
    """A name is longer than 255 bytes, or a symbolic link's target than 4,095."""


class CrossNamespace(KvfsError):
    """A rename or link would cross from one namespace into another."""


class NotPermitted(KvfsError):
    """Forbidden whatever the mode bits say (EPERM)."""


class AccessDenied(KvfsError):
    """Forbidden by mode bits or ownership (EACCES)."""


class NoSpace(KvfsError):
    """The store, or the namespace's capacity, is full."""


class ReadOnly(KvfsError):
    """The store cannot be written."""


class Conflict(KvfsError):
    """Somebody else changed it first; read again and decide again."""


class Corrupt(KvfsError):
    """Data or metadata do not match their checksum or format."""


class Unavailable(KvfsError):
    """A part that is needed did not answer within its deadline; try again later."""


class Stale(KvfsError):
    """The inode number or handle names something that is gone."""


class NotSupported(KvfsError):
    """KVFS does not do this; the message says what to do instead."""


class NoAttribute(KvfsError):
    """The file has no extended attribute of that name."""


class TooLarge(KvfsError):
    """A value is over a stated limit."""


class NoLocks(KvfsError):
    """Locks cannot be had here now (ENOLCK)."""


class TooManyOpenFiles(KvfsError):
    """This user holds as many open files as others leave (EMFILE)."""


class Busy(KvfsError):
    """It is in use by somebody else."""


class ConfigError(KvfsError):
    """A setting is unknown or makes no sense; the message names it."""
