"""Bodies in aws-chunked: the published examples, any split into buffers, and what is malformed."""

import base64
import calendar
import hashlib
import io

import pytest
from botocore.httpchecksum import AwsChunkedWrapper, Sha1Checksum
from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.auth.chunked import LINE_LIMIT, Decoder, decoder
from s3api.auth.signing import EMPTY_SHA256, SigningKey
from s3api.auth.verified import AuthType, Payload, Verified
from s3api.http.s3_errors import S3Error
from tests.unit.s3api.auth.s3_signed import Sent, check

THEN = calendar.timegm((2013, 5, 24, 0, 0, 0))
KEY = SigningKey(b"key")
CHUNKS = [b"a" * 65536, b"a" * 1024]
SIGNATURES = [
    b"ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
    b"0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
    b"b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
]
TRAILER_SIGNATURES = [
    b"b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
    b"1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
    b"2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
]
TRAILER = (
    b"x-amz-checksum-crc32c:sOO8/Q==\r\nx-amz-trailer-signature:"
    b"d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
)


def request(mode: bytes, signature: bytes, *more: tuple[bytes, bytes]) -> Sent:
    headers = [
        (b"host", b"s3.amazonaws.com"),
        (b"x-amz-date", b"20130524T000000Z"),
        (b"x-amz-storage-class", b"REDUCED_REDUNDANCY"),
        (b"x-amz-content-sha256", mode),
        (b"content-encoding", b"aws-chunked"),
        (b"x-amz-decoded-content-length", b"66560"),
        *more,
    ]
    names = b";".join(sorted(name for name, _ in headers))
    value = (
        b"AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        b"SignedHeaders=%b,Signature=%b" % (names, signature)
    )
    return "PUT", b"/examplebucket/chunkObject.txt", [*headers, (b"authorization", value)]


SIGNED = request(
    b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    b"4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9",
    (b"content-length", b"66824"),
)
SIGNED_TRAILER = request(
    b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    b"106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e",
    (b"x-amz-trailer", b"x-amz-checksum-crc32c"),
)


def framed(chunks: list[bytes], signatures: list[bytes], end: bytes) -> bytes:
    parts = [
        b"%x;chunk-signature=%b\r\n%b\r\n" % (len(chunk), signature, chunk)
        for chunk, signature in zip(chunks, signatures, strict=False)
    ]
    return b"".join(parts) + b"0;chunk-signature=%b\r\n%b" % (signatures[-1], end)


SIGNED_BODY = framed(CHUNKS, SIGNATURES, b"\r\n")
SIGNED_TRAILER_BODY = framed(CHUNKS, TRAILER_SIGNATURES, TRAILER)


def opened(sent: Sent) -> Decoder:
    found = decoder(dict(sent[2]), check(sent, THEN))
    assert found is not None
    return found


def decode(found: Decoder, body: bytes, size: int = 4096) -> tuple[bytes, dict[str, str]]:
    """Payload and trailers of a body that comes through one reused buffer of `size` bytes."""
    buffer, payload = bytearray(size), []
    for start in range(0, len(body), size):
        part = body[start : start + size]
        buffer[: len(part)] = part
        payload += [bytes(view) for view in found.feed(memoryview(buffer)[: len(part)])]
    return b"".join(payload), found.finish()


def code(found: Decoder, body: bytes, size: int = 4096) -> str:
    with pytest.raises(S3Error) as caught:
        decode(found, body, size)
    return caught.value.code


@pytest.mark.parametrize("size", [61, 4096, 65536, 1 << 20])
def test_the_published_examples(size: int) -> None:
    payload = b"".join(CHUNKS)
    assert decode(opened(SIGNED), SIGNED_BODY, size) == (payload, {})
    trailers = {"x-amz-checksum-crc32c": "sOO8/Q=="}
    assert decode(opened(SIGNED_TRAILER), SIGNED_TRAILER_BODY, size) == (payload, trailers)


def test_views_are_of_what_was_fed() -> None:
    buffer = memoryview(bytearray(SIGNED_BODY))
    for view in opened(SIGNED).feed(buffer):
        assert view.obj is buffer.obj


@pytest.mark.parametrize("position", [10, 40, 200, 65000, 65700, 66700, -80, -70, -3])
def test_a_changed_byte_of_a_signed_body_is_refused(position: int) -> None:
    body = bytearray(SIGNED_TRAILER_BODY)
    body[position] ^= 1
    with pytest.raises(S3Error):
        decode(opened(SIGNED_TRAILER), bytes(body))


def test_chunks_cannot_be_moved_or_left_out() -> None:
    chunks = [b"a" * 1024, b"a" * 65536]
    signatures = [SIGNATURES[1], SIGNATURES[0], SIGNATURES[2]]
    assert code(opened(SIGNED), framed(chunks, signatures, b"\r\n")) == "SignatureDoesNotMatch"
    left_out = framed(CHUNKS[:1], [SIGNATURES[0], SIGNATURES[2]], b"\r\n")
    assert code(opened(SIGNED), left_out) == "SignatureDoesNotMatch"


def unsigned(length: int, *names: bytes) -> Decoder:
    return Decoder(length, frozenset(names))


def wire(payload: bytes, size: int, trailers: bytes = b"") -> bytes:
    chunks = [payload[start : start + size] for start in range(0, len(payload), size)]
    framed = b"".join(b"%X\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return framed + b"0\r\n" + trailers + b"\r\n"


def test_what_botocore_frames() -> None:
    payload = bytes(range(256)) * 20
    wrapper = AwsChunkedWrapper(io.BytesIO(payload), Sha1Checksum, "x-amz-checksum-sha1", 1000)
    trailer = base64.b64encode(hashlib.sha1(payload).digest()).decode()
    found = unsigned(len(payload), b"x-amz-checksum-sha1")
    assert decode(found, wrapper.read(), 333) == (payload, {"x-amz-checksum-sha1": trailer})


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 100), st.integers(1, 120))
def test_any_split_gives_the_same(payload: bytes, chunk: int, size: int) -> None:
    value = base64.b64encode(hashlib.sha256(payload).digest())
    body = wire(payload, chunk, b"X-Amz-Checksum-Sha256: %b\r\n" % value)
    found = unsigned(len(payload), b"x-amz-checksum-sha256")
    assert decode(found, body, size) == (payload, {"x-amz-checksum-sha256": value.decode()})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=4), st.integers(1, 150))
def test_any_split_of_signed_chunks(chunks: list[bytes], size: int) -> None:
    verified = Verified(
        access_key="k",
        auth_type=AuthType.HEADER,
        version=4,
        signed_at=0,
        payload=Payload.SIGNED_CHUNKS,
        timestamp=b"20130524T000000Z",
        scope=b"20130524/r/s3/aws4_request",
        signing_key=KEY,
        signature=b"5" * 64,
    )
    previous, signatures = verified.signature, []
    for chunk in [*chunks, b""]:
        lines = [
            b"AWS4-HMAC-SHA256-PAYLOAD",
            verified.timestamp,
            verified.scope,
            previous,
            EMPTY_SHA256,
            hashlib.sha256(chunk).hexdigest().encode(),
        ]
        previous = KEY.sign(b"\n".join(lines))
        signatures.append(previous)
    payload = b"".join(chunks)
    headers = {b"x-amz-decoded-content-length": b"%d" % len(payload)}
    found = decoder(headers, verified)
    assert found is not None
    assert decode(found, framed(chunks, signatures, b"\r\n"), size) == (payload, {})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "IncompleteBody"),
        (b"4\r\nabcd\r\n", "IncompleteBody"),
        (b"4\r\nabc", "IncompleteBody"),
        (b"4\r\nabcd\r\n0\r\n", "IncompleteBody"),
        (b"3\r\nabc\r\n0\r\n\r\n", "IncompleteBody"),
        (b"5\r\nabcde\r\n0\r\n\r\n", "InvalidRequest"),
        (b"4\r\nabcd\r\n0\r\n\r\nx", "InvalidRequest"),
        (b"4\r\nabcdX\r\n0\r\n\r\n", "InvalidRequest"),
        (b"4\nabcd\n0\n\n", "InvalidRequest"),
        (b"-4\r\nabcd\r\n0\r\n\r\n", "InvalidRequest"),
        (b"0x4\r\nabcd\r\n0\r\n\r\n", "InvalidRequest"),
        (b"f" * 17 + b"\r\n", "InvalidRequest"),
        (b"4;chunk-signature=" + b"a" * 64 + b"\r\nabcd\r\n0\r\n\r\n", "InvalidRequest"),
        (b"4;" + b"x" * LINE_LIMIT, "InvalidRequest"),
        (b"4\r\nabcd\r\n0\r\nx-amz-checksum-crc32:AA==\r\n\r\n", "MalformedTrailerError"),
        (b"4\r\nabcd\r\n0\r\njunk\r\n\r\n", "MalformedTrailerError"),
    ],
)
def test_malformed_bodies(body: bytes, expected: str) -> None:
    for size in (1, 7, 4096):
        assert code(unsigned(4), body, size) == expected


def test_trailers_must_be_those_announced() -> None:
    name, trailer = b"x-amz-checksum-crc32", b"x-amz-checksum-crc32:AA==\r\n"
    for trailers in (b"", trailer * 2, trailer.replace(b"32", b"64")):
        assert code(unsigned(4, name), wire(b"abcd", 4, trailers)) == "MalformedTrailerError"


def test_signed_trailers_need_their_signature() -> None:
    for end in (TRAILER.split(b"x-amz-trailer")[0] + b"\r\n", TRAILER[:-2] + b"x:y\r\n\r\n"):
        body = framed(CHUNKS, TRAILER_SIGNATURES, end)
        assert code(opened(SIGNED_TRAILER), body) == "MalformedTrailerError"
    changed = TRAILER.replace(b"sOO8", b"sOO9")
    body = framed(CHUNKS, TRAILER_SIGNATURES, changed)
    assert code(opened(SIGNED_TRAILER), body) == "SignatureDoesNotMatch"


UNSIGNED = b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, "MissingContentLength"),
        ({b"x-amz-decoded-content-length": b"x"}, "InvalidArgument"),
        ({b"x-amz-decoded-content-length": b"9" * 5000}, "InvalidArgument"),
        (
            {b"x-amz-decoded-content-length": b"1", b"x-amz-trailer": b"x-amz-meta-a"},
            "InvalidRequest",
        ),
    ],
)
def test_headers_must_make_sense(headers: dict[bytes, bytes], expected: str) -> None:
    with pytest.raises(S3Error) as caught:
        decoder({b"x-amz-content-sha256": UNSIGNED, **headers}, None)
    assert caught.value.code == expected


def test_signed_chunks_need_a_signed_request() -> None:
    headers = dict(SIGNED[2])
    with pytest.raises(S3Error, match="AccessDenied"):
        decoder(headers, None)


def test_other_bodies_need_no_decoder() -> None:
    assert decoder({}, None) is None
    assert decoder({b"content-encoding": b"aws-chunked"}, None) is None
    presigned = {b"content-encoding": b"gzip, aws-chunked", b"x-amz-decoded-content-length": b"1"}
    assert decoder(presigned, None) is not None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"\r\n", b"4\r\n", b"0\r\n", b"abcd", b":", b";chunk-signature="]),
        ),
        max_size=8,
    ),
    st.booleans(),
    st.integers(1, 40),
)
def test_junk_is_refused_in_order(parts: list[bytes], is_signed: bool, size: int) -> None:
    found = opened(SIGNED_TRAILER) if is_signed else unsigned(4, b"x-amz-checksum-crc32")
    try:
        decode(found, b"".join(parts), size)
    except S3Error as error:
        assert error.status == 400 or error.status == 403


SPOILT = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 3),
        st.binary(max_size=3)
        | st.sampled_from([b"\r\n", b"0\r\n", b";", b"\r\n\r\n", b"-1", b":"]),
    ),
    min_size=1,
    max_size=4,
)


def spoil(body: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    """Put each piece at a place (a part of the length) instead of so many bytes."""
    spoilt = bytearray(body)
    for part, length, piece in changes:
        place = int(part * len(spoilt))
        spoilt[place : place + length] = piece
    return bytes(spoilt)


@given(SPOILT, st.integers(1, 200))
def test_a_spoilt_body_is_refused_or_says_what_it_says(
    changes: list[tuple[float, int, bytes]], size: int
) -> None:
    payload = bytes(range(256))
    body = spoil(wire(payload, 100, b"x-amz-checksum-crc32: AAAAAA==\r\n"), changes)
    try:
        found, trailers = decode(unsigned(len(payload), b"x-amz-checksum-crc32"), body, size)
    except S3Error as error:
        assert 400 <= error.status < 500
    else:
        assert len(found) == len(payload)
        assert set(trailers) <= {"x-amz-checksum-crc32"}


@given(SPOILT, st.integers(1000, 70_000), st.booleans())
def test_a_spoilt_signed_body_is_refused_or_the_same(
    changes: list[tuple[float, int, bytes]], size: int, has_trailer: bool
) -> None:
    of, whole = (SIGNED_TRAILER, SIGNED_TRAILER_BODY) if has_trailer else (SIGNED, SIGNED_BODY)
    try:
        found, trailers = decode(opened(of), spoil(whole, changes), size)
    except S3Error as error:
        assert 400 <= error.status < 500
    else:
        assert found == b"".join(CHUNKS)
        assert trailers == ({"x-amz-checksum-crc32c": "sOO8/Q=="} if has_trailer else {})
