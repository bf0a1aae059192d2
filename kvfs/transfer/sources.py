"""The nodes that may have a file, and what is known of each. Pure: no clock, no I/O.

    reserve -> active -> out
       ^         |
       +---------+  it sent us to others (then it is asked to insist), or was too slow

Invariants
- A source that is out stays out: it does not have the file, has another content, or failed twice in
  a row.
- A source in reserve becomes active where the active ones are too few or all stuck.
- A source that was too slow is in doubt until a chunk comes from it. Beside one that is not it is
  on trial: it may have what nobody waits for, so that a host that cannot be reached costs a reader
  one pause, and not one for each time that it is tried.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import Final

from kvfs.base.errors import Busy, Conflict, Corrupt, KvfsError, NotFound, Unavailable
from kvfs.cluster.peer_protocol import CHUNK_BYTES, MOST_CHUNKS, PeerAddress

STREAMS: Final = 2
"""Streams for each source of a file: while one asks, the other receives."""
_FAST_S: Final = 0.05
"""Time for a chunk below which the time between an answer and the next counts."""
_REST_S: Final = 1.0
_SPAN_S: Final = 0.1
"""Seconds that one request takes, about: the shorter, the less is lost with a holder."""
_PASSING: Final = Unavailable
_FIRST_CHUNKS: Final = 8
"""Chunks asked for before their speed is known."""
_MOST_STRIKES: Final = 2
_MOST_SOURCES: Final = 64
_CHUNKS_EACH: Final = 4
"""With fewer chunks for each source, not all sources of a file are asked at once."""


class Standing(Enum):
    """The standing of a source."""

    RESERVE = "reserve"
    ACTIVE = "active"
    OUT = "out"


class PeerSource:
    """One node that may have the file."""

    def __init__(
        self, address: PeerAddress, chunk_s: float = 0.0, is_in_doubt: bool = False
    ) -> None:
        self.address = address
        self.standing = Standing.RESERVE
        self.is_in_doubt = is_in_doubt
        self.is_relay = False
        """Whether a holder named it: it may be getting the file itself, and answers when it has the
        chunk."""
        self.insist = False
        self.strikes = 0
        self.cuts = 0
        """How often it was too slow."""
        self.chunk_s = chunk_s
        """Seconds that a stream takes for a chunk; 0: not known."""
        self.came_at = 0.0
        """The time when a chunk last came, or it was first asked."""
        self.rests_until = -math.inf
        """The time until which others are asked, since it was too slow."""
        self.answer_s = 0.0
        """Seconds that it takes to answer."""
        self.streams = 0
        self.failure: KvfsError | None = None
        self._struck_at = -math.inf

    def came(self, bytes_: int, seconds: float, now: float) -> None:
        """Notes that so much of a chunk came in so long a time."""
        self.strikes = 0
        self.is_in_doubt = False
        self.came_at = now
        whole_s = seconds * CHUNK_BYTES / max(bytes_, 1)
        self.chunk_s = (self.chunk_s + whole_s) / 2 if self.chunk_s else whole_s

    def answered(self, seconds: float) -> None:
        self.answer_s = (self.answer_s + seconds) / 2

    def failed(self, error: KvfsError, began: float, now: float) -> None:
        """Notes that a request made at `began` failed. Requests that fail together are one
        failure."""
        self.failure = error
        if began > self._struck_at:
            self.strikes += 1
            self._struck_at = now
        if not isinstance(error, _PASSING) or self.strikes >= _MOST_STRIKES:
            self.standing = Standing.OUT

    @property
    def streams_wanted(self) -> int:
        """The number of requests that should be under way at a time. A chunk of a slow one comes
        sooner, and can be passed on, if it does not share the link with the next."""
        pace_s = self.chunk_s / max(1, self.streams)
        return STREAMS if 0 < pace_s < _FAST_S and not self.is_in_doubt else 1

    def span_limit(self, left: int, asked: int, streams: int, alone: bool) -> int:
        """Returns how many chunks to ask for in one request, if `left` are to be asked for and
        `asked` are under way, shared among so many streams. `alone`: no other source is asked, so
        that none could be left with too many."""
        share = -(-(left + asked if alone else left / 2) // max(streams, 1))
        if not self.chunk_s:
            return max(1, min(_FIRST_CHUNKS if alone else 1, int(share)))
        return max(1, min(int(_SPAN_S / self.chunk_s), int(share), MOST_CHUNKS))


class Sources:
    """The sources of one file."""

    def __init__(
        self,
        addresses: Iterable[PeerAddress],
        chunks: int,
        me: int,
        paces: Mapping[int, float] | None = None,
        in_doubt: Collection[int] = (),
    ) -> None:
        """`paces`: seconds that nodes took for a chunk of other files; `in_doubt`: nodes that
        failed to bring chunks of other files."""
        self._me = me
        self._paces = paces or {}
        self._in_doubt = in_doubt
        self._all: dict[int, PeerSource] = {}
        self.add(addresses)
        self._at_once = max(1, chunks // _CHUNKS_EACH)

    def add(self, addresses: Iterable[PeerAddress]) -> list[PeerSource]:
        """Adds nodes that may have it; returns those that were not known before."""
        added = []
        for address in addresses:
            known = address.node == self._me or address.node in self._all
            if not known and len(self._all) < _MOST_SOURCES:
                pace_s, doubt = self._paces.get(address.node, 0.0), address.node in self._in_doubt
                self._all[address.node] = source = PeerSource(address, pace_s, doubt)
                added.append(source)
        return added

    def of(self, standing: Standing) -> list[PeerSource]:
        return [source for source in self._all.values() if source.standing is standing]

    def activate(self, now: float) -> list[PeerSource]:
        """Returns the sources that are to be asked from now on, so that as many are as the file is
        worth. One that redirected us is asked again if nobody else is left, one that was too slow
        after a while."""
        active, reserve = self.of(Standing.ACTIVE), self._reserve()
        willing = [each for each in reserve if not each.insist and each.rests_until <= now]
        if not willing:
            return [] if active else self._promote(reserve[:1], now)
        # One relay feeds us: if more did, each could feed fewer others.
        relays = [source for source in (*active, *willing) if source.is_relay]
        chosen = [source for source in willing if not source.is_relay or source is relays[0]]
        return self._promote(chosen[: max(0, self._at_once - len(active))], now)

    def activate_another(self, now: float) -> list[PeerSource]:
        """Returns one more, if there is one, since those that are asked are stuck."""
        return self._promote(self._reserve()[:1], now)

    def _promote(self, sources: list[PeerSource], now: float) -> list[PeerSource]:
        for source in sources:
            source.standing = Standing.ACTIVE
            source.came_at = now
        return sources

    def _reserve(self) -> list[PeerSource]:
        return sorted(
            self.of(Standing.RESERVE),
            key=lambda each: (each.is_in_doubt, each.cuts, each.insist, each.is_relay),
        )

    def is_on_trial(self, source: PeerSource) -> bool:
        """Returns whether it is in doubt, while another one is asked that is not."""
        return source.is_in_doubt and not all(each.is_in_doubt for each in self.of(Standing.ACTIVE))

    def too_slow(self, source: PeerSource, now: float) -> None:
        """Makes others be asked in its place, for a while, the second time for longer."""
        source.rests_until = now + _REST_S * 2.0 ** min(source.cuts, 8)
        source.cuts += 1
        source.is_in_doubt = True
        if source.standing is Standing.ACTIVE:
            source.standing = Standing.RESERVE

    def redirected(self, source: PeerSource, addresses: list[PeerAddress]) -> None:
        """Notes that the source redirected us. Asked again, it is to serve us: at once if it names
        only nodes that are known to have the file. It gave them the file a moment ago, and they are
        asked anyway."""
        source.insist = True
        for added in self.add(addresses):
            added.is_relay = True
        named = [self._all[each.node] for each in addresses if each.node in self._all]
        relays = [each for each in named if each.is_relay and each.standing is not Standing.OUT]
        if source.standing is Standing.ACTIVE and relays:
            source.standing = Standing.RESERVE

    def paces(self) -> dict[int, float]:
        """Returns how long a stream of each takes for a chunk, as far as that is known."""
        return {node: each.chunk_s for node, each in self._all.items() if each.chunk_s}

    def failure(self) -> KvfsError:
        """Returns why nothing can be had any more."""
        failures = [source.failure for source in self._all.values() if source.failure is not None]
        for kind in (Corrupt, Conflict, Busy, Unavailable):
            for failure in failures:
                if isinstance(failure, kind):
                    return failure
        if failures and not isinstance(failures[0], NotFound):
            return failures[0]
        return NotFound("no node has the file's data")
