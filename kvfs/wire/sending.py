"""A response onto a stream."""

from collections.abc import AsyncGenerator
from typing import Final

from kvfs.wire.head import Head
from kvfs.wire.response import FileRange, Response, has_body
from kvfs.wire.stream import Stream

_JOINED_BYTES: Final = 32 << 10  # a smaller body goes out in one call with its head


async def send_response(
    stream: Stream, rendered: bytes, head: Head | None, response: Response
) -> None:
    """Send `rendered`, the response's head, and its body.

    Raises Lost, Stalled, and what a generator raises: a part may have gone then."""
    stream.restart_pace()
    body = response.body if has_body(head, response) else None
    if body is None:
        await stream.send(rendered)
    elif isinstance(body, bytes):
        await _send_bytes(stream, rendered, body)
    elif isinstance(body, FileRange):
        await stream.send(rendered, more=body.length > 0)
        await stream.send_file(body.fd, body.offset, body.length, body.unchanged)
    else:
        await stream.send(rendered)
        await _send_generated(stream, body, in_chunks=head is None or not head.http_1_0)


async def _send_bytes(stream: Stream, rendered: bytes, body: bytes) -> None:
    if len(body) <= _JOINED_BYTES:
        await stream.send(rendered + body)
    else:
        await stream.send(rendered, more=True)
        await stream.send(body)


async def _send_generated(
    stream: Stream, body: AsyncGenerator[bytes, None], in_chunks: bool
) -> None:
    async for piece in body:
        if piece:  # an empty chunk would end the body
            await stream.send(b"%x\r\n%b\r\n" % (len(piece), piece) if in_chunks else piece)
    if in_chunks:
        await stream.send(b"0\r\n\r\n")
