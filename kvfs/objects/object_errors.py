"""Refusals of operations on objects; each is a kind of the core's errors."""

from kvfs.base.errors import (
    AccessDenied,
    Conflict,
    Exists,
    Invalid,
    NotEmpty,
    NotFound,
    OtherVersion,
    Unavailable,
    Unreached,
)
from kvfs.objects.object_info import Facts


class NoSuchBucket(NotFound):
    """There is no namespace of that name; `bucket` is empty if the request's own is meant."""

    def __init__(self, message: str, bucket: str = "") -> None:
        super().__init__(message)
        self.bucket = bucket


class NoSuchKey(NotFound):
    """The bucket has no object of that key."""


class NoSuchVersion(OtherVersion):
    """The object has no version of that id."""


class NoSuchUpload(NotFound):
    """The upload was never begun, or is completed or aborted."""


class WrittenElsewhere(NoSuchKey, OtherVersion):
    """Its content is being changed on another node, in a bucket in which that is a miss."""


class Unheld(NoSuchKey, Unreached):
    """No node that has its data answers, in a bucket in which that is a miss."""


class MarkedDeleted(NoSuchKey, OtherVersion):
    """A delete marker is the requested version, or stands for the object."""

    def __init__(self, message: str, version: str, *, latest: bool) -> None:
        super().__init__(message)
        self.version = version
        """The version of the delete marker."""
        self.latest = latest


class BucketExists(Exists):
    """The name of the bucket is taken."""


class BucketNotEmpty(NotEmpty):
    """The bucket holds objects, versions or uploads."""


class PreconditionFailed(Conflict):
    """A condition of the caller does not hold."""


class NotAnObject(Conflict):
    """The mount has something other than a file under the key: a symbolic link, a fifo, a socket or
    a device."""


class Locked(AccessDenied):
    """A retention or a legal hold forbids to delete this version."""


class NotHere(Unavailable):
    """The object's data file is not on this host; other nodes may have it."""

    def __init__(self, facts: Facts) -> None:
        super().__init__("the object's data are not on this host yet")
        self.facts = facts


class BeingWritten(Exception):
    """The object's data file is open for writing, and a write may be under way: ask for it where
    that may be waited for."""


class _OfPart(Exception):
    """An error of the part with this number; 0: of none in particular. `etag` as the caller gave
    it."""

    def __init__(self, message: str, number: int = 0, etag: str = "", size: int = 0) -> None:
        super().__init__(message)
        self.number = number
        self.etag = etag
        self.size = size


class InvalidPart(_OfPart, Invalid):
    """A part to be assembled is missing, or differs from the one that the client named."""


class PartOrder(Invalid):
    """The parts to be assembled are not in ascending order."""


class PartTooSmall(_OfPart, Invalid):
    """A part other than the last has less than 5 MiB."""
