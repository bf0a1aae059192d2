"""The source of CopyObject and UploadPartCopy: the caller must be allowed to read it."""

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from kvfs.base.errors import Conflict
from kvfs.objects.object_errors import MarkedDeleted, NoSuchKey, NoSuchVersion
from kvfs.objects.object_info import Facts
from kvfs.objects.open_object import marked_deleted
from s3api.auth.authorization import Access
from s3api.http.outcome import AccessLogEntry
from s3api.http.request_context import Call, target
from s3api.http.s3_errors import S3Error
from s3api.operations.object.object_version import check_version_id, version_id
from s3api.rules.access import actions
from s3api.rules.conditions import Conditions, check_copy_source
from s3api.rules.copy_source import parse_copy_source

T = TypeVar("T")
_READ: Final = {"CopyObject": "REST.COPY.OBJECT_GET", "UploadPartCopy": "REST.COPY.PART_GET"}
_ATTEMPTS: Final = 3


class Source:
    """An object that a call copies from, allowed to be read, its conditions met.

    `triple` names it for the store. The store may later open another object: `check` compares that
    with this."""

    def __init__(self, call: Call) -> None:
        """Raises S3Error, NoSuchBucket."""
        named = parse_copy_source(call.params["CopySource"])
        check_version_id(named.version or None)
        self.triple = named.bucket.encode(), named.key.encode(), named.version
        self._conditions = Conditions.of(call.params, "CopySource")
        reading = msgspec.structs.replace(
            call,
            bucket=named.bucket,
            key=named.key,
            query={"versionId": named.version} if named.version else {},
            params={"VersionId": named.version} if named.version else {},
            _settings=None,
        )
        expected = call.params.get("ExpectedSourceBucketOwner")
        if expected is not None and expected != reading.owner:
            raise S3Error("AccessDenied")
        self.settings = reading.settings
        self._reading, self._access = reading, call.service.access
        self.facts = self._find(reading, self._access)
        call.entries = self._entries

    def check(self, found: Facts | None) -> None:
        """Raises PreconditionFailed, and Conflict if it is another one than was allowed to be
        read."""
        self._check_conditions(found)
        if found is None or (found.ino, found.etag) != (self.facts.ino, self.facts.etag):
            raise Conflict("the source of the copy was replaced meanwhile")

    def require_tags(self) -> None:
        """Raises AccessDenied unless the caller may read the tags too."""
        action = actions.needed_for_tags(self._reading.version or None)
        self._access.require(self._reading, (action,), self.facts)

    def _entries(self) -> list[AccessLogEntry]:
        """Returns the entry in the log of the source's own bucket: it was read."""
        operation = _READ.get(self._reading.operation, "")
        named = self._reading
        version = version_id(named, self.facts) or ""
        size = self.facts.size
        return [AccessLogEntry(operation, named.bucket, named.owner, named.key, version, size=size)]

    def _check_conditions(self, found: Facts | None) -> None:
        if found is not None and self._conditions:
            check_copy_source(self._conditions, target(found))

    def _find(self, reading: Call, access: Access) -> Facts:
        action = actions.needed_of_source(reading.version or None)
        try:
            found = reading.store.find(*self.triple)
        except NoSuchVersion as error:
            reading.store.misses.found_nothing(error)
            access.require(reading, (action,))
            raise
        except NoSuchKey as error:
            reading.store.misses.found_nothing(error)
            access.require(reading, (action,))
            if isinstance(error, MarkedDeleted) or access.allows(reading, "s3:ListBucket"):
                raise S3Error("NoSuchKey", extra={"Key": reading.key}) from None
            raise S3Error("AccessDenied") from None
        access.require(reading, (action,), None if found.delete_marker else found)
        if found.delete_marker and reading.version:
            raise S3Error(
                "InvalidRequest",
                "The source of a copy request may not specifically refer to a delete marker by"
                " version id.",
            )
        if found.delete_marker:
            reading.store.misses.found_nothing(marked_deleted(found))
            raise S3Error("NoSuchKey", extra={"Key": reading.key})
        try:
            self._check_conditions(found)
        except S3Error:
            reading.store.misses.count("other_version")
            raise
        return found


def copied(call: Call, look: Callable[[Call], Source], copy: Callable[[Source], T]) -> T:
    """Returns the result of `copy` for the source as it is at one moment. `look` finds the source
    and asks for permission, again after a wait for a thread; a source that is written to meanwhile
    is looked for anew. Raises Conflict if it always is. Blocking."""
    for attempt in range(_ATTEMPTS):
        call.look_again()
        try:
            return copy(look(call))
        except Conflict:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError
