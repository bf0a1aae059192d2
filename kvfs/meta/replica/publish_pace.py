"""The pace at which published files are made known to other nodes: at once after a rest, in large
batches under load. Pure.

Each batch costs the server, and each node that follows its log, as much as some ten files do; a
reader on another node waits for a block as long as it is gathered. So the pause after a batch grows
with the rate at which files come, up to the one at which a batch has FILES of them.
"""

import math
from typing import Final

FILES: Final = 100
"""Files that a batch is to have under load."""
_LEAST_S: Final = 0.005
_MOST_S: Final = 0.1
_PER_RATE_S2: Final = 150e-6
"""Pause for each file a second: of 650 files a second 63 go together."""
_MEMORY_S: Final = 0.25
"""Time over which the rate is taken: a few files at once are no load."""
_REST: Final = 4
_REST_MOST_S: Final = 0.025
"""The pause is as many times as long as the batch took, up to this: if that is slow for the load on
this host, larger batches reduce it."""


class PublishPace:
    """The pace of one node; times are of any clock that never goes back."""

    def __init__(self) -> None:
        self._files = 0.0
        """Files of the last _MEMORY_S, older ones counting less and less."""
        self._counted_at = -math.inf

    def pause_s(self, files: int, began: float, ended: float) -> float:
        """Returns how long files are gathered after a batch of so many, which is counted.

        After a single file it is as long as that took: of files in close succession several have
        come by then."""
        faded = math.exp((self._counted_at - began) / _MEMORY_S)
        self._files, self._counted_at = self._files * faded + files, began
        took_s, rate = ended - began, self._files / _MEMORY_S
        loaded_s = min(rate * _PER_RATE_S2, _MOST_S, FILES / max(rate, 1.0))
        if files == 1:
            return max(min(took_s, _REST_MOST_S), loaded_s if rate > 1 / _LEAST_S else 0.0)
        return max(_LEAST_S, min(_REST * took_s, _REST_MOST_S), loaded_s)
