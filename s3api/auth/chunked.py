"""Bodies in the content encoding `aws-chunked`: chunks and trailers, signed or not.

Sources: "Signature calculations: transferring a payload in multiple chunks", with and without
trailing headers, of the S3 API reference. On the wire:

    <size in hexadecimal>[;chunk-signature=<64 digits>] CRLF <payload> CRLF   for each chunk
    0[;chunk-signature=...] CRLF
    <name>:<value> CRLF                                                       for each trailer
    [x-amz-trailer-signature:<64 digits> CRLF]
    CRLF

Invariants
- Each signature is over its chunk and the signature before it: bytes cannot be changed, left out,
  added or moved.
- `feed` returns views of its argument. Payload is hashed in C and never copied, except for some
  bytes behind a chunk's head that are searched for its end.
- Payload is given out before its chunk's signature is seen: nothing of it may be published until
  `finish` has returned.
- Memory is bounded: one line of at most LINE_LIMIT bytes, and the announced trailers.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from s3api.auth.signing import ALGORITHM, EMPTY_SHA256, SigningKey
from s3api.auth.verified import PAYLOADS, Payload, Verified
from s3api.http.s3_errors import S3Error, invalid_argument

LINE_LIMIT: Final = 512
_UNSIGNED: Final = Payload.UNSIGNED
_DIGEST: Final = Payload.DIGEST
MAX_TRAILERS: Final = 8
_LOOK_AHEAD: Final = 128
"""A chunk's head has at most 99 bytes with a signature."""
_MAX_LENGTH_DIGITS: Final = 15
_head_of: Final = re.compile(
    rb"(?P<size>[0-9a-fA-F]{1,13})(?:;chunk-signature=(?P<signature>[0-9a-f]{64}))?"
).fullmatch
_is_trailer_name: Final = re.compile(rb"x-amz-checksum-[a-z0-9]{1,32}").fullmatch
_TRAILER_SIGNATURE: Final = b"x-amz-trailer-signature"


def decoder(headers: Mapping[bytes, bytes], verified: Verified | None) -> "Decoder | None":
    """Returns the decoder for a request's body; None if it is not `aws-chunked`.

    Raises S3Error for the headers x-amz-decoded-content-length and x-amz-trailer:
    MissingContentLength, InvalidArgument or InvalidRequest.
    """
    mode = _UNSIGNED if verified is None else verified.payload
    if mode is _UNSIGNED:
        mode = PAYLOADS.get(headers.get(b"x-amz-content-sha256", b""), _UNSIGNED)
        # A presigned request or one of version 2 need not name its mode.
        if mode is _UNSIGNED and b"content-encoding" in headers and _says_chunked(headers):
            mode = Payload.UNSIGNED_CHUNKS_TRAILER
    if mode is _UNSIGNED or mode is _DIGEST:
        return None
    length = _decoded_length(headers.get(b"x-amz-decoded-content-length"))
    announced = _announced(headers.get(b"x-amz-trailer", b""))
    if mode is Payload.UNSIGNED_CHUNKS_TRAILER:
        return Decoder(length, announced)
    if verified is None or verified.signing_key is None:
        raise S3Error("AccessDenied", "Signed chunks need a request that is signed with version 4")
    chain = Chain(verified.signing_key, verified)
    if mode is Payload.SIGNED_CHUNKS:
        return Decoder(length, frozenset(), chain)
    return Decoder(length, announced, chain, signed_trailers=True)


def _says_chunked(headers: Mapping[bytes, bytes]) -> bool:
    encodings = headers.get(b"content-encoding", b"").lower()
    return b"aws-chunked" in encodings and b"x-amz-decoded-content-length" in headers


def _decoded_length(value: bytes | None) -> int:
    if value is None:
        raise S3Error("MissingContentLength")
    if not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
        raise invalid_argument("x-amz-decoded-content-length", value.decode("ascii", "replace"))
    return int(value)


def _announced(value: bytes) -> frozenset[bytes]:
    names = frozenset(part.strip().lower() for part in value.split(b",") if part.strip())
    if len(names) > MAX_TRAILERS or not all(map(_is_trailer_name, names)):
        raise S3Error(
            "InvalidRequest", "The value specified in the x-amz-trailer header is not supported"
        )
    return names


class Chain:
    """The chain of signatures that begins with the request's."""

    def __init__(self, key: SigningKey, verified: Verified) -> None:
        self._key = key
        self._scope = b"%b\n%b\n" % (verified.timestamp, verified.scope)
        self._previous = verified.signature

    def check_chunk(self, digest: bytes, signature: bytes) -> None:
        """Raises SignatureDoesNotMatch. `digest` is the payload's SHA-256, in hexadecimal."""
        self._check(b"PAYLOAD", b"%b\n%b" % (EMPTY_SHA256, digest), signature)

    def check_trailer(self, digest: bytes, signature: bytes) -> None:
        """Raises SignatureDoesNotMatch. `digest` is that of all trailers, in hexadecimal."""
        self._check(b"TRAILER", digest, signature)

    def _check(self, kind: bytes, hashed: bytes, signature: bytes) -> None:
        text = b"%b-%b\n%b%b\n%b" % (ALGORITHM, kind, self._scope, self._previous, hashed)
        if not compare_digest(self._key.sign(text), signature):
            raise S3Error("SignatureDoesNotMatch")
        self._previous = signature


class Decoder:
    """Decodes one body of `length` payload bytes; `trailers` are the names announced for it.

    With a `chain` each chunk must be signed, with `signed_trailers` the trailers must be too. After
    an error it must not be used further.
    """

    def __init__(
        self,
        length: int,
        trailers: frozenset[bytes],
        chain: Chain | None = None,
        *,
        signed_trailers: bool = False,
    ) -> None:
        self._length = length
        self._announced = trailers
        self._chain = chain
        self._must_sign_trailers = signed_trailers
        self._trailers: dict[bytes, bytes] = {}
        self._line = b""
        self._take = self._take_head
        self._left = 0
        """Payload bytes of the present chunk that are still to come."""
        self._total = 0
        """Payload bytes of all chunks announced."""
        self._hash = sha256()
        self._signature = b""
        self.done = False

    def feed(self, view: memoryview) -> list[memoryview]:
        """Returns the payload in the next bytes of the body, in order.

        Raises S3Error: InvalidRequest (not of that format, or longer than announced),
        IncompleteBody, SignatureDoesNotMatch, MalformedTrailerError.
        """
        payload = []
        position, end = 0, len(view)
        while position < end:
            if self._left:
                part = view[position : position + self._left]
                self._take_payload(part)
                payload.append(part)
                position += len(part)
            else:
                position = self._read_line(view, position)
        return payload

    def finish(self) -> dict[str, str]:
        """Returns the trailers, by lower-case name; to be called when the body has ended. Raises
        IncompleteBody."""
        if not self.done:
            raise S3Error("IncompleteBody")
        return {name.decode(): value.decode("latin-1") for name, value in self._trailers.items()}

    def _take_payload(self, part: memoryview) -> None:
        self._left -= len(part)
        if self._chain is not None:
            self._hash.update(part)
            if not self._left:
                self._chain.check_chunk(self._hash.hexdigest().encode(), self._signature)

    def _read_line(self, view: memoryview, position: int) -> int:
        if self.done:
            raise _malformed("it goes on after its last chunk")
        window = bytes(view[position : position + _LOOK_AHEAD])
        found = window.find(b"\n") + 1
        self._line += window[:found] if found else window
        if len(self._line) > LINE_LIMIT:
            raise _malformed(f"a line has more than {LINE_LIMIT} bytes")
        if not found:
            return position + len(window)
        line, self._line = self._line, b""
        if not line.endswith(b"\r\n"):
            raise _malformed("a line does not end with CR LF")
        self._take(line[:-2])
        return position + found

    def _take_head(self, line: bytes) -> None:
        head = _head_of(line)
        if head is None or (self._chain is not None) != (head["signature"] is not None):
            raise _malformed("a chunk's size or signature is missing or cannot be read")
        size = int(head["size"], 16)
        self._total += size
        if self._total > self._length:
            raise _malformed("it is longer than x-amz-decoded-content-length")
        if size:
            self._left, self._hash, self._signature = size, sha256(), head["signature"]
            self._take = self._take_end
        else:
            self._take_last(head["signature"])

    def _take_end(self, line: bytes) -> None:
        if line:
            raise _malformed("a chunk is longer than its size")
        self._take = self._take_head

    def _take_last(self, signature: bytes) -> None:
        if self._chain is not None:
            self._chain.check_chunk(EMPTY_SHA256, signature)
        if self._total != self._length:
            raise S3Error("IncompleteBody")
        self._take = self._take_trailer

    def _take_trailer(self, line: bytes) -> None:
        if not line:
            self._end_trailers()
            return
        name, colon, value = line.partition(b":")
        name, value = name.strip().lower(), value.strip()
        if name == _TRAILER_SIGNATURE and self._must_sign_trailers and self._chain is not None:
            self._chain.check_trailer(self._trailers_digest(), value)
            self._must_sign_trailers = False
            self._take = self._take_last_line
        elif colon and name in self._announced and name not in self._trailers:
            self._trailers[name] = value
        else:
            raise _malformed_trailer()

    def _take_last_line(self, line: bytes) -> None:
        if line:
            raise _malformed_trailer()
        self._end_trailers()

    def _end_trailers(self) -> None:
        if self._must_sign_trailers or len(self._trailers) != len(self._announced):
            raise _malformed_trailer()
        self.done = True

    def _trailers_digest(self) -> bytes:
        text = b"".join(b"%b:%b\n" % item for item in sorted(self._trailers.items()))
        return sha256(text).hexdigest().encode()


def _malformed(reason: str) -> S3Error:
    return S3Error("InvalidRequest", f"The aws-chunked body is malformed: {reason}")


def _malformed_trailer() -> S3Error:
    return S3Error(
        "MalformedTrailerError",
        "The request contained trailing data that was not well-formed or did not conform to our "
        "published schema.",
        status=400,
    )
