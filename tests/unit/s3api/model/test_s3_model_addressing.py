import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.model.addressing import (
    address,
    bucket_of_host,
    check_bucket_name,
    is_bucket_name,
    split_target,
    with_hoisted,
)

DOMAINS = ("localhost", "s3.example.org", "eu.s3.example.org")


@pytest.mark.parametrize(
    ("path", "bucket", "key"),
    [
        (b"/", None, None),
        (b"/b", "b", None),
        (b"/b/", "b", None),
        (b"/b/k", "b", "k"),
        (b"/b//k", "b", "/k"),
        (b"/b/a//b/", "b", "a//b/"),
        (b"/b/../c/./d", "b", "../c/./d"),
        (b"/b/%2E%2E/c", "b", "../c"),
        (b"/b/a+b%20c%2Bd", "b", "a+b c+d"),
        (b"/b/%252F", "b", "%2F"),
        (b"/b/%2F", "b", "/"),
        ("/b/ключ".encode(), "b", "ключ"),
        (b"/b/%00", "b", "\0"),
        (b"/b/%c3%a9", "b", "é"),
    ],
)
def test_path_style(path: bytes, bucket: str | None, key: str | None) -> None:
    assert address(path, "127.0.0.1:9000", DOMAINS) == (bucket, key)


@pytest.mark.parametrize(
    ("path", "key"), [(b"/", None), (b"/k", "k"), (b"//k", "/k"), (b"/b/k", "b/k"), (b"/..", "..")]
)
def test_virtual_hosted(path: bytes, key: str | None) -> None:
    assert address(path, "Bucket.localhost:9000", DOMAINS) == ("bucket", key)


@pytest.mark.parametrize(
    ("host", "bucket"),
    [
        ("localhost", None),
        ("localhost:9000", None),
        ("b.localhost", "b"),
        ("a.b.localhost:9000", "a.b"),
        ("eu.s3.example.org", None),
        ("b.eu.s3.example.org", "b"),
        ("b.s3.example.org", "b"),
        ("elsewhere.org", None),
        ("notlocalhost", None),
        ("127.0.0.1:9000", None),
        ("[::1]:9000", None),
        ("[::1]", None),
        ("", None),
    ],
)
def test_hosts(host: str, bucket: str | None) -> None:
    assert bucket_of_host(host, DOMAINS) == bucket


@pytest.mark.parametrize(
    "path", [b"", b"b/k", b"/b/%", b"/b/%2", b"/b/%zz", b"/b/%ff", b"/b/\xff", b"/%ff/k", b"*"]
)
def test_what_is_no_path(path: bytes) -> None:
    with pytest.raises(S3Error, match="InvalidURI"):
        address(path, "localhost", DOMAINS)


def test_a_key_has_1024_bytes_at_most() -> None:
    longest = b"/b/" + b"%C3%A9" * 512
    assert address(longest, "localhost", DOMAINS)[1] == "é" * 512
    with pytest.raises(S3Error, match="KeyTooLongError"):
        address(longest + b"x", "localhost", DOMAINS)


def test_queries() -> None:
    path, query = split_target(b"/b?acl&prefix=a+b%2B&prefix=x&=y&&list-type=2&k=a=b")
    assert path == b"/b"
    assert query == {"acl": "", "prefix": "a b+", "": "y", "list-type": "2", "k": "a=b"}
    with pytest.raises(S3Error, match="InvalidURI"):
        split_target(b"/b?prefix=%f")


@given(st.binary(max_size=60))
def test_any_target_is_an_address_or_refused(target: bytes) -> None:
    try:
        path, _ = split_target(b"/" + target)
        bucket, key = address(path, "localhost", DOMAINS)
    except S3Error as error:
        assert error.code == "InvalidURI"
    else:
        assert key is None or bucket is not None


@pytest.mark.parametrize("name", ["abc", "a-b.c-1", "1.2.3", "1234", "a" * 63])
def test_names_of_buckets(name: str) -> None:
    check_bucket_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ab",
        "a" * 64,
        "Abc",
        "a_b",
        "-abc",
        "abc-",
        ".abc",
        "abc.",
        "a..b",
        "a.-b",
        "a-.b",
        "192.168.5.4",
        "xn--abc",
        "sthree-abc",
        "abc-s3alias",
        "abc--ol-s3",
        "abc.mrap",
        "abc\n",
        "äbc",
        "a/b",
    ],
)
def test_names_that_no_bucket_has(name: str) -> None:
    assert not is_bucket_name(name)
    with pytest.raises(S3Error, match="InvalidBucketName"):
        check_bucket_name(name)


def test_headers_that_presigning_moved_into_the_query() -> None:
    sent = {b"host": b"h", b"x-amz-acl": b"private"}
    query = {"X-Amz-Meta-A": "\xe9", "x-amz-acl": "public-read", "x-id": "1", "X-Amz-Date": "d"}
    merged = with_hoisted(sent, query | {"X-Amz-Signature": "s"})
    assert merged == sent | {b"x-amz-meta-a": b"\xc3\xa9"}
    assert with_hoisted(sent, {"X-Amz-Signature": "s"}) is sent


@pytest.mark.parametrize("value", ["/x\r\nset-cookie: a", "a\0b", "a\x7f"])
def test_what_no_header_could_hold_is_not_hoisted(value: str) -> None:
    query = {"X-Amz-Signature": "s", "X-Amz-Website-Redirect-Location": value}
    with pytest.raises(S3Error, match="InvalidArgument"):
        with_hoisted({}, query)
