"""Conditional requests: If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since.

Order and meaning are those of RFC 9110, section 13.2.2, which S3 follows: If-Match makes
If-Unmodified-Since void, If-None-Match makes If-Modified-Since void. S3 differs in three places:
a failed If-None-Match of a copy's source is 412, not 304; a PUT with If-Match onto nothing is 404;
a DELETE has conditions on size and time of its own.

Entity tags come as the client sent them: in quotes, with one or none, several separated by commas.
Times have whole seconds, as HTTP's dates do.
"""

import email.utils
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from s3api.http.s3_errors import S3Error

_TAG: Final = re.compile(r'(?P<weak>W/)?"(?P<quoted>[^"]*)"|(?P<bare>[^\s,]+)')


@dataclass(frozen=True, slots=True)
class ConditionTarget:
    """The object that a condition is applied to: `etag` without quotes, `modified` an aware
    datetime."""

    etag: str
    modified: datetime
    size: int


@dataclass(frozen=True, slots=True)
class Conditions:
    """The four conditions of a request; None if a header is absent."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: datetime | None = None
    if_unmodified_since: datetime | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any], prefix: str = "") -> "Conditions":
        """Returns the conditions in an operation's parameters in botocore's names; `prefix` is
        `CopySource` for the conditions on a copy's source."""
        return cls(
            params.get(prefix + "IfMatch"),
            params.get(prefix + "IfNoneMatch"),
            params.get(prefix + "IfModifiedSince"),
            params.get(prefix + "IfUnmodifiedSince"),
        )

    def __bool__(self) -> bool:
        return self != NONE


NONE: Final = Conditions()
WRITE_CONDITIONS: Final = frozenset(
    ("IfMatch", "IfNoneMatch", "IfModifiedSince", "IfUnmodifiedSince")
)
"""Parameters that make a write conditional."""
_OF_SOURCE: Final = "x-amz-copy-source-"


def http_date(text: str) -> datetime | None:
    """Returns the time of an HTTP date in any of the three forms of RFC 9110, section 5.6.7; None
    if it is none, since an invalid date makes a condition void."""
    try:
        parsed = email.utils.parsedate_to_datetime(text)
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


def is_not_modified(conditions: Conditions, target: ConditionTarget) -> bool:
    """Returns whether a GET or HEAD is answered 304. Raises PreconditionFailed."""
    _require(conditions, target)
    return _is_known(conditions, target)


def check_copy_source(conditions: Conditions, source: ConditionTarget) -> None:
    """Raises PreconditionFailed if a copy's source does not meet its conditions."""
    _require(conditions, source, named=_OF_SOURCE)
    if _is_known(conditions, source):
        by_tag = conditions.if_none_match is not None
        raise _failed(_OF_SOURCE + ("If-None-Match" if by_tag else "If-Modified-Since"))


def check_write(conditions: Conditions, current: ConditionTarget | None) -> None:
    """Checks that an object may be written over `current`, or where there is none (None, also for a
    delete marker). Raises PreconditionFailed or NoSuchKey."""
    wanted = conditions.if_match
    if wanted is not None:
        if current is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        if not _lists(wanted, current.etag, weakly=False):
            raise _failed("If-Match")
    unwanted = conditions.if_none_match
    if unwanted is None or current is None:
        return
    if _lists(unwanted, current.etag, weakly=True):
        raise _failed("If-None-Match")


def check_delete(
    current: ConditionTarget | None,
    *,
    if_match: str | None = None,
    if_modified: datetime | None = None,
    if_size: int | None = None,
) -> None:
    """Checks that an object may be deleted: its tag, `x-amz-if-match-last-modified-time` and
    `x-amz-if-match-size`. A missing object cannot differ; a delete marker, which has no tag and no
    bytes, does. Raises PreconditionFailed."""
    if current is None:
        return
    if if_match is not None and not _lists(if_match, current.etag, weakly=False):
        raise _failed("If-Match")
    if if_modified is not None and _seconds(if_modified) != _seconds(current.modified):
        raise _failed("x-amz-if-match-last-modified-time")
    if if_size is not None and if_size != current.size:
        raise _failed("x-amz-if-match-size")


def _require(conditions: Conditions, target: ConditionTarget, *, named: str = "") -> None:
    """Requires the conditions. `named`: the beginning of the name of a condition that failed."""
    if conditions.if_match is not None:
        if not _lists(conditions.if_match, target.etag, weakly=False):
            raise _failed(named + "If-Match")
        return
    since = conditions.if_unmodified_since
    if since is not None and _seconds(target.modified) > _seconds(since):
        raise _failed(named + "If-Unmodified-Since")


def _is_known(conditions: Conditions, target: ConditionTarget) -> bool:
    """Returns whether the caller said that it has the present object."""
    if conditions.if_none_match is not None:
        return _lists(conditions.if_none_match, target.etag, weakly=True)
    since = conditions.if_modified_since
    return since is not None and _seconds(target.modified) <= _seconds(since)


def _lists(header: str, etag: str, *, weakly: bool) -> bool:
    """Returns whether a header's list of tags holds `etag`; strong comparison leaves weak tags
    out."""
    if header.strip() == "*":
        return True
    for match in _TAG.finditer(header):
        text = match["bare"].strip('"') if match["quoted"] is None else match["quoted"]
        if text == etag and (weakly or not match["weak"]):
            return True
    return False


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())


def _failed(condition: str) -> S3Error:
    return S3Error(
        "PreconditionFailed",
        "At least one of the pre-conditions you specified did not hold",
        extra={"Condition": condition},
    )
