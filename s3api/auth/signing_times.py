"""Times in requests: their forms, and their allowed distance from ours.

Times are whole seconds since the epoch. Parsed times are remembered: the requests of one second,
and those made with one presigned URL, carry the same text.
"""

import calendar
import functools
import re
import time
from datetime import date
from email.utils import parsedate_tz
from typing import Final

from s3api.http.s3_errors import S3Error

MAX_SKEW_S: Final = 15 * 60
_BASIC: Final = re.compile(
    rb"(\d{4})(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])T([01]\d|2[0-3])([0-5]\d)([0-5]\d)Z"
).fullmatch
BASIC_LENGTH: Final = 16
_EPOCH: Final = date(1970, 1, 1).toordinal()
_MAX_HTTP_DATE: Final = 64


def parse_basic(text: bytes) -> int | None:
    """Parses 20130524T000000Z; None if it is not of that form."""
    return short_basic(text) if len(text) == BASIC_LENGTH else None


@functools.lru_cache(maxsize=256)
def short_basic(text: bytes) -> int | None:
    """Does what `parse_basic` does, for a text of BASIC_LENGTH bytes."""
    match = _BASIC(text)
    if match is None or match[1] < b"1970":
        return None
    year, month, day, hour, minute, second = map(int, match.groups())
    try:
        days = date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        return None
    return ((days * 24 + hour) * 60 + minute) * 60 + second


def parse_http(text: bytes) -> int | None:
    """Parses a Date header (RFC 9110); None if it cannot be read or lies before the epoch."""
    return _parse_http(text) if len(text) <= _MAX_HTTP_DATE else None


@functools.lru_cache(maxsize=256)
def _parse_http(text: bytes) -> int | None:
    try:
        parsed = parsedate_tz(text.decode("ascii"))
        if parsed is None:
            return None
        seconds = calendar.timegm((*parsed[:6], 0, 0, 0)) - (parsed[9] or 0)
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return seconds if seconds >= 0 else None


def basic(seconds: float) -> bytes:
    """Formats as 20130524T000000Z."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(seconds)).encode()


def extended(seconds: float) -> str:
    """Formats as 2013-05-24T00:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def too_skewed(text: bytes, now: float) -> S3Error:
    """Returns RequestTimeTooSkewed, for a time that is further than MAX_SKEW_S from ours."""
    return S3Error(
        "RequestTimeTooSkewed",
        extra={
            "RequestTime": text.decode("ascii", "replace"),
            "ServerTime": extended(now),
            "MaxAllowedSkewMilliseconds": str(MAX_SKEW_S * 1000),
        },
    )
