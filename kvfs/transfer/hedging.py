"""Finds streams that are stuck, while others are not.

A stream is stuck if it gets nothing, or would need much longer for its chunk than others do. Each
time one loses its work for that, patience doubles: a slow network ends in slowness and not in a
circle. For a stream on trial it stays what it was: others go on meanwhile.
"""

import time
from collections.abc import Collection
from typing import Final

import trio

from kvfs.cluster.peer_protocol import CHUNK_BYTES
from kvfs.transfer.chunk_plan import ChunkSpan
from kvfs.transfer.chunk_receiver import STALL_S, Taking
from kvfs.transfer.sources import PeerSource

_SILENT_S: Final = 0.5
"""Time without a byte after which a stream is stuck."""
_SLOW_S: Final = 1.0
"""A stream is also stuck if its chunk would take so much longer, and _SLOW_FACTOR times what others
need."""
_SLOW_FACTOR: Final = 4
_ANSWERS: Final = 3
"""A source may take so many times its usual time to answer without being stuck."""
_RELAY_S: Final = 1.0
"""Seconds for a relay: one that is getting the file itself says so within a third of it."""


class SourceStream:
    """One request of one source."""

    def __init__(self, source: PeerSource, span: ChunkSpan, *, on_trial: bool = False) -> None:
        self.source = source
        self.span = span
        self.on_trial = on_trial
        self.insists = source.insist
        self.scope = trio.CancelScope()
        self.began = time.monotonic()
        self.receiving: Taking | None = None
        self.was_cut = False

    def cut(self) -> None:
        """Ends it; chunks that it did not bring are given back."""
        self.was_cut = True
        if self.receiving is not None:
            self.receiving.stopped = True
        self.scope.cancel()

    def silent_s(self, now: float) -> float:
        """Returns seconds for which nothing has come."""
        return now - (self.began if self.receiving is None else self.receiving.moved_at)

    def chunk_left_s(self, now: float) -> float:
        """Returns how long the rest of its chunk takes at the pace of its received part."""
        if self.receiving is None or not self.receiving.chunk_bytes:
            return 0.0
        came, took_s = self.receiving.chunk_bytes, now - self.receiving.chunk_began
        return took_s * (CHUNK_BYTES - came) / came


class Hedging:
    """The patience of one file."""

    def __init__(self) -> None:
        self._silent_s = _SILENT_S

    def lost_patience(self) -> None:
        """Notes that a stream lost its work."""
        self._silent_s = min(2 * self._silent_s, STALL_S)

    def is_stuck(self, stream: SourceStream, active: Collection[PeerSource], now: float) -> bool:
        """Returns whether the stream is stuck. `active`: the sources that are asked at the time."""
        patience_s = _SILENT_S if stream.on_trial else self._silent_s
        if stream.receiving is None:
            relay_s = _RELAY_S if stream.source.is_relay else 0.0
            patience_s = max(patience_s, relay_s, _ANSWERS * stream.source.answer_s)
        if stream.silent_s(now) > patience_s:
            return True
        others = [each.chunk_s for each in active if each is not stream.source and each.chunk_s]
        if not others:
            return False
        return stream.chunk_left_s(now) > max(_SLOW_S, _SLOW_FACTOR * min(others))
