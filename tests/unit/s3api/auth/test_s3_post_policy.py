"""Browser uploads: forms that botocore signs, and policies that forbid or make no sense."""

import base64
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from botocore.auth import HmacV1PostAuth, S3SigV4PostAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from s3api.auth import sigv2
from s3api.auth.post_policy import SignedForm, verify
from s3api.auth.verified import AuthType
from s3api.http.s3_errors import S3Error
from tests.unit.s3api.auth.s3_signed import ACCESS_KEY, HOST, SECRET, secret_of

NOW = 1_700_000_000.0
LATER = "2023-11-15T00:00:00Z"
USUAL: list[Any] = [{"bucket": "bucket"}, ["starts-with", "$key", "up/"]]
FIELDS = {"key": "up/a.txt"}


def signed(
    policy: object, fields: Mapping[str, str] = FIELDS, secret: str = SECRET
) -> dict[str, str]:
    """A form with signature version 2, over a policy of any shape."""
    encoded = base64.b64encode(json.dumps(policy).encode())
    signature = sigv2.sign(secret.encode(), encoded).decode()
    return {
        **fields,
        "AWSAccessKeyId": ACCESS_KEY,
        "policy": encoded.decode(),
        "signature": signature,
    }


def document(*conditions: object, expiration: object = LATER) -> dict[str, object]:
    return {"expiration": expiration, "conditions": [*USUAL, *conditions]}


def judge(fields: Mapping[str, str], now: float = NOW, version_2: bool = True) -> SignedForm | None:
    return verify(fields, "bucket", secret_of, now, version_2=version_2)


def code(fields: Mapping[str, str], **options: Any) -> str:
    with pytest.raises(S3Error) as caught:
        judge(fields, **options)
    assert SECRET not in repr(caught.value) + str(caught.value.extra)
    return caught.value.code


@pytest.mark.parametrize("signer", [S3SigV4PostAuth, HmacV1PostAuth])
def test_what_botocore_signs(signer: type) -> None:
    request = AWSRequest("POST", f"http://{HOST}/bucket")
    request.context["s3-presign-post-fields"] = {"key": "up/a", "acl": "private"}
    request.context["s3-presign-post-policy"] = {
        "expiration": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60)),
        "conditions": [*USUAL, {"acl": "private"}, ["content-length-range", 2, 10]],
    }
    credentials = Credentials(ACCESS_KEY, SECRET, "token")
    made = signer(credentials) if signer is HmacV1PostAuth else signer(credentials, "s3", "eu-1")
    made.add_auth(request)
    form = judge(request.context["s3-presign-post-fields"], time.time())
    assert form is not None
    assert (form.verified.access_key, form.verified.auth_type) == (ACCESS_KEY, AuthType.POST)
    assert form.verified.session_token == "token"
    assert (form.bounds.least, form.bounds.most) == (2, 10)


def test_nobody_signed_it() -> None:
    assert judge(FIELDS) is None
    assert code({**FIELDS, "signature": "s"}) == "InvalidArgument"


def test_names_and_operators_in_any_case() -> None:
    policy = {
        "expiration": "2023-11-15T00:00:00.000Z",
        "conditions": [{"bUcKeT": "bucket"}, ["StArTs-WiTh", "$KeY", "up"], {"AcL": "private"}],
    }
    fields = signed(policy, {"kEy": "up/a", "aCl": "private"})
    fields["pOLICy"], fields["sIgNaTuRe"] = fields.pop("policy"), fields.pop("signature")
    assert judge(fields) is not None


@pytest.mark.parametrize(
    ("conditions", "more"),
    [
        ([], {"x-ignore-me": "1"}),
        ([], {"x-amz-checksum-sha256": "any"}),
        ([["eq", "$x-amz-meta-a", "1"]], {"x-amz-meta-a": "1"}),
        ([["starts-with", "$x-amz-meta-a", ""]], {"x-amz-meta-a": "anything"}),
        ([["starts-with", "$Content-Type", "image/"]], {"Content-Type": "image/png, image/gif"}),
        ([["starts-with", "$key", "up/a"]], {}),
    ],
)
def test_what_a_policy_allows(conditions: list[object], more: dict[str, str]) -> None:
    assert judge(signed(document(*conditions), FIELDS | more)) is not None


@pytest.mark.parametrize(
    ("conditions", "more"),
    [
        ([], {"acl": "public-read"}),
        ([], {"key": "down/a"}),
        ([{"acl": "private"}], {"acl": "public-read"}),
        ([{"acl": "private"}], {}),
        ([["starts-with", "$x-amz-meta-a", "b"]], {}),
        ([["starts-with", "key", "up"]], {}),
        ([{"bucket": "other"}], {}),
        ([["starts-with", "$Content-Type", "image/"]], {"Content-Type": "image/png,text/html"}),
    ],
)
def test_what_a_policy_forbids(conditions: list[object], more: dict[str, str]) -> None:
    fields = signed(document(*conditions), FIELDS | more)
    with pytest.raises(S3Error, match="AccessDenied: Invalid according to Policy: "):
        judge(fields)


def test_the_bucket_must_be_named() -> None:
    fields = signed({"expiration": LATER, "conditions": [USUAL[1]]})
    with pytest.raises(S3Error, match="Extra input fields: bucket"):
        judge(fields)


def test_a_policy_has_its_time() -> None:
    with pytest.raises(S3Error, match="Invalid according to Policy: Policy expired"):
        judge(signed(document()), NOW + 86400)


@pytest.mark.parametrize(
    "policy",
    [
        {"conditions": USUAL},
        {"expiration": LATER},
        {"EXPIRATION": LATER, "conditions": USUAL},
        {"expiration": LATER, "CONDITIONS": USUAL},
        {"expiration": LATER, "conditions": {}},
        document(expiration="2023-11-15 00:00:00+00:00"),
        document(expiration="2023-02-30T00:00:00Z"),
        document(expiration=1),
        document({}),
        document({"acl": "a", "b": "c"}),
        document({"acl": 1}),
        document(["like", "$key", "up"]),
        document(["eq", "$key"]),
        document([1, 2, 3]),
        document("eq"),
        document(["content-length-range", 0]),
        document(["content-length-range", -1, 0]),
        document(["content-length-range", 2, 1]),
        document(["content-length-range", 0, 1e30]),
        document(["content-length-range", True, 5]),
        [],
        "policy",
    ],
)
def test_documents_that_make_no_sense(policy: object) -> None:
    assert code(signed(policy)) == "InvalidPolicyDocument"


def test_a_document_must_be_json() -> None:
    for text in (b"{", b"[" * 50_000, b"\xff", b""):
        encoded = base64.b64encode(text)
        fields = signed({}) | {
            "policy": encoded.decode(),
            "signature": sigv2.sign(SECRET.encode(), encoded).decode(),
        }
        assert code(fields) in ("InvalidPolicyDocument", "MaxPostPreDataLengthExceededError")


def test_who_signed() -> None:
    assert code(signed(document(), secret="wrong")) == "SignatureDoesNotMatch"
    assert code(signed(document()) | {"AWSAccessKeyId": "other"}) == "InvalidAccessKeyId"
    assert code(signed(document()), version_2=False) == "InvalidRequest"
    unsigned = {name: value for name, value in signed(document()).items() if name != "signature"}
    assert code(unsigned) == "InvalidArgument"
    assert code({**signed(document()), "KEY": "x"}) == "MalformedPOSTRequest"


def test_how_long_a_file_may_be() -> None:
    form = judge(signed(document(["content-length-range", "512", 1000])))
    assert form is not None
    form.bounds.check(512)
    form.bounds.check(1000)
    for length, expected in ((511, "EntityTooSmall"), (1001, "EntityTooLarge")):
        with pytest.raises(S3Error, match=expected):
            form.bounds.check(length)


_NAMES = st.sampled_from(
    [
        "policy",
        "signature",
        "awsaccesskeyid",
        "key",
        "x-amz-signature",
        "x-amz-algorithm",
        "x-amz-credential",
        "x-amz-date",
        "x-amz-security-token",
    ]
)
_VALUES = st.one_of(
    st.text(max_size=20),
    st.sampled_from([ACCESS_KEY, "AWS4-HMAC-SHA256", "20130524T000000Z", "bnVsbA=="]),
    st.just(f"{ACCESS_KEY}/20130524/us-east-1/s3/aws4_request"),
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_NAMES, _VALUES))
def test_junk_is_refused_in_order(fields: dict[str, str]) -> None:
    try:
        judge(fields)
    except S3Error as error:
        assert 400 <= error.status < 500


@settings(max_examples=100, deadline=None)
@given(_JSON, st.lists(_JSON, max_size=3))
def test_signed_junk_is_refused_in_order(expiration: object, conditions: list[object]) -> None:
    for policy in (expiration, document(*conditions), document(expiration=expiration)):
        try:
            judge(signed(policy))
        except S3Error as error:
            assert error.code in ("InvalidPolicyDocument", "AccessDenied")
