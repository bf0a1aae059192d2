"""Counts of a worker's responses, by operation and bucket: added up without a lock by its event
loop, told to the supervisor as plain numbers, and merged there.

A bucket has counts of its own once a request in it succeeded, and only BUCKETS of them do: names
that clients make up cannot fill the memory, or the metrics.
"""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

import msgspec

from kvfs.http.api import Counters, Head, OnResponse
from kvfs.vfs.miss_counters import Misses, no_misses
from s3api.http.outcome import RequestOutcome

BUCKETS: Final = 32
OTHER: Final = "(other)"
"""Stands for buckets without counts of their own."""
REFUSED: Final = "(refused)"
"""Stands for the operation of requests that were refused before one was found."""
BOUNDS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
)
"""Upper bounds of the histogram of seconds; one more class has the longer ones."""


class Flow(msgspec.Struct):
    """The counts of one operation in one bucket."""

    operation: str
    bucket: str
    statuses: dict[int, int] = {}
    """Responses by status."""
    errors: dict[str, int] = {}
    """Responses by error code."""
    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    classes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Responses by their time: how many took up to each of BOUNDS_S, and not up to the one
    before."""

    @property
    def responses(self) -> int:
        return sum(self.statuses.values())

    def add(self, other: "Flow") -> None:
        """Adds another's counts."""
        for status, count in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + count
        for code, count in other.errors.items():
            self.errors[code] = self.errors.get(code, 0) + count
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes
        self.seconds += other.seconds
        self.classes = [a + b for a, b in zip(self.classes, other.classes, strict=True)]


class Tally(msgspec.Struct):
    """The counts of one worker, or of all."""

    flows: list[Flow] = []
    open_connections: int = 0
    waiting_connections: int = 0
    """Connections that were accepted, and wait for others to end before they are served."""
    connections: int = 0
    refused: int = 0
    """Requests that were no proper ones."""
    failed: int = 0
    """Responses that did not go out whole."""
    misses: dict[str, int] = {}
    """Missing objects that were asked for, by reason."""

    @property
    def responses(self) -> int:
        return sum(flow.responses for flow in self.flows)

    @property
    def sent_bytes(self) -> int:
        return sum(flow.sent_bytes for flow in self.flows)

    @property
    def received_bytes(self) -> int:
        return sum(flow.received_bytes for flow in self.flows)


class Recorder:
    """Counts for one worker. `record` is the server's `on_response`."""

    def __init__(self, counters: Counters, misses: Misses) -> None:
        self._counters = counters
        self._misses = misses
        self._flows: dict[tuple[str, str], Flow] = {}
        self._buckets = {""}
        self._further: OnResponse | None = None

    def tell_too(self, further: OnResponse) -> None:
        """Tells `further` of each response too, from now on. Any thread."""
        self._further = further

    def record(self, head: Head | None, status: int, sent_bytes: int, seconds: float) -> None:
        """Counts one more response."""
        if self._further is not None:
            self._further(head, status, sent_bytes, seconds)
        outcome = None if head is None else head.handled
        call = outcome.call if isinstance(outcome, RequestOutcome) else None
        where = (REFUSED, "") if call is None else (call.operation, call.bucket)
        flow = self._flows.get(where) or self._flow(*where, status)
        flow.statuses[status] = flow.statuses.get(status, 0) + 1
        flow.sent_bytes += sent_bytes
        flow.seconds += seconds
        flow.classes[bisect_left(BOUNDS_S, seconds)] += 1
        if not isinstance(outcome, RequestOutcome):
            return
        if outcome.code:
            flow.errors[outcome.code] = flow.errors.get(outcome.code, 0) + 1
        if call is not None:
            flow.received_bytes += call.body.received_bytes

    def _flow(self, operation: str, bucket: str, status: int) -> Flow:
        """Returns the counts of a flow that may have none yet."""
        if bucket not in self._buckets:
            bucket = self._admitted(bucket, status)
        found = self._flows.get((operation, bucket))
        if found is None:
            found = self._flows[operation, bucket] = Flow(operation, bucket)
        return found

    def _admitted(self, bucket: str, status: int) -> str:
        if status >= 300 or len(self._buckets) > BUCKETS:
            return OTHER
        self._buckets.add(bucket)
        return bucket

    def tally(self) -> Tally:
        """Returns the counts so far."""
        counters = self._counters
        return Tally(
            list(self._flows.values()),
            counters.open_connections,
            counters.waiting_connections,
            counters.connections,
            counters.refused,
            counters.failed,
            dict(self._misses.counts),
        )


class Merger:
    """Adds up the tallies of workers, those of dead workers included, so that no count ever falls;
    at most BUCKETS buckets in all."""

    def __init__(self) -> None:
        self._past = Tally()
        self._buckets = {"", OTHER}

    def bury(self, last: Tally) -> None:
        """Keeps the last counts of a worker that has died."""
        self._past = self.total([last])
        self._past.open_connections = self._past.waiting_connections = 0

    def total(self, living: Iterable[Tally]) -> Tally:
        """Returns the counts of all."""
        total = Tally([], misses=no_misses())
        flows: dict[tuple[str, str], Flow] = {}
        for tally in (self._past, *living):
            total.open_connections += tally.open_connections
            total.waiting_connections += tally.waiting_connections
            total.connections += tally.connections
            total.refused += tally.refused
            total.failed += tally.failed
            for reason, count in tally.misses.items():
                total.misses[reason] += count
            for flow in tally.flows:
                bucket = self._admitted(flow.bucket)
                place = flow.operation, bucket
                if place not in flows:
                    flows[place] = Flow(flow.operation, bucket, {}, {})
                flows[place].add(flow)
        total.flows = [flows[place] for place in sorted(flows)]
        return total

    def _admitted(self, bucket: str) -> str:
        if bucket not in self._buckets and len(self._buckets) <= BUCKETS + 1:
            self._buckets.add(bucket)
        return bucket if bucket in self._buckets else OTHER
