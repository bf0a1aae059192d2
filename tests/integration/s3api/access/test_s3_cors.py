"""Requests that pages of other origins make: preflight ones, and the headers of all answers."""

import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.integration.s3 import S3, refused


def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, Any]:
    """Status and headers of an answer."""
    request = urllib.request.Request(url, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


def origins(client: Any, bucket: str, *rules: dict[str, Any]) -> None:
    client.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": list(rules)})


def test_rules_are_put_read_and_deleted(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchCORSConfiguration"):
        client.get_bucket_cors(Bucket=bucket)
    rule = {
        "ID": "one",
        "AllowedMethods": ["GET", "PUT"],
        "AllowedOrigins": ["*.get", "*.put"],
        "AllowedHeaders": ["x-amz-*"],
        "ExposeHeaders": ["ETag"],
        "MaxAgeSeconds": 3000,
    }
    origins(client, bucket, rule)
    assert client.get_bucket_cors(Bucket=bucket)["CORSRules"] == [rule]
    client.delete_bucket_cors(Bucket=bucket)
    with refused(404, "NoSuchCORSConfiguration"):
        client.get_bucket_cors(Bucket=bucket)
    with refused(400, "InvalidRequest"):
        origins(client, bucket, {"AllowedMethods": ["PATCH"], "AllowedOrigins": ["*"]})
    with refused(400, "InvalidRequest"):
        origins(client, bucket, {"AllowedMethods": ["GET"], "AllowedOrigins": ["*.*"]})


@pytest.fixture
def url(s3: S3, bucket: str) -> str:
    """Of a public bucket with rules."""
    client = s3.client()
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    origins(
        client,
        bucket,
        {"AllowedMethods": ["GET"], "AllowedOrigins": ["*suffix", "start*end", "prefix*"]},
        {"AllowedMethods": ["PUT"], "AllowedOrigins": ["*.put"]},
    )
    return f"{s3.endpoint}/{bucket}"


METHOD = "Access-Control-Request-Method"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "origin", "methods"),
    [
        ("GET", "", {}, 200, None, None),
        ("GET", "", {"Origin": "foo.suffix"}, 200, "foo.suffix", "GET"),
        ("GET", "", {"Origin": "foo.bar"}, 200, None, None),
        ("GET", "", {"Origin": "foo.suffix.get"}, 200, None, None),
        ("GET", "", {"Origin": "startend"}, 200, "startend", "GET"),
        ("GET", "", {"Origin": "start1end"}, 200, "start1end", "GET"),
        ("GET", "", {"Origin": "start12end"}, 200, "start12end", "GET"),
        ("GET", "", {"Origin": "0start12end"}, 200, None, None),
        ("GET", "", {"Origin": "prefix"}, 200, "prefix", "GET"),
        ("GET", "", {"Origin": "prefix.suffix"}, 200, "prefix.suffix", "GET"),
        ("GET", "", {"Origin": "bla.prefix"}, 200, None, None),
        ("GET", "/bar", {"Origin": "foo.suffix"}, 404, "foo.suffix", "GET"),
        ("PUT", "/bar", {"Origin": "foo.suffix", METHOD: "GET"}, 403, "foo.suffix", "GET"),
        ("PUT", "/bar", {"Origin": "foo.suffix", METHOD: "PUT"}, 403, None, None),
        ("PUT", "/bar", {"Origin": "foo.suffix"}, 403, None, None),
        ("PUT", "/bar", {"Origin": "foo.put"}, 403, "foo.put", "PUT"),
        ("OPTIONS", "", {}, 400, None, None),
        ("OPTIONS", "", {"Origin": "foo.suffix"}, 400, None, None),
        ("OPTIONS", "/bar", {"Origin": "foo.suffix", METHOD: "GET"}, 200, "foo.suffix", "GET"),
        ("OPTIONS", "", {"Origin": "foo.bar", METHOD: "GET"}, 403, None, None),
        ("OPTIONS", "", {"Origin": "foo.suffix", METHOD: "PUT"}, 403, None, None),
        ("OPTIONS", "", {"Origin": "foo.put", METHOD: "PUT"}, 200, "foo.put", "PUT"),
        ("OPTIONS", "", {"Origin": "foo.put", METHOD: "FETCH"}, 400, None, None),
    ],
)
def test_origins(
    url: str,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    origin: str | None,
    methods: str | None,
) -> None:
    found, told = ask(method, url + path, headers)
    assert found == status
    assert told["Access-Control-Allow-Origin"] == origin
    assert told["Access-Control-Allow-Methods"] == methods


def test_any_origin(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    origins(client, bucket, {"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]})
    _, told = ask("GET", f"{s3.endpoint}/{bucket}", {"Origin": "example.origin"})
    assert told["Access-Control-Allow-Origin"] == "*"
    assert "Access-Control-Allow-Credentials" not in told


def test_headers_that_are_asked_for(s3: S3, bucket: str) -> None:
    rule = {
        "AllowedMethods": ["GET"],
        "AllowedOrigins": ["*"],
        "AllowedHeaders": ["x-amz-meta-header1"],
        "ExposeHeaders": ["x-amz-meta-header1"],
        "MaxAgeSeconds": 30,
    }
    origins(s3.client(), bucket, rule)
    asked = {"Origin": "example.origin", METHOD: "GET"}
    url = f"{s3.endpoint}/{bucket}/bar"
    for header, status in (("x-amz-meta-header1", 200), ("x-amz-meta-header2", 403)):
        found, told = ask("OPTIONS", url, asked | {"Access-Control-Request-Headers": header})
        assert found == status
    found, told = ask("OPTIONS", url, asked)
    assert told["Access-Control-Expose-Headers"] == "x-amz-meta-header1"
    assert told["Access-Control-Max-Age"] == "30"


@pytest.mark.parametrize("version", ["s3v4", "s3"])
def test_presigned_urls(s3: S3, bucket: str, version: str) -> None:
    client = s3.client(signature_version=version)
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    origins(client, bucket, {"AllowedMethods": ["GET"], "AllowedOrigins": ["example"]})
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "a"})
    found, told = ask("OPTIONS", url, {"Origin": "example", METHOD: "GET"})
    assert (found, told["Access-Control-Allow-Origin"]) == (200, "example")
    found, told = ask("GET", url, {"Origin": "example"})
    assert (found, told["Access-Control-Allow-Origin"]) == (200, "example")
    assert told["Access-Control-Allow-Credentials"] == "true"
    assert "Origin" in told["Vary"]
    found, told = ask("GET", url + "x", {"Origin": "example"})
    assert (found, told["Access-Control-Allow-Origin"]) == (403, "example")


def test_a_bucket_that_is_not_there(s3: S3) -> None:
    found, _ = ask("OPTIONS", f"{s3.endpoint}/no-such-bucket", {"Origin": "a", METHOD: "GET"})
    assert found == 404
    found, _ = ask("GET", f"{s3.endpoint}/no-such-bucket", {"Origin": "a"})
    assert found == 404
