"""The chunks of one file from the nodes that have it.

A stream asks a source for a span of chunks and receives it; then for the next. Chunks that it did
not get go back into the plan, to whichever stream is free. A source that is stuck while others are
not loses its streams (hedging): others are asked for their chunks, and the file never has two
writers of one chunk. What was learned of a source so holds for other files too, for a while.

Invariants
- Every wait ends: an answer's head and each pause of a body within STALL_S, a source after two
  failures in a row, the file with its last source.
- A file that lacks one chunk comes by the task that wants it: others begin where its first source
  brings nothing.
- A checksum is believed where the record vouches for it: of sealed files all are compared with the
  record's before a chunk counts.
"""

import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from kvfs.base.errors import Conflict, Corrupt, KvfsError, Unavailable
from kvfs.cluster.peer_client import IncomingChunks, PeerClient, Redirected
from kvfs.cluster.peer_protocol import CHUNK_BYTES, DIGEST_BYTES, MOST_SUMS, Ask, Later, PeerAddress
from kvfs.datastore.checksum import ZERO_CHUNK, combine
from kvfs.http.api import ConnectionLost
from kvfs.transfer.chunk_plan import ChunkSpan
from kvfs.transfer.chunk_receiver import STALL_S
from kvfs.transfer.hedging import Hedging, SourceStream
from kvfs.transfer.sources import PeerSource, Sources, Standing
from kvfs.transfer.transfer import Transfer
from kvfs.transfer.transport import Transport

log = logging.getLogger(__name__)

_RELAY_MOST_S: Final = 10.0
"""Time for which a node that is getting the file itself may have no chunk for us."""
_RETRY_S: Final = 0.1
_SUMS_S: Final = 5.0
_DOUBT_S: Final = 10.0
"""Time for which a node that failed to bring its chunks is the last to be asked for other files: a
lease's length, after which one that died has none."""
_NEXT_S: Final = 0.5
"""Time after which a second source is asked for the checksums."""


@dataclass(frozen=True, slots=True)
class Means:
    """The means that the files of a node share."""

    peers: PeerClient
    me: int
    """This node's number."""
    transport: Transport
    threads: trio.CapacityLimiter
    paces: dict[int, float]
    """Seconds that a stream of a node took for a chunk, when last asked."""
    doubts: dict[int, float]
    """Times (time.monotonic) until which a node is the last to be asked."""
    counters: dict[str, int]

    def in_doubt(self) -> set[int]:
        """Returns the nodes that are the last to be asked now."""
        now = time.monotonic()
        return {node for node, until in self.doubts.items() if now < until}

    def doubt(self, node: int) -> None:
        self.doubts[node] = time.monotonic() + _DOUBT_S


class PeerFetch:
    """The fetch of one file."""

    def __init__(self, means: Means, transfer: Transfer, holders: Sequence[PeerAddress]) -> None:
        self.transfer = transfer
        self.began = time.monotonic()
        self._means = means
        self._plan = transfer.plan
        chunks, doubts = self._plan.chunks, means.in_doubt()
        self._sources = Sources(holders, chunks, means.me, means.paces, doubts)
        self._streams: set[SourceStream] = set()
        self._hedging = Hedging()
        self._failure: Exception | None = None
        self._nursery: trio.Nursery | None = None
        """None: the task that wants it asks alone."""

    def is_asked_of(self, chunk: int, node: int) -> bool:
        return any(
            stream.source.address.node == node and stream.span.first <= chunk < stream.span.end
            for stream in self._streams
        )

    async def run(self) -> None:
        """Returns when all chunks are here. Raises what `Sources.failure` raises, OSError (of the
        file). When it is cancelled, the chunks that came stay, and nothing is written any more."""
        counters, succeeded = self._means.counters, False
        try:
            if self.transfer.wanted.checksum and self._plan.chunks > MOST_SUMS:
                await self._agree()
            if self._plan.left() == 1:
                await self._ask_alone()
            if not self._has_ended:
                await self._ask_all()
            if self._failure is not None:
                raise self._failure
            succeeded = True
        finally:
            self._means.paces.update(self._sources.paces())
            counters["fetched_files" if succeeded else "fetches_failed"] += 1

    @property
    def _has_ended(self) -> bool:
        return self._plan.is_whole or self._failure is not None

    async def _ask_alone(self) -> None:
        """Fetches one chunk from the first source, without a task of its own."""
        for source in self._sources.activate(time.monotonic())[:1]:
            span = self._plan.take(1)
            if span is not None:
                source.streams += 1
                try:
                    await self._fetch(SourceStream(source, span))
                finally:
                    source.streams -= 1

    async def _ask_all(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                self._engage(self._sources.of(Standing.ACTIVE))
                self._replace_sources()
                while not self._has_ended:
                    await self.transfer.changed.wait()
            finally:
                self._nursery = None
                for stream in self._streams:
                    stream.cut()
            nursery.cancel_scope.cancel()

    def _fail(self, error: Exception) -> None:
        """Ends the fetch: nothing more comes."""
        if self._failure is None:
            self._failure = error
        self.transfer.wake()

    # --- the checksums of a sealed file ---

    async def _agree(self) -> None:
        """Learns all checksums from a source that the record agrees with; a second is asked if the
        first is slow. Raises the error of `Sources.failure`."""
        async with trio.open_nursery() as nursery:
            asked = self._sources.of(Standing.RESERVE)
            for delay, source in enumerate(asked):
                nursery.start_soon(self._ask_sums, source, delay * _NEXT_S)
            while not self.transfer.is_agreed:
                if all(source.standing is Standing.OUT for source in asked):
                    break
                await self.transfer.changed.wait()
            nursery.cancel_scope.cancel()
        if not self.transfer.is_agreed:
            raise self._sources.failure()

    async def _ask_sums(self, source: PeerSource, delay_s: float) -> None:
        await trio.sleep(delay_s)
        wanted = self.transfer.wanted
        while source.standing is not Standing.OUT:
            began = time.monotonic()
            try:
                sums = await self._means.peers.call(
                    source.address, "sums", [wanted.ino, wanted.version, wanted.size], _SUMS_S
                )
                self._agree_on(sums)
                return
            except KvfsError as error:
                self._source_failed(source, error, began)
                await trio.sleep(_RETRY_S)

    def _agree_on(self, sums: object) -> None:
        """Trusts these checksums of all chunks. Raises Corrupt if the record does not vouch for
        them."""
        if (
            not isinstance(sums, bytes)
            or len(sums) != self._plan.chunks * DIGEST_BYTES
            or combine(sums) != self.transfer.wanted.checksum
        ):
            raise Corrupt("other checksums than the record's")
        self.transfer.agree(sums)
        if ZERO_CHUNK in sums:
            self._skip_zeros(sums)

    def _skip_zeros(self, sums: bytes) -> None:
        """Counts the chunks of zeros as here: the file began as a hole."""
        for chunk in range(self.transfer.wanted.size // CHUNK_BYTES):
            at = chunk * DIGEST_BYTES
            if sums[at : at + DIGEST_BYTES] == ZERO_CHUNK:
                self._plan.skip(chunk)
        self.transfer.wake()

    # --- streams ---

    def _engage(self, sources: list[PeerSource]) -> None:
        """Has these asked, by as many streams as each is to have."""
        if self._nursery is None:
            return
        for source in sources:
            while source.streams < min(source.streams_wanted, self._plan.chunks):
                source.streams += 1
                self._nursery.start_soon(self._work, source)

    async def _work(self, source: PeerSource) -> None:
        """Runs one stream after the other, as long as the source is asked."""
        try:
            while self._is_engaged(source):
                on_trial = self._sources.is_on_trial(source)
                span = self._next_span(source, on_trial)
                if span is None:
                    await self.transfer.changed.wait()
                elif not await self._fetch(SourceStream(source, span, on_trial=on_trial)):
                    await trio.sleep(_RETRY_S)  # it is not asked without end
        finally:
            source.streams -= 1

    def _is_engaged(self, source: PeerSource) -> bool:
        if source.standing is not Standing.ACTIVE or self._has_ended:
            return False
        return source.streams <= max(1, source.streams_wanted)

    def _next_span(self, source: PeerSource, on_trial: bool) -> ChunkSpan | None:
        return self._plan.take_last() if on_trial else self._plan.take(self._span_limit(source))

    def _span_limit(self, source: PeerSource) -> int:
        active = self._sources.of(Standing.ACTIVE)
        streams = sum(each.streams_wanted for each in active)
        asked = sum(stream.span.chunks for stream in self._streams)
        return source.span_limit(self._plan.left(), asked, streams, len(active) == 1)

    async def _fetch(self, stream: SourceStream) -> bool:
        """Returns False if it brought nothing, at once."""
        self._streams.add(stream)
        try:
            with stream.scope:
                await self._receive(stream)
        except Redirected as redirect:
            self._redirected(stream, redirect.addresses)
        except Later:
            self._wait_on(stream.source)
        except ConnectionLost as error:
            self._source_failed(stream.source, Unavailable(str(error)), stream.began)
        except KvfsError as error:
            self._source_failed(stream.source, error, stream.began)
        except OSError as error:  # the file's: nobody else can help
            self._fail(error)
        finally:
            self._streams.discard(stream)
            self._plan.give_back(stream.span)
            self._replace_sources()
            self.transfer.wake()
        return stream.receiving is not None or time.monotonic() - stream.began >= _RETRY_S

    async def _receive(self, stream: SourceStream) -> None:
        wanted, source, span = self.transfer.wanted, stream.source, stream.span
        ask = Ask(
            *(wanted.ino, wanted.version, wanted.size, span.first, span.chunks),
            sealed=bool(wanted.checksum),
            insist=stream.insists,
        )
        transport = self._means.transport
        mover = transport.mover(source.address, ask)
        async with self._means.peers.data(source.address, ask, STALL_S, mover) as incoming:
            arrived = functools.partial(self._arrived, stream, incoming)
            with transport.taking(source.address, incoming, self.transfer.sink, arrived) as taking:
                self._believe(incoming)
                source.answered(time.monotonic() - stream.began)
                stream.receiving = taking
                await taking.run(self._means.threads)

    def _believe(self, incoming: IncomingChunks) -> None:
        """Returns whether the checksums that were announced are those of the content that is
        wanted. Raises Corrupt, Conflict."""
        transfer, sums = self.transfer, incoming.sums
        if not transfer.wanted.checksum:
            transfer.stamp = transfer.stamp or incoming.stamp
            if incoming.stamp != transfer.stamp:
                raise Conflict("the file was changed while it was fetched")
            return
        if not transfer.is_agreed:
            self._agree_on(incoming.all_sums)
        if sums != transfer.sums_of(incoming.ask.first, incoming.count):
            raise Corrupt("other checksums than those that the record vouches for")

    def _arrived(
        self,
        stream: SourceStream,
        incoming: IncomingChunks,
        chunk: int,
        bytes_: int,
        seconds: float,
    ) -> None:
        at = (chunk - incoming.ask.first) * DIGEST_BYTES
        stream.source.came(bytes_, seconds, time.monotonic())
        self._means.doubts.pop(stream.source.address.node, None)
        if stream.source.standing is Standing.ACTIVE:
            self._engage([stream.source])
        self._means.counters["fetched_bytes"] += bytes_
        self.transfer.put(chunk, incoming.sums[at : at + DIGEST_BYTES])

    # --- what goes wrong ---

    def _redirected(self, stream: SourceStream, addresses: list[PeerAddress]) -> None:
        self._means.counters["fetches_redirected"] += 1
        source = stream.source
        if stream.insists:
            error = Unavailable(f"node {source.address.node} sends everybody away")
            self._source_failed(source, error, stream.began)
        else:
            self._sources.redirected(source, addresses)

    def _wait_on(self, source: PeerSource) -> None:
        """Waits for a source that is getting the file itself."""
        now = time.monotonic()
        if now - source.came_at > _RELAY_MOST_S:
            error = Unavailable(f"node {source.address.node} does not get the file either")
            self._source_failed(source, error, now)

    def _source_failed(self, source: PeerSource, error: KvfsError, began: float) -> None:
        if isinstance(error, Corrupt) and self.transfer.wanted.checksum:
            self._means.counters["fetches_wrong_bytes"] += 1
            log.warning("node %d gave wrong data of a file: %s", source.address.node, error)
        elif isinstance(error, Corrupt):
            error = Conflict("the file was changed while it was sent")
        if isinstance(error, Unavailable):
            self._means.doubt(source.address.node)
        source.failed(error, began, time.monotonic())
        self.transfer.wake()

    def _replace_sources(self) -> None:
        """Engages as many sources as the file is worth; without any it has failed."""
        if self._nursery is None or self._has_ended:
            return
        self._engage(self._sources.activate(time.monotonic()))
        if not self._sources.of(Standing.ACTIVE) and not self._plan.is_whole:
            self._fail(self._sources.failure())

    def look(self, now: float) -> None:
        """Takes from a source that is stuck what another could bring; to be called now and then."""
        self._replace_sources()
        active = self._sources.of(Standing.ACTIVE)
        stuck = [each for each in self._streams if self._hedging.is_stuck(each, active, now)]
        for stream in stuck:
            self._hedge(stream, stuck, now)

    def _hedge(self, stream: SourceStream, stuck: list[SourceStream], now: float) -> None:
        if stream.was_cut:
            return
        slow = {each.source.address.node for each in stuck}
        free = [
            source
            for source in self._sources.of(Standing.ACTIVE)
            if source.address.node not in slow
        ]
        if not free:
            others = self._sources.activate_another(now)
            if not others:
                return
            self._engage(others)
        if not stream.on_trial:
            self._hedging.lost_patience()
            self._means.counters["fetches_hedged"] += 1
        self._sources.too_slow(stream.source, now)
        self._means.doubt(stream.source.address.node)
        for each in tuple(self._streams):
            if each.source is stream.source:
                each.cut()
