"""The same request, byte for byte, again and again over one connection: what a server may remember
of it, it must forget in time."""

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.integration.s3 import S3, users_of
from tests.integration.s3_raw import Answer, ask

DEADLINE_S = 30.0
OWN = {"date": "", "x-amz-request-id": ""}
"""What each answer has of its own."""
VERSIONS = ("s3", "s3v4")


class Again:
    """A presigned request on a connection of its own."""

    def __init__(self, connection: http.client.HTTPConnection, method: str, target: str) -> None:
        self._connection = connection
        self._method = method
        self._target = target

    def __call__(self, **headers: str) -> Answer:
        self._connection.request(self._method, self._target, headers=headers)
        response = self._connection.getresponse()
        told = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, told, response.read())

    def until_refused(self, at_latest: float) -> str:
        """The code and the message of the error that comes at last, and of each request after
        `at_latest` (of time.time)."""
        sent = time.time()
        while (told := self()).status == 200:
            assert sent <= at_latest, "still served"
            sent = time.time()
        document = ET.fromstring(told.body)
        return f"{document.findtext('Code')}: {document.findtext('Message')}"


@contextmanager
def asking(
    s3: S3, bucket: str, key: str = "a", *, method: str = "get_object", **options: Any
) -> Iterator[Again]:
    """Of `main`, unless `client` is given; asked twice already, so that whatever is remembered of
    what there is by now, is."""
    client = options.pop("client", None) or s3.client(signature_version="s3v4")
    url = client.generate_presigned_url(method, Params={"Bucket": bucket, "Key": key}, **options)
    connection = http.client.HTTPConnection(s3.host, s3.port, timeout=DEADLINE_S)
    with closing(connection):
        verb = {"get_object": "GET", "head_object": "HEAD"}[method]
        again = Again(connection, verb, url.removeprefix(s3.endpoint))
        again()
        again()
        yield again


def test_what_is_put_meanwhile(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"one")
    with asking(s3, bucket) as again, asking(s3, bucket, method="head_object") as head:
        for body in (b"two", b"three", b"x" * 100_000, b"", b"five"):
            etag = client.put_object(Bucket=bucket, Key="a", Body=body, Metadata={"n": "1"})["ETag"]
            told, head_told = again(), head()
            assert (told.status, told.body, told.headers["etag"]) == (200, body, etag)
            assert head_told.headers["content-length"] == str(len(body))
            assert head_told.headers["etag"] == etag
            assert told.headers["x-amz-meta-n"] == head_told.headers["x-amz-meta-n"] == "1"
        client.delete_object(Bucket=bucket, Key="a")
        assert (again().status, head().status) == (404, 404)
        client.put_object(Bucket=bucket, Key="a", Body=b"six")
        assert (again().body, head().status) == (b"six", 200)


def test_what_changes_on_the_mount(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"one", ContentType="text/x-a")
    path = s3.mount / bucket / "a"
    with asking(s3, bucket) as again, asking(s3, bucket, method="head_object") as head:
        etag = again().headers["etag"]
        other = path.with_name("b")
        other.write_bytes(b"two")
        other.replace(path)
        assert again().body == b"two"
        with path.open("r+b", buffering=0) as file:
            for text in (b"three", b"seven", b"and eight"):
                file.seek(0)
                file.write(text)
                assert (again().body, again().body) == (text, text)
                assert again().headers["etag"] == head().headers["etag"] != etag
            file.truncate(5)
        told = again()
        assert (told.body, head().headers["content-length"]) == (b"and e", "5")
        assert told.headers["etag"] == head().headers["etag"] != etag
        os.setxattr(path, "user.s3.content-type", b"text/x-b")
        assert again().headers["content-type"] == "text/x-b"
        path.unlink()
        assert (again().status, head().status) == (404, 404)


def test_what_is_said_about_it(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"one")
    tags = {"TagSet": [{"Key": "k", "Value": "v"}]}
    rule = {"Status": "Enabled", "Filter": {"Prefix": "a"}, "Expiration": {"Days": 1}}
    with asking(s3, bucket) as again:
        assert "x-amz-tagging-count" not in again().headers
        client.put_object_tagging(Bucket=bucket, Key="a", Tagging=tags)
        assert again().headers["x-amz-tagging-count"] == "1"
        assert "x-amz-version-id" not in again().headers
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
        assert again().headers["x-amz-version-id"] == "null"
        client.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [rule]}
        )
        assert "expiry-date" in again().headers["x-amz-expiration"]
        client.delete_bucket_lifecycle(Bucket=bucket)
        assert "x-amz-expiration" not in again().headers


def test_headers_that_are_not_the_same(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"hello", ChecksumAlgorithm="CRC32")
    with asking(s3, bucket) as again:
        first = ask(s3, "GET", f"/{bucket}/a")
        etag = again().headers["etag"]
        for _ in range(2):
            part = again(Range="bytes=1-2")
            assert (part.status, part.body) == (206, b"el")
            assert part.headers["content-range"] == "bytes 1-2/5"
            assert again(Range="bytes=9-").code == "InvalidRange"
            assert again(**{"If-None-Match": etag}).status == 304
            assert again(**{"If-Match": '"x"'}).code == "PreconditionFailed"
            whole = again()
            assert (whole.status, whole.body) == (200, b"hello")
            assert "content-range" not in whole.headers
            assert "x-amz-checksum-crc32" not in whole.headers
    assert {**whole.headers, **OWN} == {**first.headers, **OWN}
    assert whole.headers["x-amz-request-id"] != first.headers["x-amz-request-id"]


def test_who_may(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"one")
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:GetObject"}
    policy = {"Version": "2012-10-17", "Statement": deny | {"Resource": f"arn:aws:s3:::{bucket}/*"}}
    with asking(s3, bucket) as again:
        assert again().status == 200
        client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
        assert again().code == "AccessDenied"
        client.delete_bucket_policy(Bucket=bucket)
        assert again().status == 200


def test_a_bucket_that_goes(s3: S3) -> None:
    bucket = s3.new_bucket()
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"one")
    with asking(s3, bucket) as again:
        client.delete_object(Bucket=bucket, Key="a")
        client.delete_bucket(Bucket=bucket)
        assert again().code == "NoSuchBucket"
        client.create_bucket(Bucket=bucket)
        assert again().code == "NoSuchKey"
    s3.remove_bucket(bucket)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_signature_that_runs_out(s3: S3, bucket: str, version: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"one")
    client = s3.client(signature_version=version)
    with asking(s3, bucket, client=client, ExpiresIn=2) as again:
        assert again.until_refused(time.time() + 3) == "AccessDenied: Request has expired"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_key_that_is_disabled_or_replaced(s3: S3, bucket: str, version: str) -> None:
    name = f"again-{version}"
    s3.add_user(name, json.dumps(ALL))
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"one")
    with asking(s3, bucket, client=s3.client(name, signature_version=version)) as again:
        assert again().status == 200
        with users_of(s3.node) as users:
            users.set_enabled(name, False)
        assert again().code == "InvalidAccessKeyId"
        with users_of(s3.node) as users:
            users.set_enabled(name, True)
        assert again().status == 200
        with users_of(s3.node) as users:
            users.rotate(name)
        assert again().code == "InvalidAccessKeyId"


ALL = {
    "Version": "2012-10-17",
    "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"},
}
