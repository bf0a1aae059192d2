"""Metadata and its extended attributes; storage classes; encryption."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules import encryption
from s3api.rules.metadata import (
    attributes,
    decode,
    encode,
    guess_type,
    headers,
    is_metadata,
    overrides,
)


def code_of(sent: dict[str, str]) -> str:
    with pytest.raises(S3Error) as caught:
        attributes(sent)
    return caught.value.code


def test_what_is_stored_and_given() -> None:
    sent = {
        "content-type": "text/plain",
        "cache-control": "no-cache",
        "content-encoding": "aws-chunked, gzip",
        "expires": "whenever",
        "x-amz-website-redirect-location": "/other",
        "x-amz-meta-color": "blue",
        "x-amz-storage-class": "STANDARD",
        "x-amz-date": "20240101T000000Z",
        "host": "localhost",
    }
    stored = attributes(sent)
    assert stored == {
        b"user.s3.content-type": b"text/plain",
        b"user.s3.cache-control": b"no-cache",
        b"user.s3.content-encoding": b"gzip",
        b"user.s3.expires": b"whenever",
        b"user.s3.website-redirect-location": b"/other",
        b"user.s3.meta.color": b"blue",
    }
    assert all(is_metadata(attribute) for attribute in stored)
    assert not is_metadata(b"user.s3.etag")
    assert not is_metadata(b"user.other")
    given = headers({**stored, b"user.s3.etag": b"x", b"user.other": b"y"}, "key.json")
    assert given == {
        name: sent[name]
        for name in (
            "content-type",
            "cache-control",
            "expires",
            "x-amz-website-redirect-location",
            "x-amz-meta-color",
        )
    } | {"content-encoding": "gzip"}


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("deflate, gzip", b"deflate, gzip"),
        ("deflate,gzip", b"deflate,gzip"),
        ("deflate, AWS-Chunked, gzip", b"deflate, gzip"),
        ("gzip,aws-chunked", b"gzip"),
        ("aws-chunked, aws-chunked", None),
    ],
)
def test_a_coding_is_kept_as_it_was_written(sent: str, kept: bytes | None) -> None:
    assert attributes({"content-encoding": sent}).get(b"user.s3.content-encoding") == kept


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_value_comes_back(value: str) -> None:
    in_header = encode(value)
    assert in_header.isascii()
    assert in_header.isprintable()
    if "=?" not in value:
        assert decode(in_header) == value


@given(st.text(max_size=10), st.sampled_from(["utf-8", "x", "", "ascii"]), st.text(max_size=10))
def test_any_header_is_read(before: str, charset: str, inside: str) -> None:
    for coding in "BQX":
        value = f"{before}=?{charset}?{coding}?{inside}?="
        stored = attributes({"x-amz-meta-k": value})
        assert headers(stored, "k")["x-amz-meta-k"].isascii()


def test_encoded_words() -> None:
    assert decode("=?UTF-8?Q?caf=C3=A9?=") == "café"
    assert decode("a =?utf-8?b?w6k=?= =?UTF-8?Q?_=C3=A9?= b") == "a é é b"
    assert decode("=?unicode-escape?Q?=5Cud800?=") == "=?unicode-escape?Q?=5Cud800?="
    assert encode("café") == "=?UTF-8?B?Y2Fmw6k=?="
    for odd in ("=?x?B?zz?=", "=?UTF-8?B?!?=", "a =? b", "=?UTF-8?Q?"):
        assert isinstance(decode(odd), str)
    stored = attributes({"x-amz-meta-k": "=?UTF-8?B?Y2Fmw6k=?="})
    assert stored == {b"user.s3.meta.k": "café".encode()}
    assert headers(stored, "k")["x-amz-meta-k"] == "=?UTF-8?B?Y2Fmw6k=?="


def test_limits() -> None:
    assert attributes({"x-amz-meta-k": "v" * 2047})
    assert code_of({"x-amz-meta-k": "v" * 2048}) == "MetadataTooLarge"
    assert code_of({"x-amz-meta-a": "v" * 1024, "x-amz-meta-b": "v" * 1024}) == "MetadataTooLarge"
    assert code_of({"x-amz-meta-": "v"}) == "InvalidArgument"
    assert code_of({"x-amz-meta-" + "k" * 243: "v"}) == "InvalidArgument"
    assert attributes({"x-amz-meta-" + "k" * 242: "v"})
    assert code_of({"x-amz-storage-class": "GLACIER"}) == "InvalidStorageClass"
    assert code_of({"x-amz-website-redirect-location": "elsewhere"}) == "InvalidArgument"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a/b.json", "application/json"),
        ("a/b.TXT", "text/plain"),
        ("model.tar.gz", "application/gzip"),
        ("model.safetensors", "binary/octet-stream"),
        ("a.json/b", "binary/octet-stream"),
        ("data:text/html,x", "binary/octet-stream"),
        ("noext", "binary/octet-stream"),
        ("dir/", "binary/octet-stream"),
        ("", "binary/octet-stream"),
    ],
)
def test_content_types(key: str, expected: str) -> None:
    assert guess_type(key) == expected
    assert headers({}, key) == {"content-type": expected}


def test_response_overrides() -> None:
    query = {"response-content-type": "foo/bar", "response-expires": "123", "versionId": "x"}
    assert overrides(query, anonymous=False) == {"content-type": "foo/bar", "expires": "123"}
    assert overrides({"versionId": "x"}, anonymous=True) == {}
    with pytest.raises(S3Error) as caught:
        overrides(query, anonymous=True)
    assert caught.value.code == "InvalidRequest"
    with pytest.raises(S3Error) as caught:
        overrides({"response-content-type": "a\r\nset-cookie: b"}, anonymous=False)
    assert caught.value.code == "InvalidArgument"


def test_encryption_is_refused() -> None:
    encryption.check_headers({"host": "a", "x-amz-meta-server-side-encryption": "b"})
    method = "x-amz-server-side-encryption"
    customer = f"{method}-customer-"
    key, md5 = "a2V5", "PG4LipwVIkqCKLmpjKFTHQ=="
    whole = {f"{customer}algorithm": "AES256", f"{customer}key": key, f"{customer}key-md5": md5}
    for asked in (
        {method: "AES256"},
        {method: "aws:kms", f"{method}-aws-kms-key-id": "id"},
        whole,
        {"x-amz-copy-source-server-side-encryption-customer-key": "k"},
    ):
        with pytest.raises(S3Error) as told:
            encryption.check_headers(asked)
        assert (told.value.code, told.value.status) == ("NotImplemented", 501)
    for asked in (
        {method: "aes:kms"},
        {method: "AES256", f"{method}-aws-kms-key-id": "id"},
        {f"{method}-aws-kms-key-id": "id"},
        {method: "AES256", **whole},
        {f"{customer}algorithm": "AES256"},
        {f"{customer}key": "k"},
        {**whole, f"{customer}key": "a2V6"},
        {**whole, f"{customer}key": "no base64"},
    ):
        with pytest.raises(S3Error) as told:
            encryption.check_headers(asked)
        assert told.value.code == "InvalidArgument"
    with pytest.raises(S3Error) as told:
        encryption.check_headers({**whole, f"{customer}algorithm": "AES128"})
    assert told.value.code == "InvalidEncryptionAlgorithmError"
    with pytest.raises(S3Error) as told:
        encryption.check_headers({method: "AES256"}, reads=True)
    assert (told.value.code, told.value.status) == ("InvalidRequest", 400)
    default = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    with pytest.raises(S3Error, match="NotImplemented"):
        encryption.check_configuration({"Rules": [default]}, encrypted=False)
    with pytest.raises(S3Error, match="MalformedXML"):
        encryption.check_configuration({"Rules": [default, default]}, encrypted=True)
    assert encryption.no_configuration().status == 404
