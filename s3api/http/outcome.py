"""The outcome of a request, for counters and logs; kept with its head."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvfs.http.api import Response

if TYPE_CHECKING:
    from s3api.http.request_context import Call


class AccessLogEntry(NamedTuple):
    """A further effect of a request, which has a line of its own in access logs: one of many keys
    deleted, the source of a copy that was read."""

    operation: str
    """S3's name in the log."""
    bucket: str
    owner: str
    key: str
    version: str = ""
    status: int = 200
    code: str = ""
    size: int | None = None


Entries = Callable[[], Iterable[AccessLogEntry]]
"""Called if a log is kept."""


class RequestOutcome(msgspec.Struct):
    """The outcome of one request; facts that are not known (yet, or because it was refused first)
    are None or empty."""

    request_id: str
    call: "Call | None" = None
    code: str = ""
    """The code of the error that it was answered with."""
    response: Response | None = None
    answered: float = 0.0
    """The time when it was known (time.monotonic)."""
