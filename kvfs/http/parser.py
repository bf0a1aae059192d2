"""Bytes to a head (RFC 9112): strict, no I/O.

llhttp, in C, checks every character of the request line and of the fields, and refuses what request
smuggling relies on: both Content-Length and Transfer-Encoding, either of them twice, a fold, a bare
line feed, a blank before the colon. It is given one whole head and nothing after it, since it
cannot tell where a request ended; bodies are framed elsewhere. This module also refuses what llhttp
accepts: needless blanks in the request line, HTTP other than 1.0 and 1.1, transfer codings besides
chunked.
"""

import functools
import re
from collections.abc import Callable
from typing import Final

import httptools
import msgspec

from kvfs.http.connection_errors import RequestRefused
from kvfs.http.head import Field, Head, Memo
from kvfs.http.limits import Limits

_LINE_EXTRA: Final = 64  # method, blanks and version of a request line
_REMEMBERED: Final = 2048
_REMEMBERED_BYTES: Final = 4096  # a longer head is parsed each time
_TOKEN_START: Final = re.compile(rb"[A-Za-z]")
_UNKNOWN_METHOD: Final = re.compile(rb"[A-Z][A-Z-]{0,31} ")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)(.*)", re.IGNORECASE | re.DOTALL)
# A trailer must not change how its message was framed, routed or authorised (RFC 9110, 6.5.1).
_NOT_IN_TRAILERS: Final = frozenset(
    (
        *(b"authorization", b"connection", b"content-encoding", b"content-length"),
        *(b"content-range", b"content-type", b"expect", b"host", b"te", b"trailer"),
        b"transfer-encoding",
    )
)


class _Callbacks(msgspec.Struct):
    """The callbacks of llhttp. Those of built-in types save a call of Python for each field."""

    on_url: Callable[[bytes], object]
    on_header: Callable[[bytes, bytes], object]


def head_end(data: bytes, start: int, limits: Limits) -> int:
    """Returns the end of the head that begins at `start`; -1 if more is to come.

    Raises RequestRefused if it can become no head within the limits."""
    end = data.find(b"\r\n\r\n", start) + 4
    if end >= 4 and end - start <= limits.head_bytes:
        return end
    _refuse_hopeless(data, start, limits)
    return -1


def _refuse_hopeless(data: bytes, start: int, limits: Limits) -> None:
    line_end = data.find(b"\n", start)
    line_bytes = (line_end if line_end >= 0 else len(data)) - start
    if line_bytes > limits.target_bytes + _LINE_EXTRA:
        raise RequestRefused(414, f"a target may hold {limits.target_bytes} bytes")
    if len(data) - start >= limits.head_bytes:
        raise RequestRefused(431, f"a head may hold {limits.head_bytes} bytes")
    if data[start:] and not _TOKEN_START.match(data, start):
        raise RequestRefused(400, "this is no request line")
    if data.count(b"\n", start) != data.count(b"\r\n", start):
        raise RequestRefused(400, "a line of the head ends without a carriage return")


def parse_head(block: bytes, limits: Limits, peer: tuple[str, int], secure: bool) -> Head:
    """Returns the head that `block` holds, from its method to its empty line.

    Raises RequestRefused: 400, 414, 417, 431, 501 or 505."""
    parts: list[bytes] = []
    sent: dict[bytes, bytes] = {}
    parser = httptools.HttpRequestParser(_Callbacks(parts.append, sent.setdefault))
    try:
        parser.feed_data(block)
    except httptools.HttpParserUpgrade:
        pass  # an offer that nobody has to take (RFC 9110, 7.8)
    except httptools.HttpParserError as error:
        raise _refusal(block, error) from error
    method = str(parser.get_method(), "ascii")
    target = parts[0] if len(parts) == 1 else b"".join(parts)
    http_1_0 = not block.startswith(b"%b %b HTTP/1.1\r\n" % (method.encode("ascii"), target))
    if http_1_0:
        _check_version(block, method, target)
    if len(target) > limits.target_bytes:
        raise RequestRefused(414, f"a target may hold {limits.target_bytes} bytes")
    headers = _headers(block, sent)
    if len(headers) > limits.header_count:
        raise RequestRefused(431, f"a head may hold {limits.header_count} fields")
    fields = dict(headers)
    if len(fields) != len(headers):
        fields = _joined(headers)
    if b"host" not in fields and not http_1_0:
        raise RequestRefused(400, "a request needs a Host")
    if not target.startswith(b"/"):
        authority, target = _other_form(method, target)
        if authority is not None:
            # Who looks at either must see the same host: a signature is held against `headers`.
            headers = [field for field in headers if field[0] != b"host"] + [(b"host", authority)]
            fields[b"host"] = authority
    length = fields.get(b"content-length")
    return Head(
        method=method,
        target=target,
        headers=headers,
        fields=fields,
        content_length=None if length is None else int(length),
        chunked=b"transfer-encoding" in fields and _is_chunked(fields, http_1_0),
        persistent=(_is_persistent(fields, http_1_0) if b"connection" in fields else not http_1_0),
        http_1_0=http_1_0,
        expects_continue=b"expect" in fields and _expects_continue(fields, http_1_0),
        peer=peer,
        secure=secure,
    )


class HeadParser:
    """Parses the heads of one server, and remembers those that are likely to come again, byte for
    byte: requests for a presigned or public object. A signed header has the time in it, so it does
    not come again."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._remembered = functools.lru_cache(_REMEMBERED)(self._parse_shared)

    def parse(self, block: bytes, peer: tuple[str, int], secure: bool) -> Head:
        """Does what `parse_head` does."""
        if (
            len(block) > _REMEMBERED_BYTES
            or not block.startswith((b"GET ", b"HEAD "))
            or b"uthorization:" in block
        ):
            return parse_head(block, self._limits, peer, secure)
        seen = self._remembered(block)
        return Head(
            seen.method,
            seen.target,
            seen.headers,
            seen.fields,
            seen.content_length,
            seen.chunked,
            seen.persistent,
            seen.http_1_0,
            seen.expects_continue,
            peer,
            secure,
            seen.memo,
        )

    def _parse_shared(self, block: bytes) -> Head:
        head = parse_head(block, self._limits, ("", 0), False)
        head.memo = Memo()
        return head


def parse_trailers(block: bytes, limits: Limits) -> list[Field]:
    """Returns the fields after the last chunk; `block` ends with their empty line. Raises
    RequestRefused."""
    trailers = _every_header(b"GET / HTTP/1.1\r\n" + block)
    if len(trailers) > limits.header_count:
        raise RequestRefused(431, f"a trailer may hold {limits.header_count} fields")
    for name, _ in trailers:
        if name in _NOT_IN_TRAILERS:
            raise RequestRefused(400, f"{name.decode()} may not stand in a trailer")
    return trailers


def _headers(block: bytes, sent: dict[bytes, bytes]) -> list[Field]:
    """Returns the fields of a head in the order sent; `sent` has the first of each spelling."""
    if len(sent) != block.count(b"\r\n") - 2:
        return _every_header(block)
    # llhttp lets no line end or form feed into a value: what is stripped are blanks and tabs.
    return list(zip(map(bytes.lower, sent), map(bytes.rstrip, sent.values()), strict=True))


def _every_header(block: bytes) -> list[Field]:
    """Does the same, however often a field was sent. Raises RequestRefused."""
    headers: list[Field] = []

    def on_header(name: bytes, value: bytes) -> None:
        headers.append((name.lower(), value.rstrip(b" \t")))

    try:
        httptools.HttpRequestParser(_Callbacks(bytes, on_header)).feed_data(block)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise _refusal(block, error) from error
    return headers


def _refusal(block: bytes, error: httptools.HttpParserError) -> RequestRefused:
    """Returns the answer to what llhttp refuses."""
    if not isinstance(error, httptools.HttpParserInvalidMethodError):
        return RequestRefused(400, f"malformed request: {error}")
    if _UNKNOWN_METHOD.match(block):
        return RequestRefused(501, "this method is not known")
    return RequestRefused(400, "this is no request line")


def _check_version(block: bytes, method: str, target: bytes) -> None:
    """Raises RequestRefused if the request line is not in its one right form, of HTTP/1.0."""
    line = block[: block.index(b"\r\n")]
    begin = b"%b %b HTTP/" % (method.encode("ascii"), target)
    if not line.startswith(begin):
        raise RequestRefused(400, "this is no request line")
    version = line[len(begin) :]
    if version != b"1.0":
        raise RequestRefused(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")


def _joined(headers: list[Field]) -> dict[bytes, bytes]:
    """Returns the fields by name if one was sent more than once. Raises RequestRefused."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"host" and name in fields:
            raise RequestRefused(400, "more than one Host")
        fields[name] = fields[name] + b", " + value if name in fields else value
    return fields


def _other_form(method: str, target: bytes) -> tuple[bytes | None, bytes]:
    """Returns the authority and the path of an absolute target; the authority replaces any Host
    that was sent (RFC 9112, 3.2.2). None with `*`, which names none."""
    if target == b"*" and method == "OPTIONS":
        return None, target
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise RequestRefused(501 if method == "CONNECT" else 400, "this target is not served")
    return match[1], match[2] if match[2].startswith(b"/") else b"/" + match[2]


def _is_chunked(fields: dict[bytes, bytes], http_1_0: bool) -> bool:
    encoding = fields.get(b"transfer-encoding")
    if encoding is None:
        return False
    if http_1_0:
        raise RequestRefused(400, "HTTP/1.0 has no Transfer-Encoding")
    if encoding.lower() != b"chunked":
        raise RequestRefused(501, "the only transfer coding here is chunked")
    return True


def _is_persistent(fields: dict[bytes, bytes], http_1_0: bool) -> bool:
    connection = fields.get(b"connection")
    if connection is None:
        return not http_1_0
    options = {option.strip() for option in connection.lower().split(b",")}
    return b"close" not in options and (not http_1_0 or b"keep-alive" in options)


def _expects_continue(fields: dict[bytes, bytes], http_1_0: bool) -> bool:
    expectation = fields.get(b"expect")
    if expectation is None or http_1_0:
        return False
    if expectation.lower() == b"100-continue":
        return True
    # A bare number is what broken clients send, and no expectation; S3 passes it over.
    if expectation and not expectation.isdigit():
        raise RequestRefused(417, "the only expectation that is met here is 100-continue")
    return False
