"""Policies: the language, the documents, what is public, and which action an operation needs."""

import fnmatch
import json
import re
from typing import Any

import pytest
from botocore.loaders import Loader
from hypothesis import given
from hypothesis import strategies as st

from s3api.http.s3_errors import S3Error
from s3api.rules.access import actions, condition_operators
from s3api.rules.access.glob import is_fixed, literal, matches
from s3api.rules.access.policy import (
    SIZE_LIMIT_BYTES,
    AccessRequest,
    Decision,
    Policy,
    Requester,
    evaluate,
    is_public,
    new_bucket_policy,
    parse_bucket_policy,
    parse_user_policy,
)

ANN = Requester("ann", "123456789012", "c-ann")
BOB = Requester("bob", "123456789012", "c-bob")
ANYBODY = Requester()
OBJECT = "arn:aws:s3:::b/home/ann/x"


def document(*statements: dict[str, Any], version: str = "2012-10-17") -> str:
    return json.dumps({"Version": version, "Statement": list(statements)})


def statement(**elements: Any) -> dict[str, Any]:
    usual = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": "arn:aws:s3:::b/*"}
    for name in elements:
        usual.pop(name.removeprefix("Not"), None)
    return usual | elements


def bucket_policy(*statements: dict[str, Any], version: str = "2012-10-17") -> Policy:
    return new_bucket_policy(document(*statements, version=version), "b")


def decide(policy: Policy, caller: Requester = ANN, **values: str | tuple[str, ...]) -> Decision:
    return decide_on(policy, caller, "s3:GetObject", OBJECT, values)


def decide_on(
    policy: Policy,
    caller: Requester,
    action: str,
    resource: str,
    values: dict[str, Any] | None = None,
) -> Decision:
    context = {
        key: value if isinstance(value, tuple) else (value,)
        for key, value in (values or {}).items()
    }
    if caller.name is not None:
        context.setdefault("aws:username", (caller.name,))
    return evaluate([policy], AccessRequest(caller, action, resource, context))


def allows(policy: Policy, caller: Requester = ANN, values: dict[str, Any] | None = None) -> bool:
    return decide_on(policy, caller, "s3:GetObject", OBJECT, values) is Decision.ALLOW


# --- patterns

glob_text = st.text("ab*?", max_size=8)


@given(glob_text, st.text("ab", max_size=10))
def test_patterns_match_as_shell_patterns_do(pattern: str, text: str) -> None:
    assert matches(pattern, text) is bool(re.match(fnmatch.translate(pattern), text))


@given(st.text("ab*?${}", max_size=8), st.text("ab*?${}", max_size=8))
def test_a_literal_matches_itself_alone(text: str, other: str) -> None:
    assert is_fixed(literal(text))
    assert matches(literal(text), text)
    assert matches(literal(text), other) is (text == other)


def test_patterns_that_would_blow_up() -> None:
    assert not matches("*a" * 500 + "*b", "a" * 1000)


# --- evaluation


@pytest.mark.parametrize(
    ("principal", "callers"),
    [
        ("*", {"ann", "bob", None}),
        ({"AWS": "*"}, {"ann", "bob", None}),
        ({"AWS": "arn:aws:iam::123456789012:user/ann"}, {"ann"}),
        ({"AWS": ["arn:aws:iam::123456789012:user/ann", "bob"]}, {"ann", "bob"}),
        ({"AWS": "ann"}, {"ann"}),
        ({"AWS": "123456789012"}, {"ann", "bob"}),
        ({"AWS": "arn:aws:iam::123456789012:root"}, {"ann", "bob"}),
        ({"AWS": "arn:aws:iam::210987654321:root"}, set()),
        ({"CanonicalUser": "c-bob"}, {"bob"}),
        ({"Service": "logging.s3.amazonaws.com"}, set()),
    ],
)
def test_principals(principal: Any, callers: set[str | None]) -> None:
    for caller in (ANN, BOB, ANYBODY):
        policy = bucket_policy(statement(Principal=principal))
        assert allows(policy, caller) is (caller.name in callers)
        others = statement(Effect="Deny", NotPrincipal=principal)
        policy = bucket_policy(statement(), others)
        assert allows(policy, caller) is (caller.name in callers)


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ({"Action": "s3:GetObject"}, True),
        ({"Action": "S3:getobject"}, True),
        ({"Action": ["s3:PutObject", "s3:Get*"]}, True),
        ({"Action": "*"}, True),
        ({"Action": "s3:GetObjectVersion"}, False),
        ({"NotAction": "s3:GetObject"}, False),
        ({"NotAction": "s3:DeleteObject"}, True),
        ({"Resource": "arn:aws:s3:::b/home/*"}, True),
        ({"Resource": "arn:aws:s3:::b/home/???/x"}, True),
        ({"Resource": "arn:aws:s3:::b/HOME/*"}, False),
        ({"Resource": "arn:aws:s3:::*/home/ann/x"}, True),
        ({"Resource": "arn:aws:s3:::b/home/${aws:username}/*"}, True),
        ({"Resource": "arn:aws:s3:::b/home/${s3:prefix}/*"}, False),
        ({"Resource": "arn:aws:s3:::b/home/${s3:prefix, 'ann'}/*"}, True),
        ({"NotResource": "arn:aws:s3:::b/home/*"}, False),
        ({"NotResource": "arn:aws:s3:::b/work/*"}, True),
    ],
)
def test_actions_and_resources(elements: dict[str, Any], expected: bool) -> None:
    assert allows(bucket_policy(statement(**elements))) is expected


def test_a_value_is_never_a_wildcard() -> None:
    policy = bucket_policy(statement(Resource="arn:aws:s3:::b/home/${aws:username}/*"))
    assert not allows(policy, Requester("*", "123456789012"))
    condition = {"StringLike": {"aws:userid": "${aws:username}"}}
    assert not allows(
        bucket_policy(statement(Condition=condition)), Requester("*"), {"aws:userid": "x"}
    )


def test_the_old_version_knows_no_variables() -> None:
    home = statement(Resource="arn:aws:s3:::b/home/${aws:username}/*")
    policy = bucket_policy(home, version="2008-10-17")
    assert not allows(policy)
    named = "arn:aws:s3:::b/home/${aws:username}/x"
    assert decide_on(policy, ANN, "s3:GetObject", named) is Decision.ALLOW


@given(st.permutations(["Allow", "Deny", "Other"]))
def test_a_deny_wins_wherever_it_stands(order: list[str]) -> None:
    statements = [
        statement(Effect="Allow", Resource="arn:aws:s3:::b/other/*")
        if effect == "Other"
        else statement(Effect=effect)
        for effect in order
    ]
    assert decide(bucket_policy(*statements)) is Decision.DENY
    each = [bucket_policy(one) for one in statements]
    assert evaluate(each, AccessRequest(ANN, "s3:GetObject", OBJECT)) is Decision.DENY


def test_what_nothing_speaks_of_is_not_decided() -> None:
    policy = bucket_policy(statement(Action="s3:PutObject"))
    assert decide(policy) is Decision.NONE
    assert evaluate([], AccessRequest(ANN, "s3:GetObject", OBJECT)) is Decision.NONE


IP = "aws:sourceip"
CASES: list[tuple[str, str, Any, Any, bool]] = [
    ("StringEquals", "s3:prefix", "home/", "home/", True),
    ("StringEquals", "s3:prefix", ["a", "home/"], "home/", True),
    ("StringEquals", "s3:prefix", "home/", None, False),
    ("StringEquals", "s3:prefix", "h*", "home/", False),
    ("StringEquals", "s3:prefix", "h*", "h*", True),
    ("StringEqualsIfExists", "s3:prefix", "home/", None, True),
    ("StringEqualsIfExists", "s3:prefix", "home/", "x", False),
    ("StringNotEquals", "s3:prefix", ["a", "b"], "c", True),
    ("StringNotEquals", "s3:prefix", ["a", "b"], "b", False),
    ("StringNotEquals", "s3:prefix", "a", None, True),
    ("StringEqualsIgnoreCase", "s3:prefix", "HOME", "home", True),
    ("StringNotEqualsIgnoreCase", "s3:prefix", "HOME", "home", False),
    ("StringLike", "s3:prefix", "home/*", "home/ann", True),
    ("StringLike", "s3:prefix", "${aws:username}*", "ann/x", True),
    ("StringNotLike", "aws:referer", "http://good/*", "http://bad/", True),
    ("NumericLessThanEquals", "s3:max-keys", 10, "10", True),
    ("NumericLessThan", "s3:max-keys", "10", "10", False),
    ("NumericGreaterThan", "s3:max-keys", "10", "11", True),
    ("NumericEquals", "s3:max-keys", "10", "ten", False),
    ("NumericNotEquals", "s3:max-keys", "10", "11", True),
    ("DateLessThan", "aws:currenttime", "2030-01-01T00:00:00Z", "2029-12-31T23:59:59Z", True),
    ("DateGreaterThan", "aws:currenttime", "2030-01-01T00:00:00Z", "2029-12-31T00:00:00Z", False),
    ("DateEquals", "aws:epochtime", "1970-01-01T00:01:00Z", "60", True),
    ("Bool", "aws:securetransport", False, "false", True),
    ("Bool", "aws:securetransport", "true", "false", False),
    ("IpAddress", IP, "10.0.0.0/8", "10.1.2.3", True),
    ("IpAddress", IP, ["192.168.0.0/16", "10.1.2.3"], "10.1.2.3", True),
    ("IpAddress", IP, "10.0.0.0/8", "11.1.2.3", False),
    ("IpAddress", IP, "10.0.0.0/8", "::ffff:10.1.2.3", True),
    ("IpAddress", IP, "2001:db8::/32", "2001:db8::1", True),
    ("IpAddress", IP, "10.0.0.0/8", None, False),
    ("NotIpAddress", IP, "10.0.0.0/8", "11.1.2.3", True),
    ("NotIpAddress", IP, "10.0.0.0/8", "10.1.2.3", False),
    ("Null", "s3:prefix", "true", None, True),
    ("Null", "s3:prefix", "true", "x", False),
    ("Null", "s3:prefix", False, "x", True),
    ("ArnLike", "aws:sourcearn", "arn:aws:s3:::b*", "arn:aws:s3:::bucket", True),
    ("ArnLike", "aws:sourcearn", "arn:*:bucket", "arn:aws:s3:::bucket", False),
    ("ArnNotEquals", "aws:sourcearn", "arn:aws:s3:::a", "arn:aws:s3:::b", True),
    ("ForAllValues:StringEquals", "s3:requestobjecttagkeys", ["a", "b"], ("a", "b"), True),
    ("ForAllValues:StringEquals", "s3:requestobjecttagkeys", ["a", "b"], ("a", "c"), False),
    ("ForAllValues:StringEquals", "s3:requestobjecttagkeys", ["a"], None, True),
    ("ForAnyValue:StringEquals", "s3:requestobjecttagkeys", ["a"], ("c", "a"), True),
    ("ForAnyValue:StringEquals", "s3:requestobjecttagkeys", ["a"], ("c",), False),
    ("ForAnyValue:StringEquals", "s3:requestobjecttagkeys", ["a"], None, False),
    ("ForAnyValue:StringNotEquals", "s3:requestobjecttagkeys", ["a"], ("a", "b"), True),
    ("StringEquals", "s3:existingobjecttag/env", "prod", "prod", True),
]


@pytest.mark.parametrize(("operator", "key", "wanted", "value", "expected"), CASES)
def test_conditions(operator: str, key: str, wanted: Any, value: Any, expected: bool) -> None:
    policy = bucket_policy(statement(Condition={operator: {key: wanted}}))
    assert allows(policy, ANN, {} if value is None else {key: value}) is expected


def test_all_conditions_must_hold() -> None:
    condition = {
        "StringEquals": {"s3:prefix": "a", "s3:delimiter": "/"},
        "Bool": {"aws:SecureTransport": "true"},
    }
    policy = bucket_policy(statement(Condition=condition))
    values = {"s3:prefix": "a", "s3:delimiter": "/", "aws:securetransport": "true"}
    assert allows(policy, ANN, values)
    for key in values:
        assert not allows(policy, ANN, values | {key: "x"})


# --- documents


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 15000,
        "{}",
        '{"Version": "2012-10-17"}',
        '{"Version": ["2012-10-17"], "Statement": []}',
        '{"Statement": [], "Statement": []}',
        document(),
        document(statement(), version="2013-10-17"),
        document(statement(Effect="allow")),
        document(statement(Effect=["Allow"])),
        document(statement(Sid=3)),
        document(statement(Unknown="x")),
        document(statement(Action=[])),
        document(statement(Action=3)),
        document(statement(Action="GetObject")),
        document(statement(Action="s3:Get Object")),
        document(statement(Effect="Deny", Action="s3:ListBucket")),
        document(statement(Effect="Deny", Action="s3:GetObject", Resource="arn:aws:s3:::b")),
        document(statement(NotPrincipal={"AWS": "ann"})),
        document(statement(Resource="arn:aws:s3:::other/*")),
        document(statement(Resource="b/*")),
        document(statement(Resource="*")),
        document(statement(Principal={})),
        document(statement(Principal={"AWS": "arn:aws:iam::1:*"})),
        document(statement(Principal={"AWS": []})),
        document(statement(Principal={"AWS": "arn:aws:s3:::b"})),
        document(statement(Principal={"Alien": "x"})),
        document(statement(Principal="ann")),
        document(statement() | {"NotAction": "s3:*"}),
        document(statement(Condition=[])),
        document(statement(Condition={"StringIs": {"s3:prefix": "x"}})),
        document(statement(Condition={"StringEquals": "x"})),
        document(statement(Condition={"StringEquals": {"prefix": "x"}})),
        document(statement(Condition={"StringEquals": {"s3:prefix": []}})),
        document(statement(Condition={"StringEquals": {"s3:prefix": {}}})),
        document(statement(Condition={"NumericEquals": {"s3:max-keys": "ten"}})),
        document(statement(Condition={"NotIpAddress": {"aws:SourceIp": "10.0.0.0/99"}})),
        document(statement(Condition={"Bool": {"aws:SecureTransport": "yes"}})),
        document(statement(Condition={"DateLessThan": {"aws:CurrentTime": "soon"}})),
        document(statement(Sid="x" * SIZE_LIMIT_BYTES)),
    ],
)
def test_malformed_documents(text: str) -> None:
    with pytest.raises(S3Error) as caught:
        new_bucket_policy(text, "b")
    assert (caught.value.code, caught.value.status) == ("MalformedPolicy", 400)


def test_a_kept_policy_stays_in_force() -> None:
    kept = parse_bucket_policy(document(statement(NotPrincipal={"AWS": "ann"})))
    assert [allows(kept, caller) for caller in (ANN, BOB, ANYBODY)] == [False, True, True]
    assert is_public(kept)


def test_good_documents() -> None:
    single = json.dumps({"Statement": statement(Action="s3:ListBucket", Resource="arn:aws:s3:::b")})
    assert not new_bucket_policy(single, "b").variables
    both = statement(
        Action=["s3:GetObject", "s3:ListBucket"],
        Resource=["arn:aws:s3:::b", "arn:aws:s3:::b/*"],
    )
    assert allows(bucket_policy(both))
    assert allows(bucket_policy(statement(Resource="arn:aws:s3:::b*", Action="s3:*")))
    nothing = statement(Action="s3:GetObject", Resource="arn:aws:s3:::b")
    assert not allows(bucket_policy(nothing))


def test_user_policies() -> None:
    mine = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}
    policy = parse_user_policy(document(mine))
    assert allows(policy, BOB)
    with pytest.raises(S3Error):
        parse_user_policy(document(statement()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["Sid", "Effect", "Principal", "Action", "Resource", "Condition"]),
        json_values
        | st.sampled_from(["Allow", "*", "s3:*", "arn:aws:s3:::b/*"])
        | st.dictionaries(st.sampled_from(["AWS", "Bool", "Null"]), json_values),
    )
)
def test_any_document_is_a_policy_or_malformed(content: dict[str, Any]) -> None:
    try:
        policy = bucket_policy(content)
    except S3Error as error:
        assert error.code == "MalformedPolicy"
    else:
        assert decide(policy) in Decision


# --- what is public


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ({}, True),
        ({"Effect": "Deny"}, False),
        ({"Principal": {"AWS": "*"}}, True),
        ({"Principal": {"AWS": "arn:aws:iam::123456789012:root"}}, False),
        ({"Effect": "Deny", "NotPrincipal": {"AWS": "ann"}}, False),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "10.0.0.0/32"}}}, False),
        ({"Condition": {"IpAddress": {"aws:SourceIp": "0.0.0.0/1"}}}, True),
        ({"Condition": {"NotIpAddress": {"aws:SourceIp": "10.0.0.0/32"}}}, True),
        ({"Condition": {"StringEquals": {"aws:SourceVpc": "vpc-91237329"}}}, False),
        ({"Condition": {"StringLike": {"aws:SourceVpc": "vpc-*"}}}, True),
        ({"Condition": {"StringEquals": {"aws:Referer": "http://x/"}}}, True),
        ({"Condition": {"StringEqualsIfExists": {"aws:SourceVpc": "vpc-91237329"}}}, True),
    ],
)
def test_public_policies(elements: dict[str, Any], expected: bool) -> None:
    assert is_public(bucket_policy(statement(**elements))) is expected
    assert is_public(bucket_policy(statement(), statement(**elements)))


def test_operator_names() -> None:
    assert condition_operators.is_known("foranyvalue:stringlikeifexists")
    assert not condition_operators.is_known("nullifexists")
    assert condition_operators.is_narrow_network("10.0.0.0/8")
    assert not condition_operators.is_narrow_network("nonsense")


# --- actions


def test_every_operation_of_the_model_has_its_action() -> None:
    model = Loader().load_service_model("s3", "service-2")
    assert set(actions.PERMISSIONS) == set(model["operations"])


def test_actions_that_operations_need() -> None:
    needed = actions.needed
    assert needed("GetObject", {}) == ("s3:GetObject",)
    assert needed("HeadObject", {"VersionId": "v"}) == ("s3:GetObjectVersion",)
    assert needed("ListObjectsV2", {}) == ("s3:ListBucket",)
    assert needed("UploadPart", {"Tagging": "x"}) == ("s3:PutObject",)
    put = needed("PutObject", {"Tagging": "a=b", "ACL": "private", "GrantRead": "x"})
    assert put == ("s3:PutObject", "s3:PutObjectTagging", "s3:PutObjectAcl")
    attributes = needed("GetObjectAttributes", {"VersionId": "v"})
    assert attributes == ("s3:GetObjectVersionAttributes", "s3:GetObjectVersion")
    assert actions.needed_of_source(None) == "s3:GetObject"
    assert actions.needed_of_source("v") == "s3:GetObjectVersion"


def test_which_actions_concern_buckets() -> None:
    for action in ("ListBucket", "GetBucketPolicy", "PutLifecycleConfiguration", "CreateBucket"):
        assert actions.concerns_bucket(f"s3:{action}")
    for action in ("GetObject", "PutObjectRetention", "ListMultipartUploadParts", "PutObject"):
        assert not actions.concerns_bucket(f"s3:{action}")
