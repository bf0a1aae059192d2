"""The body of a request, moved into buffers of the handler."""

from typing import Final

from kvfs.http.chunks import ChunkFraming
from kvfs.http.connection_errors import (
    BodyStalled,
    BodyTooLarge,
    BodyTruncated,
    ConnectionLost,
    RequestRefused,
    Stalled,
)
from kvfs.http.head import Field, Head
from kvfs.http.inbox import Inbox
from kvfs.http.limits import Limits

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_DRAIN_BYTES: Final = 64 << 10


class RequestBody:
    """The body of one request, for the task of its handler.

    With a Content-Length, payload goes from the socket straight into the caller's buffer; only
    bytes that came along with the head are copied, once. Of a chunked body, bytes that came along
    with its framing are copied besides.

    An error is raised again by each later call, and the connection is closed after the response.
    """

    __slots__ = (
        *("_awaits_continue", "_chunks", "_failure", "_inbox", "_left"),
        *("is_none", "received_bytes"),
    )

    def __init__(self, head: Head, inbox: Inbox, limits: Limits) -> None:
        self._inbox = inbox
        self._chunks = ChunkFraming(limits) if head.chunked else None
        self._left = head.content_length or 0
        self.is_none = not self._left and self._chunks is None
        """The request has no body."""
        self._awaits_continue = head.expects_continue
        self._failure: RequestRefused | None = None
        self.received_bytes = 0

    @property
    def remaining(self) -> int | None:
        """Bytes still to come; None while a chunked body's length is not known."""
        if self._chunks is None:
            return self._left
        return 0 if self._chunks.ended else None

    @property
    def trailers(self) -> list[Field]:
        """The trailers of a chunked body; empty before its end."""
        return [] if self._chunks is None else self._chunks.trailers

    async def receive_into(self, buffer: memoryview) -> int:
        """Receives payload into `buffer`, at least a byte if it has room; 0: the body has ended.

        The first call lets a client go on that asked whether it may (`100-continue`). Raises
        BodyTruncated, BodyStalled, BadChunk, BodyTooLarge, RequestRefused (a bad trailer),
        ConnectionLost. Cancelled: received bytes are in the buffer or still to come; none are
        skipped.
        """
        inbox = self._inbox
        if self._failure is not None:
            raise self._failure
        if self._chunks is None and not self._awaits_continue and inbox.start < len(inbox.data):
            count = inbox.move_into(buffer[: self._left])
            self._left -= count
            self.received_bytes += count
            return count
        try:
            if self._awaits_continue:
                await self.send_continue()
            count = await self._receive(buffer)
        except Stalled as error:
            self._failure = BodyStalled()
            raise self._failure from error
        except ConnectionLost as error:
            self._failure = BodyTruncated()
            raise self._failure from error
        except RequestRefused as error:
            self._failure = error
            raise
        self.received_bytes += count
        return count

    def receive_soon(self, buffer: memoryview, patience_ms: int) -> int | None:
        """`receive_into` for a thread that the handler waits for, so that consecutive bytes cost no
        turn of the loop: None if nothing comes within so many milliseconds, or the loop is needed
        for it. Raises what `receive_into` raises."""
        if self._failure is not None:
            raise self._failure
        if self._chunks is not None or self._awaits_continue:
            return None
        if self._left == 0:
            return 0
        try:
            count = self._inbox.receive_soon(buffer[: self._left], patience_ms)
        except ConnectionLost as error:
            self._failure = BodyTruncated()
            raise self._failure from error
        if count == 0 and len(buffer):
            self._failure = BodyTruncated()
            raise self._failure
        if count is not None:
            self._left -= count
            self.received_bytes += count
        return count

    async def fill(self, buffer: memoryview) -> int:
        """Calls `receive_into` until `buffer` is full or the body has ended, and returns the number
        of bytes."""
        filled = 0
        while filled < len(buffer) and (count := await self.receive_into(buffer[filled:])):
            filled += count
        return filled

    async def read(self, limit_bytes: int) -> bytes:
        """Returns the rest of a small body. Raises BodyTooLarge if it exceeds the limit, else what
        `receive_into` raises."""
        if self._left > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        buffer = bytearray(min(limit_bytes, self._left) if self._chunks is None else limit_bytes)
        count = await self.fill(memoryview(buffer))
        if self._chunks is not None and await self.receive_into(memoryview(bytearray(1))):
            raise BodyTooLarge(limit_bytes)
        return bytes(memoryview(buffer)[:count])

    async def drain(self, limit_bytes: int) -> bool:
        """Receives and drops the rest, up to the limit; False if that is not all of it.

        Raises what `receive_into` raises."""
        scratch = memoryview(bytearray(min(_DRAIN_BYTES, limit_bytes)))
        left = limit_bytes
        while left > 0 and (count := await self.receive_into(scratch[:left])):
            left -= count
        return self.remaining == 0

    async def send_continue(self) -> None:
        """Lets the client go on if it still waits for leave. Raises ConnectionLost."""
        if self._awaits_continue:
            self._awaits_continue = False
            await self._inbox.stream.send(_CONTINUE)

    def is_over(self) -> bool:
        """Returns whether all of it has been received."""
        if self._failure is not None:
            return False
        return self._left == 0 if self._chunks is None else self._chunks.ended

    def can_be_drained(self, limit_bytes: int) -> bool:
        """Returns whether the rest is known to come, and not to exceed the limit."""
        if self._failure is not None or (self._chunks is not None and not self._chunks.ended):
            return False
        if self._chunks is not None or self._left == 0:
            return True
        return self._left <= limit_bytes and not self._awaits_continue

    async def _receive(self, buffer: memoryview) -> int:
        left = self._left if self._chunks is None else await self._next_chunk(self._chunks)
        if left == 0:
            return 0
        count = await self._inbox.receive_into(buffer[:left])
        if count == 0 and len(buffer):
            raise BodyTruncated
        if self._chunks is None:
            self._left -= count
        else:
            self._chunks.left -= count
        return count

    async def _next_chunk(self, chunks: ChunkFraming) -> int:
        """Returns how much of the payload comes before the next framing; 0 at the body's end."""
        inbox = self._inbox
        while chunks.left == 0 and not chunks.ended:
            await inbox.stream.take_turn()  # a flood of tiny chunks must not keep others waiting
            if (end := chunks.advance(inbox.data, inbox.start)) >= 0:
                inbox.start = end
            elif not await inbox.more():
                raise BodyTruncated
        return chunks.left
