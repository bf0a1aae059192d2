"""What became of a request, for those who count and log; kept with its head."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfs.wire.http import Response

if TYPE_CHECKING:
    from s3api.call import Call


@dataclass(slots=True)
class Outcome:
    """Of one request; what is not known (yet, or because it was refused first) is None or empty."""

    request_id: str
    call: "Call | None" = None
    code: str = ""
    """Of the error that it was answered with."""
    response: Response | None = None
    answered: float = 0.0
    """When it was known (time.monotonic)."""
