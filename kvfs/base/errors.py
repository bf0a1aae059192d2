"""The errors that the core raises. Each front door has one exhaustive table from them to its own
codes.

A message names the thing and, if there is one, the remedy. The core never raises a bare OSError on
purpose: a refusal by the operating system is translated where it happens, or passes through
unchanged when only the system knows why."""

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The refusals of msgspec's decoders of msgpack: the last two are for texts that are no UTF-8, and
for lists within lists within lists."""


class KvfsError(Exception):
    """Base of every error that KVFS raises on purpose."""


class NotFound(KvfsError):
    """No such file, namespace or key."""

    at: bytes | None = None
    """The missing name, as the engine's key of a file's entry; None: it is not told."""


class OtherVersion(NotFound):
    """The existing version is not the requested one."""


class Unreached(NotFound):
    """A cache's file, or its names, cannot be had now: no node that has them answers."""


class DirectoryGone(NotFound):
    """There is no directory of this number in the cluster; its path may lead to another one."""


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
    """Another process changed it first; read again and decide again."""


class Corrupt(KvfsError):
    """Data or metadata do not match their checksum or format."""


class Unavailable(KvfsError):
    """A needed part did not answer within its deadline; try again later."""


class EngineAway(Unavailable):
    """The engine does not answer, so nothing that other nodes have to know can be changed; this
    change was not begun. Reads go on."""


class Paused(Unavailable):
    """The namespace takes no changes now, and will soon; reads go on."""


class Stale(KvfsError):
    """The inode number or handle names something that is gone."""


class NotSupported(KvfsError):
    """KVFS does not do this; the message says what to do instead."""


class NoAttribute(KvfsError):
    """The file has no extended attribute of that name."""


class TooLarge(KvfsError):
    """A value is over a stated limit."""


class NoLocks(KvfsError):
    """Locks are not available here now (ENOLCK)."""


class TooManyOpenFiles(KvfsError):
    """This user holds as many open files as others leave (EMFILE)."""


class Busy(KvfsError):
    """It is in use by others."""


class ConfigError(KvfsError):
    """A setting is unknown or makes no sense; the message names it."""
