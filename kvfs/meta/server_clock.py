"""The time that all nodes of a cluster have in common: the metadata server's.

How long removals are remembered must not depend on a host's own clock, which may be days wrong or
be set by days. Between two renewals, and while the server is away, the time goes on by a clock that
nobody sets.
"""

import logging
import time
from typing import Final

from kvfs.base.clock import now

_HOUR_NS: Final = 3600 * 1_000_000_000
_APART_H: Final = 2
log = logging.getLogger(__name__)


class ServerClock:
    """The clock of one node; this host's own one until the server was heard."""

    def __init__(self) -> None:
        self._told_ns = time.time_ns()
        self._told_at_s = now()
        self._is_apart = False

    def __call__(self) -> int:
        """Returns nanoseconds since 1970."""
        return self._told_ns + int((now() - self._told_at_s) * 1e9)

    def heard(self, server_ns: int) -> None:
        """Takes the server's time, and says once where this host's differs by hours."""
        self._told_ns, self._told_at_s = server_ns, now()
        hours = round((time.time_ns() - server_ns) / _HOUR_NS)
        if abs(hours) < _APART_H:
            self._is_apart = False
        elif not self._is_apart:
            self._is_apart = True
            log.warning(
                "this host's clock is about %d hours %s the metadata server's: names that were"
                " removed may come back; set both clocks",
                *(abs(hours), "ahead of" if hours > 0 else "behind"),
            )
