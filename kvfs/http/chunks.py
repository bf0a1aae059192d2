"""The framing of chunked bodies (RFC 9112, section 7.1): strict, no I/O.

    size line, data, CRLF; ...; a size line of 0, trailer fields, CRLF

llhttp's own framing is not used: it cannot tell where in its input a message ended, and it makes a
Python object of each piece of the payload. Here the payload is only counted: the caller moves
it.
"""

import re
from typing import Final

from kvfs.http.connection_errors import BadChunk, BodyTooLarge, RequestRefused
from kvfs.http.head import Field
from kvfs.http.limits import Limits
from kvfs.http.parser import parse_trailers

# A size, and extensions of visible characters, which are not looked at (7.1.1).
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")


class ChunkFraming:
    """The position of a reader in a chunked body.

    `left` payload bytes come next; when it is 0 and not `ended`, `advance` takes the framing."""

    __slots__ = ("_limits", "_started", "_total", "ended", "left", "trailers")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._started = False
        self._total = 0
        self.left = 0
        self.ended = False
        self.trailers: list[Field] = []

    def advance(self, data: bytes, start: int) -> int:
        """Takes one line end, size line and, at the end, trailer out of `data` at `start`.

        Returns where it ends, or -1 if more must come first. Raises BadChunk, BodyTooLarge, and
        RequestRefused for a bad trailer."""
        assert self.left == 0
        assert not self.ended
        position = self._after_chunk(data, start)
        line_end = -1 if position < 0 else self._line_end(data, position)
        if line_end < 0:
            return -1
        size = self._size(data[position:line_end])
        end = line_end + 2 if size else self._trailer(data, line_end + 2)
        if end < 0:
            return -1
        self._started = True
        self.left = size
        self._total += size
        self.ended = size == 0
        return end

    def _after_chunk(self, data: bytes, start: int) -> int:
        if not self._started:
            return start
        if not b"\r\n".startswith(data[start : start + 2]):
            raise BadChunk("a chunk is longer than its size says")
        return start + 2 if len(data) >= start + 2 else -1

    def _line_end(self, data: bytes, start: int) -> int:
        limit = self._limits.chunk_line_bytes
        end = data.find(b"\r\n", start, start + limit)
        if end < 0 and len(data) - start >= limit:
            raise BadChunk(f"the line before a chunk may hold {limit} bytes")
        if end < 0 and b"\n" in data[start:]:
            raise BadChunk("the line before a chunk ends without a carriage return")
        return end

    def _size(self, line: bytes) -> int:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise BadChunk("this is no chunk size")
        size = int(match[1], 16)
        if self._total + size > self._limits.body_bytes:
            raise BodyTooLarge(self._limits.body_bytes)
        return size

    def _trailer(self, data: bytes, start: int) -> int:
        if data[start : start + 2] == b"\r\n":
            return start + 2
        limit = self._limits.trailer_bytes
        end = data.find(b"\r\n\r\n", start, start + limit)
        if end < 0:
            if len(data) - start >= limit:
                raise RequestRefused(431, f"a trailer may hold {limit} bytes")
            return -1
        self.trailers = parse_trailers(data[start : end + 4], self._limits)
        return end + 4
