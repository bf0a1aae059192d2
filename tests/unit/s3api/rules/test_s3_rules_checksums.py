"""Checksums: published values, combination against direct computation, S3's verdicts."""

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules import checksums
from s3api.rules.checksums import (
    ALGORITHMS,
    COMPOSITE,
    FULL_OBJECT,
    FirstPass,
    StoredChecksum,
    WantedChecksum,
    algorithm,
    check_whole,
    content_md5,
    multipart_type,
    wanted,
    whole,
)
from s3api.rules.etag import MD5_LIMIT_BYTES, multipart_etag

# The check values of the CRC catalogue (https://reveng.sourceforge.io/crc-catalogue) and RFC 3174.
CHECK = {
    "CRC32": "cbf43926",
    "CRC32C": "e3069283",
    "CRC64NVME": "ae8b14860a799888",
    "SHA1": hashlib.sha1(b"123456789").hexdigest(),
    "SHA256": hashlib.sha256(b"123456789").hexdigest(),
}


def compute(name: str, data: bytes) -> bytes:
    hasher = ALGORITHMS[name].new()
    hasher.update(memoryview(data))
    return hasher.digest()


def value(name: str, data: bytes) -> str:
    return base64.b64encode(compute(name, data)).decode()


def code_of(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(S3Error) as caught:
        call(*arguments, **named)
    return caught.value.code


@pytest.mark.parametrize("name", ALGORITHMS)
def test_published_values(name: str) -> None:
    assert compute(name, b"123456789").hex() == CHECK[name]
    assert len(compute(name, b"")) == ALGORITHMS[name].digest_bytes


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_combined_crcs_are_those_of_the_whole(parts: list[bytes]) -> None:
    for name in ("CRC32", "CRC32C", "CRC64NVME"):
        pairs = [(value(name, part), len(part)) for part in parts]
        found = whole(ALGORITHMS[name], FULL_OBJECT, pairs)
        assert found.value == value(name, b"".join(parts))


def test_composite_is_the_hash_of_the_digests() -> None:
    parts = [b"one", b"two"]
    for name in ("CRC32", "CRC32C", "SHA1", "SHA256"):
        found = whole(ALGORITHMS[name], COMPOSITE, [(value(name, p), len(p)) for p in parts])
        digests = b"".join(compute(name, part) for part in parts)
        assert found.value == value(name, digests) + "-2"


def test_types_of_multipart_uploads() -> None:
    assert multipart_type(None, None) == (ALGORITHMS["CRC64NVME"], FULL_OBJECT)
    assert multipart_type("CRC64NVME", None)[1] == FULL_OBJECT
    for name in ("crc32", "CRC32C", "SHA1", "SHA256"):
        assert multipart_type(name, None)[1] == COMPOSITE
    assert multipart_type("CRC32", FULL_OBJECT)[1] == FULL_OBJECT
    for bad in (("SHA1", FULL_OBJECT), ("SHA256", FULL_OBJECT), ("CRC64NVME", COMPOSITE)):
        assert code_of(multipart_type, *bad) == "InvalidRequest"
    for bad_type in ((None, FULL_OBJECT), ("CRC32", "HALF"), ("CRC33", None)):
        assert code_of(multipart_type, *bad_type) == "InvalidRequest"


def test_what_headers_want() -> None:
    crc = value("CRC32", b"x")
    assert wanted({}) == WantedChecksum(algorithm("CRC64NVME"))
    assert wanted({}, "SHA256").algorithm.name == "SHA256"
    assert wanted({"x-amz-checksum-crc32": crc}).expected == compute("CRC32", b"x")
    named = {"x-amz-checksum-crc32": crc, "x-amz-sdk-checksum-algorithm": "CRC32"}
    assert wanted(named).algorithm.name == "CRC32"
    trailer = {"x-amz-trailer": "x-amz-checksum-crc32c", "x-amz-sdk-checksum-algorithm": "CRC32C"}
    assert wanted(trailer) == WantedChecksum(algorithm("CRC32C"), trailer="x-amz-checksum-crc32c")
    assert wanted({"x-amz-checksum-type": "FULL_OBJECT"}).expected is None


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-checksum-sha1024": "AAAAAA=="},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-crc32c": "AAAAAA=="},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-trailer": "x-amz-checksum-crc32"},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-sdk-checksum-algorithm": "SHA1"},
        {"x-amz-sdk-checksum-algorithm": "SHA1"},
        {"x-amz-sdk-checksum-algorithm": "MD6"},
        {"x-amz-trailer": "x-amz-meta-later"},
    ],
)
def test_headers_that_contradict(headers: dict[str, str]) -> None:
    assert code_of(wanted, headers) == "InvalidRequest"


@pytest.mark.parametrize("value", ["!!!", "AAAA", "AAAAAAAA"])
def test_a_value_that_no_body_has(value: str) -> None:
    assert code_of(wanted, {"x-amz-checksum-crc32": value}) == "BadDigest"


def test_content_md5() -> None:
    assert content_md5(None) is None
    digest = hashlib.md5(b"x").digest()
    assert content_md5(base64.b64encode(digest).decode()) == digest
    for bad in ("", "YQ==", "no base64", hashlib.md5(b"x").hexdigest()):
        assert code_of(content_md5, bad) == "InvalidDigest"


@given(st.lists(st.binary(max_size=50), max_size=4), st.sampled_from(sorted(ALGORITHMS)))
def test_one_pass_computes_all(pieces: list[bytes], name: str) -> None:
    body = b"".join(pieces)
    expected = compute(name, body)
    passed = FirstPass(
        WantedChecksum(ALGORITHMS[name], expected=expected),
        size=len(body),
        content_sha256=hashlib.sha256(body).hexdigest(),
        content_md5=hashlib.md5(body).digest(),
    )
    passed.tag(fast=False)
    buffer = bytearray(50)
    for piece in pieces:
        buffer[: len(piece)] = piece
        passed.update(memoryview(buffer)[: len(piece)])
    digests = passed.finish({})
    assert digests.size == len(body)
    assert digests.etag == hashlib.md5(body).hexdigest()
    checksum = StoredChecksum(ALGORITHMS[name], base64.b64encode(expected).decode(), FULL_OBJECT)
    assert digests.checksum == checksum


def passed_over(body: bytes, *, fast: bool = False, **named: Any) -> FirstPass:
    passed = FirstPass(named.pop("wanted", wanted({})), size=len(body), **named)
    passed.tag(fast=fast)
    passed.update(memoryview(body))
    return passed


def test_mismatches() -> None:
    other = hashlib.sha256(b"other").hexdigest()
    sha256 = passed_over(b"body", content_sha256=other)
    assert code_of(sha256.finish, {}) == "XAmzContentSHA256Mismatch"
    md5 = passed_over(b"body", content_md5=hashlib.md5(b"other").digest())
    assert code_of(md5.finish, {}) == "BadDigest"
    header = passed_over(b"body", wanted=WantedChecksum(algorithm("CRC32"), expected=bytes(4)))
    assert code_of(header.finish, {}) == "BadDigest"


def test_trailers() -> None:
    name = "x-amz-checksum-crc32c"

    def end(trailers: dict[str, str]) -> object:
        want = wanted({"x-amz-trailer": name})
        return passed_over(b"body", wanted=want).finish(trailers)

    assert end({name: value("CRC32C", b"body")})
    assert code_of(end, {}) == "MalformedTrailerError"
    assert code_of(end, {name: "AAAA"}) == "BadDigest"
    assert code_of(end, {name: "AAAAAA=="}) == "BadDigest"


def test_fast_tags_are_those_of_large_bodies_that_nobody_hashed() -> None:
    body = bytes(MD5_LIMIT_BYTES + 1)
    md5 = hashlib.md5(body)
    assert passed_over(body).finish({}).etag == md5.hexdigest()
    tag = passed_over(body, fast=True).finish({}).etag
    assert len(tag) == 34
    assert tag.endswith("-1")
    checked = passed_over(body, fast=True, content_md5=md5.digest()).finish({})
    assert checked.etag == md5.hexdigest()
    for name in ("SHA1", "SHA256"):
        hashed = passed_over(body, fast=True, wanted=WantedChecksum(algorithm(name)))
        assert hashed.finish({}).etag == md5.hexdigest()
    small = passed_over(body[:-1], fast=True).finish({})
    assert small.etag == hashlib.md5(body[:-1]).hexdigest()
    unsized = FirstPass(wanted({}), size=None)
    unsized.tag(fast=True)
    assert unsized.finish({}).etag.endswith("-1")


def test_whole_values_of_clients() -> None:
    composite = StoredChecksum(algorithm("CRC32"), "AAAAAA==-2", COMPOSITE)
    for good in (None, "AAAAAA==-2", "AAAAAA=="):
        check_whole(composite, good)
    assert code_of(check_whole, composite, "AAAAAA==-3") == "BadDigest"
    assert code_of(check_whole, composite, "AQAAAA==") == "BadDigest"
    assert code_of(check_whole, composite, "nonsense") == "BadDigest"
    full = StoredChecksum(algorithm("CRC32"), "AAAAAA==", FULL_OBJECT)
    check_whole(full, "AAAAAA==")
    assert code_of(check_whole, full, "AAAAAA==-2") == "BadDigest"


def test_tags_of_uploads() -> None:
    parts = [hashlib.md5(part).hexdigest() for part in (b"a", b"b")]
    digests = hashlib.md5(b"a").digest() + hashlib.md5(b"b").digest()
    assert multipart_etag(parts) == hashlib.md5(digests).hexdigest() + "-2"
    assert multipart_etag([f"{part}-1" for part in parts]) == multipart_etag(parts)


def test_headers_and_members() -> None:
    assert algorithm("crc64nvme").header == "x-amz-checksum-crc64nvme"
    assert algorithm("SHA256").member == "ChecksumSHA256"
    assert code_of(algorithm, "MD5") == "InvalidRequest"
    assert checksums.DEFAULT in ALGORITHMS
