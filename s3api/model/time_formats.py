"""The three forms of time in the API: ISO 8601 in documents, HTTP's date in headers, and seconds
since 1970. All are UTC."""

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

_ISO: Final = re.compile(
    r"(\d{4})-?(\d\d)-?(\d\d)(?:T(\d\d):?(\d\d):?(\d\d)(?:\.(\d{1,9}))?)?(Z|[+-]\d\d:?\d\d)?\Z"
)
_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = (
    *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
    *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_timestamp(text: str) -> datetime:
    """Returns a time in any of the three forms, whichever was asked for: clients mix them. Raises
    ValueError."""
    text = text.strip()
    if found := _ISO.match(text):
        return _from_iso(*found.groups())
    if text.isascii() and text.replace(".", "", 1).isdigit():
        try:
            return _EPOCH + timedelta(seconds=float(text))
        except OverflowError:
            raise ValueError(f"not a time of this calendar: {text}") from None
    try:
        time = parsedate_to_datetime(text)
    except (IndexError, OverflowError, TypeError) as error:
        raise ValueError(f"not a time: {text}") from error
    # A date with the zone -0000 comes without one; HTTP knows GMT alone.
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def iso8601(time: datetime) -> str:
    """Formats a time for documents, with milliseconds: 2009-10-12T17:50:30.000Z."""
    time = time.astimezone(UTC)
    return f"{time:%Y-%m-%dT%H:%M:%S}.{time.microsecond // 1000:03d}Z".rjust(24, "0")


def http_date(time: datetime) -> str:
    """Formats a time for headers (RFC 9110, 5.6.7), whatever the locale: Mon, 12 Oct 2009 17:50:30
    GMT."""
    time = time.astimezone(UTC)
    day, month = _DAYS[time.weekday()], _MONTHS[time.month - 1]
    return f"{day}, {time.day:02d} {month} {time.year:04d} {time:%H:%M:%S} GMT"


def _from_iso(
    year: str,
    month: str,
    day: str,
    hour: str | None,
    minute: str | None,
    second: str | None,
    fraction: str | None,
    zone: str | None,
) -> datetime:
    microsecond = int((fraction or "0").ljust(6, "0")[:6])
    clock = int(hour or 0), int(minute or 0), int(second or 0), microsecond
    time = datetime(int(year), int(month), int(day), *clock, tzinfo=UTC)
    if zone in (None, "Z"):
        return time
    assert zone is not None
    offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
    try:
        return time + offset if zone[0] == "-" else time - offset
    except OverflowError:
        raise ValueError("not a time of this calendar") from None
