"""The bytes that have arrived on a stream and were not taken yet."""

import time
from typing import Final

from kvfs.http.connection_errors import RequestRefused, Stalled
from kvfs.http.head import Head
from kvfs.http.limits import Limits
from kvfs.http.parser import HeadParser, head_end
from kvfs.http.stream import AT_ONCE, Stream

READ_BYTES: Final = 64 << 10
"""Bytes that are taken from a socket at a time, except payload."""


class Inbox:
    """The bytes: `data` from `start` on. Owned by the task that owns the stream."""

    __slots__ = (
        *(
            "_head_bytes",
            "_heads",
            "_limits",
            "peer",
            "data",
            "idle",
            "in_head",
            "is_fresh",
            "since",
        ),
        *("since", "start", "stopping", "stream"),
    )

    def __init__(
        self, stream: Stream, limits: Limits, heads: HeadParser, peer: tuple[str, int]
    ) -> None:
        self.stream = stream
        self._heads = heads
        self.data = b""
        self.start = 0
        self.idle = False
        self.in_head = False
        """Whether a part of a head has come."""
        self.is_fresh = True
        """Whether no head has come yet."""
        self.since = time.monotonic()
        """The time when it began to be idle, or its head to come."""
        self.stopping = False
        self._limits = limits
        self._head_bytes = limits.head_bytes
        self.peer = peer

    def is_empty(self) -> bool:
        return self.start == len(self.data)

    async def next_head(self) -> Head | None:
        """Returns the next request's head; None: the peer closed, or began none for `idle_s`
        seconds.

        Raises RequestRefused if it is no proper head, or came too slowly (408); ConnectionLost."""
        if self.start == len(self.data):
            self.start = 0
            self.data = b""
            self.idle = True
            try:
                self.since = time.monotonic()
                self.data = await self.stream.receive(READ_BYTES, self.since + self._patience_s())
            except Stalled:
                self.data = await self._received_already()
            finally:
                self.idle = False
            if not self.data:
                return None
        if self.data.startswith(b"\r\n", self.start):
            self._skip_empty_lines()
        end = self.data.find(b"\r\n\r\n", self.start) + 4
        if not 4 <= end <= self.start + self._head_bytes:
            end = head_end(self.data, self.start, self._limits)
            if end < 0 and (end := await self._rest_of_head()) < 0:
                return None
        block = self.data[self.start : end]  # all of it, mostly: then no copy
        self.start = end
        self.is_fresh = False
        return self._heads.parse(block, self.peer, self.stream.secure)

    def _patience_s(self) -> float:
        """Returns the seconds for which the next head is awaited."""
        if self.stopping:
            return self._limits.parting_s
        return self._limits.head_s if self.is_fresh else self._limits.idle_s

    async def _received_already(self) -> bytes:
        """Returns the bytes that have come, when no more may be awaited."""
        try:
            return await self.stream.receive(READ_BYTES, AT_ONCE)
        except Stalled:
            return b""

    async def _rest_of_head(self) -> int:
        """Receives the rest of the head and returns where it ends; -1: the peer closed before."""
        self.in_head = True
        self.since = time.monotonic()
        patience_s = self._limits.first_head_s if self.is_fresh else self._limits.head_s
        try:
            return await self._receive_head(self.since + patience_s)
        finally:
            self.in_head = False

    async def _receive_head(self, deadline: float) -> int:
        while True:
            try:
                data = await self.stream.receive(READ_BYTES, deadline)
            except Stalled:
                raise RequestRefused(408, "the head came too slowly") from None
            if not data:
                return -1
            self._append(data)
            self._skip_empty_lines()
            if (end := head_end(self.data, self.start, self._limits)) >= 0:
                return end

    def _skip_empty_lines(self) -> None:
        """Skips empty lines before a request line (RFC 9112, 2.2)."""
        while self.data.startswith(b"\r\n", self.start):
            self.start += 2

    async def more(self) -> bool:
        """Appends bytes of a body to `data` as they come; False: the peer closed. Raises Stalled,
        ConnectionLost."""
        data = await self.stream.receive_paced(READ_BYTES)
        self._append(data)
        return bool(data)

    def _append(self, data: bytes) -> None:
        self.data = self.data[self.start :] + data
        self.start = 0

    def move_into(self, view: memoryview) -> int:
        """Moves the bytes here into `view`, as many as it takes."""
        count = min(len(view), len(self.data) - self.start)
        view[:count] = memoryview(self.data)[self.start : self.start + count]
        self.start += count
        return count

    async def receive_into(self, view: memoryview) -> int:
        """Receives payload into `view`: the bytes here, else from the socket; 0: the peer closed.

        Raises Stalled, ConnectionLost."""
        if self.start < len(self.data):
            return self.move_into(view)
        return await self.stream.receive_into(view)

    def receive_soon(self, view: memoryview, patience_ms: int) -> int | None:
        """Does the same for a thread: see `Stream.receive_soon`. Raises ConnectionLost."""
        if self.start < len(self.data):
            return self.move_into(view)
        return self.stream.receive_soon(view, patience_ms)
