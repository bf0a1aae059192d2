"""Presigned URLs of signature version 2: their query holds headers. What they may be used for."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import pytest
from botocore.auth import HmacV1Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.integration.s3 import S3
from tests.integration.s3_raw import Answer, ask


def presign(s3: S3, method: str, **params: Any) -> str:
    """The target of a presigned URL."""
    url: str = s3.client(signature_version="s3").generate_presigned_url(method, Params=params)
    assert "AWSAccessKeyId=" in url
    return url.removeprefix(s3.endpoint)


def put(s3: S3, target: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
    unsigned = {**(headers or {}), "x-amz-content-sha256": None}
    return ask(s3, "PUT", target, body, user=None, unsigned=unsigned)


def test_a_copy(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="ä +", Body=b"source", Metadata={"a": "1"})
    client.put_object(Bucket=bucket, Key="target", Body=b"old")
    source = {"Bucket": bucket, "Key": "ä +"}
    target = presign(s3, "copy_object", Bucket=bucket, Key="target", CopySource=source)
    told = put(s3, target)
    assert told.status == 200, told.body
    assert b"CopyObjectResult" in told.body
    got = client.get_object(Bucket=bucket, Key="target")
    assert (got["Body"].read(), got["Metadata"]) == (b"source", {"a": "1"})


def test_what_is_put_with_headers(s3: S3, bucket: str) -> None:
    body = b"hello"
    params = {
        "Metadata": {"One": "a b+c", "two": "2"},
        "ContentType": "text/x-a; charset=utf-8",
        "ContentMD5": base64.b64encode(hashlib.md5(body).digest()).decode(),
        "ACL": "private",
    }
    target = presign(s3, "put_object", Bucket=bucket, Key="a", **params)
    told = put(s3, target, b"other")
    assert (told.status, told.code) == (400, "BadDigest")
    for headers in ({}, {"Content-Type": str(params["ContentType"])}):
        told = put(s3, target, body, headers)
        assert told.status == 200, told.body
        got = s3.client().get_object(Bucket=bucket, Key="a")
        assert got["Body"].read() == body
        assert got["ContentType"] == params["ContentType"]
        assert got["Metadata"] == {"one": "a b+c", "two": "2"}
        s3.client().delete_object(Bucket=bucket, Key="a")


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_parameters_that_mean_nothing_are_passed_over(s3: S3, bucket: str, version: str) -> None:
    """In a link that was sent around. Version 4 signs all that there is."""
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    client = s3.client("main", signature_version=version)
    named = {"Bucket": bucket, "Key": "a"}
    url = client.generate_presigned_url("get_object", Params=named).removeprefix(s3.endpoint)
    bare = {"x-amz-content-sha256": None}
    told = ask(s3, "GET", f"{url}&utm_source=mail", user=None, unsigned=bare)
    if version == "s3":
        assert (told.status, told.body) == (200, b"x")
        told = ask(s3, "GET", f"{url}&partNumber=1", user=None, unsigned=bare)
        assert told.status == 403
    else:
        assert (told.status, told.code) == (403, "SignatureDoesNotMatch")
    told = ask(s3, "GET", f"/{bucket}/a?utm_source=mail&v=2")
    assert (told.status, told.body) == (200, b"x")


def test_what_was_not_signed_is_refused(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="secret", Body=b"s")
    target = presign(s3, "put_object", Bucket=bucket, Key="a", ContentType="text/plain")
    added = f"&x-amz-copy-source={bucket}/secret"
    for told in (
        put(s3, target, b"x", {"Content-Type": "text/html"}),
        put(s3, target + added),
        put(s3, target + added.replace("amz", "%61mz")),
        put(s3, target + "&content-type=text/html", b"x"),
        put(s3, target + "&x-amz-acl=public-read", b"x"),
    ):
        assert (told.status, told.code) == (403, "SignatureDoesNotMatch")
    assert [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]] == ["secret"]


@pytest.mark.parametrize("added", ["x-amz-copy-source=/{bucket}/secret", "x-amz-acl=public-read"])
def test_a_query_that_no_signature_covers_holds_no_headers(s3: S3, bucket: str, added: str) -> None:
    """Signature version 2 in a header covers no such parameters: who adds them to a request, and
    the name that says they are signed, escaped, changes nothing of it."""
    client = s3.client()
    client.put_object(Bucket=bucket, Key="secret", Body=b"s")
    pair = s3.users["main"]
    request = AWSRequest("PUT", f"{s3.endpoint}/{bucket}/a", {}, b"x")
    HmacV1Auth(Credentials(pair.access_key, pair.secret)).add_auth(request)
    target = f"/{bucket}/a?X%2DAmz-Signature=x&{added.format(bucket=bucket)}"
    put(s3, target, b"x", dict(request.headers.items()))
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"
    assert len(client.get_object_acl(Bucket=bucket, Key="a")["Grants"]) == 1


def test_an_acl_counts(s3: S3, bucket: str) -> None:
    target = presign(s3, "put_object", Bucket=bucket, Key="a", ACL="no-such-acl")
    told = put(s3, target, b"x")
    assert (told.status, told.code) == (400, "InvalidArgument")


@pytest.mark.parametrize(
    ("method", "query"),
    [
        ("PUT", "versionId=x"),
        ("PUT", "versionId"),
        ("PUT", "response-content-type=a/b"),
        ("POST", "uploads&versionId=x"),
        ("DELETE", "response-expires=x"),
    ],
)
def test_no_operation_passes_over_what_it_does_not_have(
    s3: S3, bucket: str, method: str, query: str
) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"old")
    told = ask(s3, method, f"/{bucket}/a?{query}")
    assert (told.status, told.code) == (400, "InvalidArgument")
    assert s3.client().get_object(Bucket=bucket, Key="a")["Body"].read() == b"old"
