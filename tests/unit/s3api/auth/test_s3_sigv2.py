"""Signature version 2: what botocore signs, what changes nothing, and what must be refused."""

import time
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.auth.authenticate import authenticate, hoisted
from s3api.auth.verified import AuthType
from s3api.http.s3_errors import S3Error
from tests.unit.s3api.auth.s3_signed import ACCESS_KEY, SECRET, Sent, check, secret_of, signed

EXAMPLE_KEY = b"AKIAIOSFODNN7EXAMPLE"
DATE_2007 = b"Thu, 29 Mar 2007 03:40:20 GMT"
THEN = 1175139620


def code(request: Sent, **options: object) -> str:
    with pytest.raises(S3Error) as caught:
        check(request, **options)  # type: ignore[arg-type]
    assert SECRET not in repr(caught.value) + str(caught.value.extra)
    return caught.value.code


def test_the_published_example_of_a_query() -> None:
    """ "Query string request authentication alternative" of the S3 user guide."""
    target = (
        b"/photos/puppy.jpg?AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE"
        b"&Signature=NpgCjnDzrM%2BWFzoENXmpNDUsSn8%3D&Expires=1175139620"
    )
    headers = [(b"host", b"johnsmith.s3.amazonaws.com")]
    verified = authenticate(
        "GET",
        target,
        headers,
        secret_of,
        THEN - 1,
        version_2=True,
        host_bucket=b"johnsmith",
    )
    assert verified is not None
    assert (verified.version, verified.auth_type) == (2, AuthType.QUERY)


def test_the_published_example_of_a_header() -> None:
    headers = [
        (b"host", b"johnsmith.s3.amazonaws.com"),
        (b"date", b"Tue, 27 Mar 2007 19:36:42 +0000"),
        (b"authorization", b"AWS AKIAIOSFODNN7EXAMPLE:bWq2s1WEIj+Ydj0vQ697zp+IXMU="),
    ]
    verified = authenticate(
        "GET",
        b"/photos/puppy.jpg",
        headers,
        secret_of,
        1175024202,
        version_2=True,
        host_bucket=b"johnsmith",
    )
    assert verified is not None
    assert verified.signed_at == 1175024202


@pytest.mark.parametrize("signer", ["v2", "v2-query"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/bucket/a%20b//%C3%A9",
        "/bucket/key?uploads",
        "/bucket/key?uploadId=a%2Bb&partNumber=2",
        "/bucket/key?response-content-type=text%2Fplain&x-id=GetObject",
    ],
)
def test_what_botocore_signs(signer: str, path: str) -> None:
    headers = {"x-amz-meta-b": "2", "x-amz-acl": "private", "content-type": "text/plain"}
    request = signed(signer, "PUT", path, headers, token="token")
    verified = check(request)
    assert verified is not None
    assert (verified.access_key, verified.session_token) == (ACCESS_KEY, "token")


@settings(max_examples=40, deadline=None)
@given(
    signer=st.sampled_from(["v2", "v2-query"]),
    key=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    version=st.text("ab+/ =&", max_size=6),
)
def test_whatever_botocore_signs(signer: str, key: str, version: str) -> None:
    path = f"/bucket/{quote(key, safe='/~')}?versionId={quote(version, safe='')}"
    assert check(signed(signer, path=path)) is not None


@pytest.mark.parametrize("signer", ["v2", "v2-query"])
def test_a_change_is_refused(signer: str) -> None:
    method, target, headers = signed(signer, path="/bucket/key?versionId=1")
    for request in (
        ("PUT", target, headers),
        (method, target.replace(b"key", b"kez"), headers),
        (method, target.replace(b"versionId=1", b"versionId=2"), headers),
        (method, target + b"&acl", headers),
        (method, target, [*headers, (b"x-amz-acl", b"public-read")]),
        (method, target, [*headers, (b"content-type", b"text/html")]),
    ):
        assert code(request) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("signer", ["v2", "v2-query"])
@pytest.mark.parametrize("name", ["retention", "legal-hold", "a%63l", "encryption", "%61cl"])
def test_no_other_operation_can_be_made_of_it(signer: str, name: str) -> None:
    method, target, headers = signed(signer, "PUT", "/bucket/key?x-id=PutObject")
    assert check((method, target + b"&max-keys=1&x-custom=1", headers)) is not None
    assert code((method, target + b"&" + name.encode(), headers)) == "InvalidRequest"


def test_the_time_is_over() -> None:
    request = signed("v2-query")
    assert check(request, time.time() + 590) is not None
    with pytest.raises(S3Error, match="Request has expired"):
        check(request, time.time() + 610)
    assert code(signed("v2"), now=time.time() + 1000) == "RequestTimeTooSkewed"


@pytest.mark.parametrize("signer", ["v2", "v2-query"])
def test_a_setting_turns_it_off(signer: str) -> None:
    assert code(signed(signer), version_2=False) == "InvalidRequest"


@pytest.mark.parametrize(
    ("authorization", "date", "expected"),
    [
        (b"AWS HAHAHA", b"Tue, 07 Jul 2037 21:53:04 GMT", "InvalidArgument"),
        (b"AWS KEY:sig", b"Bad Date", "AccessDenied"),
        (b"AWS KEY:sig", b"Tue, 07 Jul 1950 21:53:04 GMT", "AccessDenied"),
        (b"AWS KEY:sig", b"Tue, 07 Jul 2015 21:53:04 GMT", "RequestTimeTooSkewed"),
        (b"AWS KEY:sig", DATE_2007, "InvalidAccessKeyId"),
        (
            b"AWS " + EXAMPLE_KEY + b":sig",
            b"Thu, 29 Mar 2007 03:40:20 GMT",
            "SignatureDoesNotMatch",
        ),
    ],
)
def test_the_header_must_make_sense(authorization: bytes, date: bytes, expected: str) -> None:
    headers = [(b"host", b"h"), (b"authorization", authorization), (b"date", date)]
    assert code(("GET", b"/b/k", headers), now=THEN) == expected


@pytest.mark.parametrize("expires", [b"", b"x", b"-1", b"9" * 5000])
def test_expires_must_be_a_number(expires: bytes) -> None:
    target = b"/b/k?AWSAccessKeyId=" + EXAMPLE_KEY + b"&Signature=s&Expires=" + expires
    assert code(("GET", target, [(b"host", b"h")]), now=THEN) == "AccessDenied"


def test_headers_in_the_query_are_those_that_are_signed() -> None:
    headers = {"x-amz-meta-b": "a b+c", "Content-Type": "text/plain", "Content-MD5": "m=="}
    method, target, sent = signed("v2-query", "PUT", headers=headers)
    query = target.partition(b"?")[2]
    expected = {b"x-amz-meta-b": b"a b+c", b"content-type": b"text/plain", b"content-md5": b"m=="}
    assert hoisted(query) == expected
    bare = [each for each in sent if each[0] == b"host"]
    assert check((method, target, bare)) is not None
    equal = [*bare, (b"content-type", b"text/plain")]
    assert check((method, target, equal)) is not None
    for request in (
        (method, target, [*bare, (b"content-type", b"text/html")]),
        (method, target, [*bare, (b"x-amz-meta-b", b"")]),
        (method, target + b"&x-amz-acl=private", bare),
        (method, target + b"&x-%61mz-acl=private", bare),
        (method, target + b"&x-amz-Acl=private", bare),
        (method, target + b"&x-amz-meta-b=other", bare),
        (method, b"/bucket/key?x-amz-copy-source=b/k&" + query, bare),
    ):
        assert code(request) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "query",
    [
        b"x-amz-acl=private",
        b"AWSAccessKeyId&Signature&x-amz-acl=private",
        b"%41WSAccessKeyId=a&%53ignature=s&x-amz-acl=private",
        b"AWSAccessKeyId=a&X-Amz-Signature=s&x-amz-acl=private",
    ],
)
def test_nothing_is_a_header_that_no_signature_of_this_version_covers(query: bytes) -> None:
    assert hoisted(query) == {}


def test_what_was_signed_as_a_value_is_not_taken_for_another_header() -> None:
    """Of `x-amz-meta-a:` `b:c` a part could be shown again as the name of a header."""
    headers = {"x-amz-meta-a": "b:c", "x-amz-acl": "private"}
    method, target, sent = signed("v2-query", "PUT", headers=headers)
    bare = [each for each in sent if each[0] == b"host"]
    assert check((method, target, bare)) is not None
    other = target.replace(b"x-amz-meta-a=b%3Ac", b"x-amz-meta-a%3Ab=c")
    assert other != target
    assert code((method, other, bare)) == "InvalidArgument"


def test_what_was_signed_as_a_value_is_not_taken_for_a_parameter() -> None:
    path = "/bucket/key?response-content-type=text%2Fplain%26versionId%3Dold"
    method, target, sent = signed("v2-query", "GET", path)
    assert code((method, target, sent)) == "InvalidRequest"


@pytest.mark.parametrize("value", [b"1%0Ax-amz-acl:private", b"1%0d%0ax: y", b"1%00"])
def test_a_value_is_one_line(value: bytes) -> None:
    query = b"AWSAccessKeyId=a&Expires=99999999999&Signature=s&x-amz-meta-a=" + value
    with pytest.raises(S3Error, match="InvalidArgument"):
        hoisted(query)
    assert code(("PUT", b"/b/k?" + query, [(b"host", b"h")])) == "InvalidArgument"


def test_a_subresource_with_a_value_and_without_is_one_that_was_not_signed() -> None:
    method, _, headers = signed("v2", path="/bucket/key?acl")
    assert code((method, b"/bucket/key?acl&acl=x", headers)) == "SignatureDoesNotMatch"
