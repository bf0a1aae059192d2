"""Decides how long a node keeps a name to itself before it tells others of it: for longer than the
temporary names live that files have lately had there before they got their own. Pure.

A temporary name that others were told of costs all of them: its coming, its end, and a removal that
each keeps for a day. How long one lives depends on how busy the node is: from a close to its rename
some milliseconds pass, or half a second where processes wait for a processor. So the delay follows
their lives, such that about one in a hundred is told of.

| a file got another name | the delay |
|---|---|
| none did for `_QUIET_S` | none: names are told of at once |
| the first one after that | `_LEAST_S` |
| one that lived for less than the delay | shrinks a little, to `_LEAST_S` |
| one that lived for longer | doubles, up to `_MOST_S` |
| one that lived for so long that it was no temporary name (`_TEMPORARY_S`) | as it was |
"""

import math
from typing import Final

_LEAST_S: Final = 0.05
_MOST_S: Final = 2.0
_GROWS: Final = 2.0
_SHRINKS: Final = 0.993
_TEMPORARY_S: Final = 10.0
_QUIET_S: Final = 10.0


class NameDelay:
    """The delay of one node's names."""

    def __init__(self) -> None:
        self._delay_s = 0.0
        self._seen_at = -math.inf
        """When a file last got another name."""

    def gave_up(self, lived_s: float, now_s: float) -> None:
        """Notes that a file got another name. `lived_s`: how long it had the one before; less than
        0 where a clock was set meanwhile. `now_s`: seconds of any clock that does not go back."""
        if not 0 <= lived_s <= _TEMPORARY_S:
            return
        if now_s - self._seen_at > _QUIET_S:
            self._delay_s = _LEAST_S
        elif lived_s > self._delay_s:
            self._delay_s = min(self._delay_s * _GROWS, _MOST_S)
        else:
            self._delay_s = max(self._delay_s * _SHRINKS, _LEAST_S)
        self._seen_at = now_s

    def seconds(self, now_s: float, most_s: float) -> float:
        """Returns the delay; at most `most_s`, or `_LEAST_S` where that is more."""
        if now_s - self._seen_at > _QUIET_S:
            return 0.0
        return min(self._delay_s, max(most_s, _LEAST_S))
