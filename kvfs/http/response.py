"""A handler's response, and its head as bytes. No I/O."""

import functools
import http
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

import msgspec

from kvfs.base.detach import aside
from kvfs.http.head import Field, Head

if TYPE_CHECKING:
    import trio

# What the server decides itself.
_OURS: Final = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"date", b"server")
)
_BODILESS: Final = frozenset((204, 304))
_WITH_BODIES: Final = frozenset((200, 206))


class FileRange(msgspec.Struct):
    """`length` bytes of the file `fd` from `offset`, sent by the kernel.

    `close` is called once, whatever becomes of the response. `unchanged` is asked after each piece
    that was handed to the kernel; if it says no, the connection is reset."""

    fd: int
    offset: int
    length: int
    close: Callable[[], None] | None = None
    unchanged: Callable[[], bool] | None = None
    aside: "trio.CapacityLimiter | None" = None
    """Sends it in threads of this limiter, so that a wait for a disk, or a long copy, does not
    block the loop."""
    coming: Callable[[int, int], Awaitable[None]] | None = None
    """Awaited with (offset, length) before those bytes are sent, if the file is still being filled.
    Raises ConnectionLost if they will not come."""


PLAIN: Final = (bytes, type(None))
"""Bodies that hold nothing which must be given back."""
_OF_A_LENGTH: Final = (bytes, FileRange)
SIZED: Final = (*PLAIN, FileRange)
"""Bodies of a known length."""
ResponseBody = bytes | FileRange | AsyncGenerator[bytes, None] | None


class Prepared(list[Field]):
    """Header fields that are sent many times, checked and rendered once; they must not be
    changed."""

    __slots__ = ("rendered",)

    def __init__(self, fields: Iterable[Field]) -> None:
        """Raises ValueError if they may not be sent as they are."""
        super().__init__(fields)
        self.rendered = render_fields(self)


class Response(msgspec.Struct):
    """`headers`, and `further` ones, which are separate from Prepared ones: without Content-Length,
    Transfer-Encoding, Connection, Date and Server, which the server adds.

    A generator is sent in chunks, or to HTTP/1.0 until the connection is closed; it is always
    closed, and if it raises, the connection is reset. `length` is the Content-Length of a response
    without a body: to HEAD, or with status 304."""

    status: int
    headers: Sequence[Field] = ()
    body: ResponseBody = None
    length: int | None = None
    close: bool = False
    """Whether the connection ends after it."""
    head_bytes: int = 0
    """Bytes of the head as sent, set by the server."""
    further: Sequence[Field] = ()
    lines: bytes = b""
    """Fields that the handler rendered itself, each with its line end."""


def plain_refusal(status: int, reason: str) -> Response:
    """Returns a response with one line of text."""
    return Response(status, [(b"Content-Type", b"text/plain")], f"{reason}\n".encode())


async def release(response: Response) -> None:
    """Gives back what a response holds, sent or not: to be called once. Cancelled: the same."""
    body = response.body
    if isinstance(body, FileRange):
        if body.close is not None:
            body.close()
    elif body is not None and not isinstance(body, bytes):
        await aside()
        await body.aclose()


def has_body(head: Head | None, response: Response) -> bool:
    """Returns whether bytes of `response.body` follow its head."""
    if response.body is None or response.status in _BODILESS:
        return False
    return head is None or head.method != "HEAD"


def is_delimited(head: Head | None, response: Response) -> bool:
    """Returns whether the client can tell where the response ends without the connection's end."""
    if isinstance(response.body, SIZED):
        return True
    return head is not None and not (head.http_1_0 and has_body(head, response))


def render_head(head: Head | None, response: Response, goes_on: bool) -> bytes:
    """Returns status line and fields. `goes_on`: the connection does, after this response.

    Raises ValueError if the handler's fields may not be sent as they are."""
    headers, further, body = response.headers, response.further, response.body
    parts = (
        _status_line(response.status),
        _common_fields(int(time.time())),
        headers.rendered if isinstance(headers, Prepared) else render_fields(headers),
        render_fields(further) if further else b"",
        response.lines,
        b"Content-Length: %d\r\n" % (body.length if isinstance(body, FileRange) else len(body))
        if isinstance(body, _OF_A_LENGTH) and response.status in _WITH_BODIES
        else _length_field(head, response),
        b"\r\n" if goes_on and not (head and head.http_1_0) else _connection_field(goes_on),
    )
    return b"".join(parts)


def render_fields(headers: Sequence[Field]) -> bytes:
    """Returns the lines of a handler's fields. Raises ValueError if they may not be sent as they
    are."""
    fields = b""
    for name, value in headers:
        if name.lower() in _OURS:
            raise ValueError(f"{name.decode('latin-1')} is set by the server alone")
        fields += b"%b: %b\r\n" % (name, value)
    count = len(headers)
    if fields.count(b"\n") != count or fields.count(b"\r") != count or b"\0" in fields:
        raise ValueError("a header field of the response holds a line end or NUL")
    return fields


@functools.lru_cache(maxsize=128)
def _status_line(status: int) -> bytes:
    if not 200 <= status <= 599:
        raise ValueError(f"{status} is no status of a final response")
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


@functools.lru_cache(maxsize=1)
def _common_fields(now_s: int) -> bytes:
    """Returns the fields of all responses, made once a second."""
    return f"Server: KVFS\r\nDate: {formatdate(now_s, usegmt=True)}\r\n".encode("ascii")


def _length_field(head: Head | None, response: Response) -> bytes:
    body, status = response.body, response.status
    if isinstance(body, bytes | FileRange):
        if status in _BODILESS:
            raise ValueError(f"a response with status {status} has no body")
        length = len(body) if isinstance(body, bytes) else body.length
    elif body is not None:
        return b"" if head is None or head.http_1_0 else b"Transfer-Encoding: chunked\r\n"
    elif response.length is not None:
        if status != 304 and (head is None or head.method != "HEAD"):
            raise ValueError("a length without a body is for HEAD and for status 304")
        length = response.length
    elif status in _BODILESS:
        return b""
    else:
        length = 0
    return b"Content-Length: %d\r\n" % length


def _connection_field(goes_on: bool) -> bytes:
    """Returns the field for a client of HTTP/1.0, which does not assume that a connection is
    kept."""
    if not goes_on:
        return b"Connection: close\r\n\r\n"
    return b"Connection: keep-alive\r\n\r\n"
