"""Condition keys, as policies see them."""

import json
from datetime import UTC, datetime
from typing import Any

from s3api.rules.access.policy import (
    AccessRequest,
    Decision,
    Requester,
    evaluate,
    new_bucket_policy,
)
from s3api.rules.access.request_values import (
    SignatureKind,
    request_values,
    with_existing_tags,
    with_request_tags,
)

ANN = Requester("ann", "1", "c-ann")
HEADERS = {
    "user-agent": "boto",
    "referer": "http://example.com/",
    "x-amz-acl": "public-read",
    "x-amz-copy-source": "/b/public%2Fx?versionId=3",
    "x-amz-metadata-directive": "COPY",
}
QUERY = {"prefix": "home/", "delimiter": "/", "max-keys": "10", "versionId": "v"}


def values(
    caller: Requester = ANN, signed: SignatureKind | None = None
) -> dict[str, tuple[str, ...]]:
    return request_values(
        caller=caller,
        source_ip="10.0.0.1",
        secure=True,
        now=datetime(2024, 1, 1, tzinfo=UTC),
        headers=HEADERS,
        query=QUERY,
        signed=signed,
    )


def holds(condition: dict[str, Any], given: dict[str, tuple[str, ...]]) -> bool:
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": "arn:aws:s3:::b/*",
        "Condition": condition,
    }
    policy = new_bucket_policy(json.dumps({"Statement": statement}), "b")
    request = AccessRequest(ANN, "s3:PutObject", "arn:aws:s3:::b/x", given)
    return evaluate([policy], request) is Decision.ALLOW


def test_every_key_is_seen() -> None:
    given = values(signed=SignatureKind("AWS4-HMAC-SHA256", "REST-QUERY-STRING", 5000))
    for condition in (
        {"IpAddress": {"aws:SourceIp": "10.0.0.0/24"}},
        {"Bool": {"aws:SecureTransport": "true"}},
        {"DateGreaterThan": {"aws:CurrentTime": "2023-01-01T00:00:00Z"}},
        {"NumericGreaterThan": {"aws:EpochTime": "1700000000"}},
        {"StringEquals": {"aws:UserAgent": "boto", "aws:username": "ann"}},
        {"StringLike": {"aws:Referer": "http://example.com/*"}},
        {"ArnLike": {"aws:PrincipalArn": "arn:aws:iam::1:user/*"}},
        {"StringEquals": {"s3:prefix": "home/", "s3:delimiter": "/", "s3:VersionId": "v"}},
        {"NumericLessThanEquals": {"s3:max-keys": "10", "s3:signatureAge": 6000}},
        {"StringEquals": {"s3:x-amz-acl": ["public-read", "private"]}},
        {"StringLike": {"s3:x-amz-copy-source": "b/public/*"}},
        {"StringEquals": {"s3:x-amz-metadata-directive": "COPY"}},
        {"StringEquals": {"s3:signatureversion": "AWS4-HMAC-SHA256"}},
        {"StringEquals": {"s3:authType": "REST-QUERY-STRING"}},
        {"Null": {"s3:x-amz-server-side-encryption": "true"}},
    ):
        assert holds(condition, given), condition


def test_anonymous_callers_have_no_name() -> None:
    given = values(Requester())
    assert holds({"Null": {"aws:username": "true", "s3:authType": "true"}}, given)
    assert given["aws:principaltype"] == ("Anonymous",)


def test_tags() -> None:
    given = with_request_tags(values(), {"security": "public", "Env": "prod"})
    assert holds({"StringEquals": {"s3:RequestObjectTag/security": "public"}}, given)
    assert holds({"StringEquals": {"s3:RequestObjectTag/Env": "prod"}}, given)
    keys = {"s3:RequestObjectTagKeys": ["security", "Env"]}
    assert holds({"ForAllValues:StringEquals": keys}, given)
    assert with_request_tags(values(), {}) == values()
    given = with_existing_tags(values(), {"security": "public"})
    assert holds({"StringEquals": {"s3:ExistingObjectTag/security": "public"}}, given)
    assert not holds({"StringEquals": {"s3:ExistingObjectTag/security": "public"}}, values())
