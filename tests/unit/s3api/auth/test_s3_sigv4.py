"""Signature version 4: the published examples, whatever botocore signs, and what is refused."""

import calendar
import hashlib
import time
from urllib.parse import quote, unquote_to_bytes, urlsplit

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from s3api.auth.authenticate import authenticate
from s3api.auth.presign import presign
from s3api.auth.verified import AuthType, Payload
from s3api.http.s3_errors import S3Error
from tests.unit.s3api.auth.s3_signed import ACCESS_KEY, HOST, SECRET, Sent, check, secret_of, signed

THEN = calendar.timegm((2013, 5, 24, 0, 0, 0))
EMPTY = b"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
EXAMPLE = b"examplebucket.s3.amazonaws.com"


def example(
    method: str,
    target: bytes,
    names: bytes,
    signature: bytes,
    *headers: tuple[bytes, bytes],
    payload: bytes = EMPTY,
    host: bytes = EXAMPLE,
) -> Sent:
    authorization = (
        b"AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        b"SignedHeaders=%b,Signature=%b" % (names, signature)
    )
    return (
        method,
        target,
        [
            (b"host", host),
            (b"authorization", authorization),
            (b"x-amz-date", b"20130524T000000Z"),
            (b"x-amz-content-sha256", payload),
            *headers,
        ],
    )


PUT_DIGEST = b"44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
PUBLISHED = {
    "get": example(
        "GET",
        b"/test.txt",
        b"host;range;x-amz-content-sha256;x-amz-date",
        b"f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        (b"range", b"bytes=0-9"),
    ),
    "put": example(
        "PUT",
        b"/test$file.text",
        b"date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
        b"98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        (b"date", b"Fri, 24 May 2013 00:00:00 GMT"),
        (b"x-amz-storage-class", b"REDUCED_REDUNDANCY"),
        payload=PUT_DIGEST,
    ),
    "lifecycle": example(
        "GET",
        b"/?lifecycle",
        b"host;x-amz-content-sha256;x-amz-date",
        b"fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
    ),
    "list": example(
        "GET",
        b"/?max-keys=2&prefix=J",
        b"host;x-amz-content-sha256;x-amz-date",
        b"34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
    ),
    "presigned": (
        "GET",
        b"/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F"
        b"20130524%2Fus-east-1%2Fs3%2Faws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400"
        b"&X-Amz-SignedHeaders=host&X-Amz-Signature="
        b"aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404",
        [(b"host", EXAMPLE)],
    ),
}
"""The worked examples of "Signature Calculations" in the S3 API reference."""


def code(request: Sent, **options: object) -> str:
    with pytest.raises(S3Error) as caught:
        check(request, **options)  # type: ignore[arg-type]
    assert SECRET not in repr(caught.value) + str(caught.value) + str(caught.value.extra)
    return caught.value.code


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_examples(name: str) -> None:
    verified = check(PUBLISHED[name], THEN + 60)
    assert verified is not None
    assert verified.access_key == ACCESS_KEY
    assert verified.signed_at == THEN
    assert verified.scope == b"20130524/us-east-1/s3/aws4_request"


def test_the_digest_of_the_body_is_given() -> None:
    verified = check(PUBLISHED["put"], THEN)
    assert verified is not None
    assert (verified.payload, verified.payload_sha256) == (Payload.DIGEST, PUT_DIGEST)


def test_a_presigned_body_is_unsigned() -> None:
    verified = check(PUBLISHED["presigned"], THEN)
    assert verified is not None
    assert (verified.payload, verified.auth_type) == (Payload.UNSIGNED, AuthType.QUERY)


def test_without_signature_nobody_asks() -> None:
    assert check(("GET", b"/bucket/key?versionId=1", [(b"host", b"h")])) is None
    assert check(("GET", b"/", [(b"host", b"h"), (b"authorization", b"")])) is None


@pytest.mark.parametrize("signer", ["v4", "v4-query"])
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/bucket//a/../b/./c/",
        "/bucket/a%20b%2Bc~d_e-f.g",
        "/bucket/%C3%A9%E2%82%AC",
        "/bucket?prefix=a%2Fb&list-type=2&a-b=1&a=2&a=1",
        "/bucket/key?uploads",
        "/bucket/key?partNumber=1&uploadId=x%2By%3D%3D",
    ],
)
def test_what_botocore_signs(signer: str, path: str) -> None:
    body = b"data" if signer == "v4" else b""
    verified = check(signed(signer, "PUT", path, token="t/o+k=", body=body))
    assert verified is not None
    assert verified.session_token == "t/o+k="


@settings(max_examples=60, deadline=None)
@given(
    signer=st.sampled_from(["v4", "v4-query"]),
    key=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20),
    query=st.lists(
        st.tuples(
            st.text("ab/ +=&%é-~", min_size=1, max_size=4), st.text("ab/ +=&%é~", max_size=5)
        ),
        max_size=4,
    ),
    headers=st.dictionaries(
        st.sampled_from(["x-amz-meta-a", "x-amz-acl", "range", "content-type", "x-amz-tagging"]),
        st.text("ab cd=;,", min_size=1, max_size=12),
    ),
)
def test_whatever_botocore_signs(
    signer: str, key: str, query: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    encoded = "&".join(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in query)
    path = "/bucket/" + quote(key, safe="/~") + ("?" + encoded if encoded else "")
    assert check(signed(signer, path=path, headers=headers)) is not None


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(["v4", "v4-query"]), st.data())
def test_a_changed_byte_is_refused(signer: str, data: st.DataObject) -> None:
    method, target, headers = signed(signer, path="/b/k?x=1", headers={"x-amz-meta-a": "value"})
    fields = [method.encode(), target, *(value for _, value in headers)]
    index = data.draw(st.integers(0, len(fields) - 1))
    changed = bytearray(fields[index])
    position = data.draw(st.integers(0, len(changed) - 1))
    changed[position] = data.draw(
        st.sampled_from(b"abcXYZ019").filter(lambda b: b != changed[position])
    )
    assume(unquote_to_bytes(bytes(changed)) != unquote_to_bytes(fields[index]))  # %3B is %3b
    fields[index] = bytes(changed)
    names = [name for name, _ in headers]
    try:
        verified = check((fields[0].decode(), fields[1], list(zip(names, fields[2:], strict=True))))
    except S3Error:
        return
    # The change made the request anonymous: it was in the names that say it is signed.
    assert verified is None
    assert index == 1


@settings(max_examples=150, deadline=None)
@given(
    target=st.binary(max_size=60),
    start=st.sampled_from([b"", b"AWS4-HMAC-SHA256 ", b"AWS ", b"AWS4-HMAC-SHA256 Credential="]),
    rest=st.binary(max_size=60),
    query=st.dictionaries(
        st.sampled_from(
            [
                b"X-Amz-Algorithm",
                b"X-Amz-Credential",
                b"X-Amz-Signature",
                b"X-Amz-Date",
                b"X-Amz-Expires",
                b"X-Amz-SignedHeaders",
                b"Signature",
                b"AWSAccessKeyId",
                b"Expires",
            ]
        ),
        st.one_of(
            st.binary(max_size=12),
            st.sampled_from(
                [b"AWS4-HMAC-SHA256", b"20130524T000000Z", b"1", b"a/20130524/r/s3/aws4_request"]
            ),
        ),
    ),
)
def test_junk_is_refused_in_order(
    target: bytes, start: bytes, rest: bytes, query: dict[bytes, bytes]
) -> None:
    joined = target + b"?" + b"&".join(name + b"=" + value for name, value in query.items())
    headers = [(b"authorization", start + rest), (b"x-amz-date", rest)]
    for sent in (headers, [], headers * 2):
        try:
            authenticate("GET", joined, sent, secret_of, THEN, version_2=True)
        except S3Error as error:
            assert 400 <= error.status < 500


def test_the_same_key_in_other_encodings() -> None:
    method, target, headers = signed("v4", path="/bucket/a%20b/c%C3%A9-x?prefix=%C3%A9%20")
    other = target.replace(b"%C3%A9", b"%c3%a9").replace(b"-", b"%2D")
    other = other.replace(b"=%c3%a9%20", b"=%c3%a9+")
    assert check((method, other, headers)) is not None


def test_parameters_in_any_form() -> None:
    method, target, headers = signed("v4", path="/bucket?uploads=&a=b%3Dc&b=")
    other = target.replace(b"uploads=", b"uploads").replace(b"%3D", b"=").replace(b"&b=", b"&&b=&")
    assert check((method, other, headers)) is not None


def test_values_of_one_name_are_joined() -> None:
    method, target, headers = signed("v4", headers={"x-amz-meta-a": "1,2  3"})
    split = [item for item in headers if item[0] != b"x-amz-meta-a"]
    split += [(b"x-amz-meta-a", b" 1 "), (b"x-amz-meta-a", b"2  3")]
    assert check((method, target, split)) is not None


def test_amazon_headers_must_be_signed() -> None:
    for signer in ("v4", "v4-query"):
        method, target, headers = signed(signer)
        assert check((method, target, [*headers, (b"content-type", b"text/plain")])) is not None
        request = (method, target, [*headers, (b"x-amz-acl", b"public-read")])
        assert code(request) == "AccessDenied"


def test_the_host_must_be_signed() -> None:
    method, target, headers = PUBLISHED["get"]
    headers = [(n, v.replace(b"=host;", b"=")) for n, v in headers]
    assert code((method, target, headers), now=THEN) == "AccessDenied"


def test_clocks_may_differ_by_a_quarter_of_an_hour() -> None:
    request = PUBLISHED["get"]
    for now in (THEN - 900, THEN + 900):
        assert check(request, now) is not None
    for now in (THEN - 901, THEN + 901):
        assert code(request, now=now) == "RequestTimeTooSkewed"


def test_a_time_that_is_far_off_is_told_as_such() -> None:
    """Whatever date the credential has."""
    method, target, headers = PUBLISHED["get"]
    late = [(n, b"20300707T215304Z" if n == b"x-amz-date" else value) for n, value in headers]
    assert late != headers
    assert code((method, target, late), now=THEN) == "RequestTimeTooSkewed"


def test_a_presigned_url_has_its_time() -> None:
    request = PUBLISHED["presigned"]
    assert check(request, THEN + 86400) is not None
    with pytest.raises(S3Error, match="Request has expired"):
        check(request, THEN + 86401)
    with pytest.raises(S3Error, match="not valid yet"):
        check(request, THEN - 901)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"Expires=86400", b"Expires=604801"),
        (b"Expires=86400", b"Expires=0"),
        (b"Expires=86400", b"Expires=-1"),
        (b"Expires=86400", b"Expires=x"),
        (b"Expires=86400", b"Expires=" + b"9" * 5000),
        (b"X-Amz-Expires=86400&", b""),
        (b"&X-Amz-SignedHeaders=host", b""),
        (b"SHA256", b"SHA1"),
        (b"%2Fs3%2F", b"%2Fec2%2F"),
        (b"%2F20130524", b"%2F20130525"),
        (b"Date=2013", b"Date=20131"),
        (b"AKIAIOSFODNN7EXAMPLE%2F", b""),
    ],
)
def test_query_parameters_must_make_sense(old: bytes, new: bytes) -> None:
    method, target, headers = PUBLISHED["presigned"]
    assert old in target
    request = (method, target.replace(old, new), headers)
    assert code(request, now=THEN) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"EXAMPLE/", b"OTHER/", "InvalidAccessKeyId"),
        (b"/us-east-1/", b"/us-west-1/", "SignatureDoesNotMatch"),
        (b"/s3/", b"/ec2/", "AuthorizationHeaderMalformed"),
        (b"/20130524/", b"/20130523/", "AuthorizationHeaderMalformed"),
        (b"Credential=", b"Kredential=", "AuthorizationHeaderMalformed"),
        (b"Signature=", b"Signature=0", "AuthorizationHeaderMalformed"),
        (b"/aws4_request", b"", "AuthorizationHeaderMalformed"),
        (b"/us-east-1/", b"/us%0Aeast/", "AuthorizationHeaderMalformed"),
        (b"EXAMPLE/", b"E" * 300 + b"/", "AuthorizationHeaderMalformed"),
        (b"=host;", b"=Host;", "AuthorizationHeaderMalformed"),
        (b"=host;", b"=host;%0A;", "AuthorizationHeaderMalformed"),
        (b"=host;", b"=host" + b";a" * 3000 + b";", "AuthorizationHeaderMalformed"),
        (b"Signature=f0", b"Signature=0f", "SignatureDoesNotMatch"),
        (b"AWS4-HMAC-SHA256", b"AWS4-ECDSA-P256-SHA256", "UnsupportedSignature"),
        (b"AWS4-HMAC-SHA256", b"Bearer", "InvalidArgument"),
    ],
)
def test_the_header_must_make_sense(old: bytes, new: bytes, expected: str) -> None:
    method, target, headers = PUBLISHED["get"]
    headers = [(n, v.replace(old, new) if n == b"authorization" else v) for n, v in headers]
    assert code((method, target, headers), now=THEN) == expected


@pytest.mark.parametrize("date", [b"", b"Bad Date", b"20130524T000060Z", b"1969"])
def test_a_date_is_needed(date: bytes) -> None:
    method, target, headers = PUBLISHED["get"]
    headers = [(n, date if n == b"x-amz-date" else v) for n, v in headers]
    assert code((method, target, headers), now=THEN) == "AccessDenied"


def test_the_body_must_be_named() -> None:
    method, target, headers = PUBLISHED["get"]
    without = [item for item in headers if item[0] != b"x-amz-content-sha256"]
    assert code((method, target, without), now=THEN) == "InvalidRequest"
    wrong = [(n, b"STREAMING" if n == b"x-amz-content-sha256" else v) for n, v in headers]
    assert code((method, target, wrong), now=THEN) == "InvalidArgument"


def test_one_signature_is_enough() -> None:
    _, target, _ = PUBLISHED["presigned"]
    assert code(("GET", target, PUBLISHED["get"][2]), now=THEN) == "InvalidArgument"


def test_sts_signs_the_body_without_naming_it() -> None:
    method, target, headers = signed("sts", "POST", "/", body=b"Action=AssumeRole")
    digest = hashlib.sha256(b"Action=AssumeRole").hexdigest()
    verified = authenticate(
        method, target, headers, secret_of, time.time(), body_sha256=digest.encode()
    )
    assert verified is not None
    assert verified.service == b"sts"
    assert code((method, target, headers)) == "SignatureDoesNotMatch"


def test_our_own_urls() -> None:
    now = time.time()
    url = presign(
        "PUT",
        f"http://{HOST}",
        "/bucket/a b//é+%.bin".encode(),
        ACCESS_KEY,
        SECRET,
        region="eu-1",
        now=now,
        expires_s=60,
        query=[(b"versionId", b"a/b c")],
        headers=[("content-type", "text/plain")],
        session_token="to/ken=",
    )
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}".encode()
    headers = [(b"host", parts.netloc.encode()), (b"content-type", b"text/plain")]
    verified = check(("PUT", target, headers), now)
    assert verified is not None
    assert verified.session_token == "to/ken="
    assert code(("GET", target, headers)) == "SignatureDoesNotMatch"
    with pytest.raises(ValueError, match="1 to 604800"):
        presign("GET", "http://h", b"/", "a", "b", region="r", now=now, expires_s=0)


def test_nothing_secret_is_shown() -> None:
    verified = check(PUBLISHED["get"], THEN)
    assert verified is not None
    shown = repr(verified) + str(verified)
    assert SECRET not in shown
    assert verified.signature.decode() not in shown
