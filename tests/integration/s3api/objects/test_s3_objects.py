"""PutObject, GetObject, HeadObject and DeleteObject as clients see them."""

import base64
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError

from s3api.auth.presign import presign
from tests.integration.s3 import REGION, S3, code_of, refused
from tests.integration.s3_raw import ask

SOON = timedelta(days=1)
NOWHERE = "d41d8cd98f00b204e9800998ecf8427e"


def versioned(s3: S3, bucket: str, status: str = "Enabled") -> str:
    s3.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
    return bucket


@pytest.fixture
def kept(s3: S3, bucket: str) -> str:
    """A bucket that keeps versions."""
    return versioned(s3, bucket)


# --- reading


def test_what_was_put_is_got(s3: S3, bucket: str) -> None:
    client = s3.client()
    put = client.put_object(
        Bucket=bucket,
        Key="a",
        Body=b"hello",
        ContentType="text/x-test",
        CacheControl="no-store",
        ContentDisposition='attachment; filename="a"',
        ContentEncoding="gzip",
        ContentLanguage="de",
        Expires=datetime(2030, 1, 1, tzinfo=UTC),
        WebsiteRedirectLocation="/b",
        Metadata={"one": "1", "Two": "zwei"},
    )
    assert put["ETag"] == f'"{hashlib.md5(b"hello").hexdigest()}"'
    for got in (
        client.get_object(Bucket=bucket, Key="a"),
        client.head_object(Bucket=bucket, Key="a"),
    ):
        assert got["ContentLength"] == 5
        assert got["ContentType"] == "text/x-test"
        assert got["CacheControl"] == "no-store"
        assert got["ContentDisposition"] == 'attachment; filename="a"'
        assert got["ContentEncoding"] == "gzip"
        assert got["ContentLanguage"] == "de"
        assert got["ExpiresString"] == "Tue, 01 Jan 2030 00:00:00 GMT"
        assert got["WebsiteRedirectLocation"] == "/b"
        assert got["Metadata"] == {"one": "1", "two": "zwei"}
        assert got["ETag"] == put["ETag"]
        assert got["AcceptRanges"] == "bytes"
        assert "VersionId" not in got
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"hello"


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "a/b",
        "dir/",
        "//",
        "/lead",
        "a//b",
        "a/./b",
        "a/../b",
        "..",
        ".",
        "../../x",
        "a b",
        "a+b",
        "a%2Fb",
        "a%b",
        "100%",
        "\u00e9\u4e2d\U0001f600",
        "&<>\"'",
        "a?b=c&d#e",
        "a\tb\nc",
        "k" * 1024,
        "\u00e9" * 512,
        "a/" * 512,
        "_",
        "-",
        "~",
        "a\\b",
        "x" * 255 + "/y",
        "x" * 256 + "/y",
    ],
)
def test_keys_of_any_kind(s3: S3, bucket: str, key: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    assert [each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]] == [key]
    client.delete_object(Bucket=bucket, Key=key)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=bucket, Key=key)


def test_a_key_is_too_long(s3: S3, bucket: str) -> None:
    with refused(400, "KeyTooLongError"):
        s3.client().put_object(Bucket=bucket, Key="k" * 1025, Body=b"")


def test_similar_keys_stand_beside_each_other(s3: S3, bucket: str) -> None:
    client = s3.client()
    keys = ["a", "a/", "a/b", "a//b", "/a", "//a", "a/b/", "a/./b", "./a", "../a"]
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    for key in keys:
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    for key in keys:
        client.delete_object(Bucket=bucket, Key=key)
        rest = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        assert key not in [each["Key"] for each in rest]
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize(
    ("asked", "body", "told"),
    [
        ("bytes=4-7", b"4567", "bytes 4-7/10"),
        ("bytes=4-", b"456789", "bytes 4-9/10"),
        ("bytes=-3", b"789", "bytes 7-9/10"),
        ("bytes=-20", b"0123456789", "bytes 0-9/10"),
        ("bytes=0-0", b"0", "bytes 0-0/10"),
        ("bytes=9-9", b"9", "bytes 9-9/10"),
        ("bytes=8-1000", b"89", "bytes 8-9/10"),
        ("bytes=0-1,3-4", b"0123456789", None),
        ("bytes=5-4", b"0123456789", None),
        ("bytes=a-b", b"0123456789", None),
        ("lines=1-2", b"0123456789", None),
        ("bytes=", b"0123456789", None),
    ],
)
def test_ranges(s3: S3, bucket: str, asked: str, body: bytes, told: str | None) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"0123456789")
    got = client.get_object(Bucket=bucket, Key="a", Range=asked)
    head = client.head_object(Bucket=bucket, Key="a", Range=asked)
    assert got["Body"].read() == body
    for each in (got, head):
        assert each.get("ContentRange") == told
        assert each["ContentLength"] == len(body)
        assert each["ResponseMetadata"]["HTTPStatusCode"] == (206 if told else 200)


@pytest.mark.parametrize(
    ("size", "asked"),
    [
        (10, "bytes=10-"),
        (10, "bytes=40-50"),
        (0, "bytes=0-9"),
        (10, "bytes=-0"),
        (0, "bytes=-5"),
        (0, "bytes=0-"),
    ],
)
def test_ranges_outside(s3: S3, bucket: str, size: int, asked: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x" * size)
    with refused(416, "InvalidRange") as error:
        client.get_object(Bucket=bucket, Key="a", Range=asked)
    assert error.response["ResponseMetadata"]["HTTPHeaders"]["content-range"] == f"bytes */{size}"
    assert error.response["Error"]["ActualObjectSize"] == str(size)
    with refused(416, "416"):
        client.head_object(Bucket=bucket, Key="a", Range=asked)


def test_what_came_whole_is_one_part(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"0123")
    got = client.get_object(Bucket=bucket, Key="a", PartNumber=1)
    assert (got["Body"].read(), got["ContentRange"]) == (b"0123", "bytes 0-3/4")
    assert "PartsCount" not in got
    assert client.head_object(Bucket=bucket, Key="a", PartNumber=1)["ContentLength"] == 4
    with refused(400, "InvalidPart"):
        client.get_object(Bucket=bucket, Key="a", PartNumber=2)
    with refused(400, "InvalidRequest"):
        client.get_object(Bucket=bucket, Key="a", PartNumber=1, Range="bytes=0-1")


def test_an_empty_object(s3: S3, bucket: str) -> None:
    client = s3.client()
    assert client.put_object(Bucket=bucket, Key="a", Body=b"")["ETag"] == f'"{NOWHERE}"'
    got = client.get_object(Bucket=bucket, Key="a")
    assert (got["Body"].read(), got["ContentLength"]) == (b"", 0)
    assert client.head_object(Bucket=bucket, Key="a")["ContentLength"] == 0


def test_headers_of_the_answer_as_asked(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x")
    got = client.get_object(
        Bucket=bucket,
        Key="a",
        ResponseCacheControl="no-cache",
        ResponseContentDisposition="bla",
        ResponseContentEncoding="aaa",
        ResponseContentLanguage="esperanto",
        ResponseContentType="foo/bar",
        ResponseExpires=datetime(2035, 1, 1, tzinfo=UTC),
    )
    assert got["CacheControl"] == "no-cache"
    assert got["ContentDisposition"] == "bla"
    assert got["ContentEncoding"] == "aaa"
    assert got["ContentLanguage"] == "esperanto"
    assert got["ContentType"] == "foo/bar"
    assert got["ExpiresString"] == "Mon, 01 Jan 2035 00:00:00 GMT"


def test_types_come_from_names(s3: S3, bucket: str) -> None:
    client = s3.client()
    for key, wanted in {"a.html": "text/html", "a.json": "application/json", "a": None}.items():
        client.put_object(Bucket=bucket, Key=key, Body=b"")
        got = client.head_object(Bucket=bucket, Key=key)
        assert got["ContentType"] == (wanted or "binary/octet-stream")


# --- conditions


def _conditional(s3: S3, bucket: str, **asked: Any) -> int:
    client = s3.client()
    statuses = set()
    for read in (client.get_object, client.head_object):
        try:
            status = read(Bucket=bucket, Key="a", **asked)["ResponseMetadata"]["HTTPStatusCode"]
        except ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        statuses.add(status)
    (status,) = statuses
    return int(status)


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"IfMatch": "same"}, 200),
        ({"IfMatch": "*"}, 200),
        ({"IfMatch": '"other"'}, 412),
        ({"IfNoneMatch": "same"}, 304),
        ({"IfNoneMatch": "*"}, 304),
        ({"IfNoneMatch": '"other"'}, 200),
        ({"IfModifiedSince": -SOON}, 200),
        ({"IfModifiedSince": timedelta(0)}, 304),
        ({"IfUnmodifiedSince": -SOON}, 412),
        ({"IfUnmodifiedSince": SOON}, 200),
        ({"IfUnmodifiedSince": timedelta(0)}, 200),
        ({"IfMatch": "same", "IfUnmodifiedSince": -SOON}, 200),
        ({"IfMatch": '"other"', "IfUnmodifiedSince": SOON}, 412),
        ({"IfNoneMatch": "same", "IfModifiedSince": -SOON}, 304),
        ({"IfNoneMatch": '"other"', "IfModifiedSince": timedelta(0)}, 200),
        ({"IfMatch": "same", "IfNoneMatch": "same"}, 304),
        ({"IfMatch": "same", "Range": "bytes=0-0"}, 206),
        ({"IfMatch": '"other"', "Range": "bytes=7-9"}, 412),
        ({"IfNoneMatch": "same", "Range": "bytes=7-9"}, 304),
    ],
)
def test_conditions_of_reads(s3: S3, bucket: str, asked: dict[str, Any], status: int) -> None:
    put = s3.client().put_object(Bucket=bucket, Key="a", Body=b"abc")
    modified = s3.client().head_object(Bucket=bucket, Key="a")["LastModified"]
    for name, value in asked.items():
        if value == "same":
            asked = asked | {name: put["ETag"]}
        elif isinstance(value, timedelta):
            asked = asked | {name: modified + value}
    assert _conditional(s3, bucket, **asked) == status


def test_not_modified_says_what_it_is(s3: S3, bucket: str) -> None:
    put = s3.client().put_object(Bucket=bucket, Key="a", Body=b"abc", CacheControl="no-cache")
    told = ask(s3, "GET", f"/{bucket}/a", headers={"If-None-Match": put["ETag"]})
    assert (told.status, told.body) == (304, b"")
    assert told.headers["etag"] == put["ETag"]
    assert told.headers["cache-control"] == "no-cache"
    assert "last-modified" in told.headers


def test_if_range_is_not_looked_at(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"0123456789")
    asked = {"Range": "bytes=2-3", "If-Range": '"other"'}
    told = ask(s3, "GET", f"/{bucket}/a", headers=asked)
    assert (told.status, told.body) == (206, b"23")


def test_conditions_of_puts(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchKey"):
        client.put_object(Bucket=bucket, Key="a", Body=b"0", IfMatch='"other"')
    with refused(404, "NoSuchKey"):
        client.put_object(Bucket=bucket, Key="a", Body=b"0", IfMatch="*")
    tag = client.put_object(Bucket=bucket, Key="a", Body=b"1", IfNoneMatch="*")["ETag"]
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="a", Body=b"2", IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="a", Body=b"2", IfNoneMatch=tag)
    with refused(412, "PreconditionFailed"):
        client.put_object(Bucket=bucket, Key="a", Body=b"2", IfMatch='"other"')
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"1"
    client.put_object(Bucket=bucket, Key="a", Body=b"3", IfMatch=tag)
    client.put_object(Bucket=bucket, Key="a", Body=b"4", IfNoneMatch=tag)
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"4"


def test_a_delete_marker_is_nothing_to_match(s3: S3, kept: str) -> None:
    client = s3.client()
    client.put_object(Bucket=kept, Key="a", Body=b"1", IfNoneMatch="*")
    client.delete_object(Bucket=kept, Key="a")
    with refused(404, "NoSuchKey"):
        client.put_object(Bucket=kept, Key="a", Body=b"0", IfMatch="*")
    client.put_object(Bucket=kept, Key="a", Body=b"2", IfNoneMatch="*")
    assert client.get_object(Bucket=kept, Key="a")["Body"].read() == b"2"


def test_one_of_many_creators_wins(s3: S3, either_bucket: str) -> None:
    bodies = [b"%d" % n * 5000 for n in range(8)]
    for round_ in range(5):
        key = f"race/{round_}"
        gate = threading.Barrier(len(bodies))
        with ThreadPoolExecutor(len(bodies)) as pool:
            results = [*pool.map(partial(_create, s3, gate, either_bucket, key), bodies)]
        assert results.count("created") == 1
        assert results.count("412 PreconditionFailed") == len(bodies) - 1
        got = s3.client().get_object(Bucket=either_bucket, Key=key)["Body"].read()
        assert got == bodies[results.index("created")]


def _create(s3: S3, gate: threading.Barrier, bucket: str, key: str, body: bytes) -> str:
    gate.wait()
    try:
        s3.client().put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
    except ClientError as error:
        status, code = code_of(error)
        return f"{status} {code}"
    return "created"


def test_one_of_many_writers_wins(s3: S3, either_bucket: str) -> None:
    """Those that saw the same object: If-Match."""
    tag = s3.client().put_object(Bucket=either_bucket, Key="a", Body=b"first")["ETag"]
    gate = threading.Barrier(6)

    def write(body: bytes) -> str:
        gate.wait()
        try:
            s3.client().put_object(Bucket=either_bucket, Key="a", Body=body, IfMatch=tag)
        except ClientError as error:
            return code_of(error)[1]
        return "written"

    bodies = [b"%d" % n * 3000 for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        results = [*pool.map(write, bodies)]
    assert sorted(results) == ["PreconditionFailed"] * 5 + ["written"]
    got = s3.client().get_object(Bucket=either_bucket, Key="a")["Body"].read()
    assert got == bodies[results.index("written")]


def test_conditions_of_deletes(s3: S3, either_bucket: str) -> None:
    client = s3.client()
    tag = client.put_object(Bucket=either_bucket, Key="a", Body=b"abc")["ETag"]
    modified = client.head_object(Bucket=either_bucket, Key="a")["LastModified"]
    for asked in (
        {"IfMatch": '"other"'},
        {"IfMatchSize": 4},
        {"IfMatchLastModifiedTime": modified - SOON},
        {"IfMatch": tag, "IfMatchSize": 4},
    ):
        with refused(412, "PreconditionFailed"):
            client.delete_object(Bucket=either_bucket, Key="a", **asked)
    client.delete_object(
        Bucket=either_bucket, Key="a", IfMatch=tag, IfMatchSize=3, IfMatchLastModifiedTime=modified
    )
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=either_bucket, Key="a")
    client.delete_object(Bucket=either_bucket, Key="a", IfMatch=tag)


def test_conditions_of_deletes_where_versions_are_kept(s3: S3, kept: str) -> None:
    """Nothing meets any condition and gets no delete marker; a delete marker has no tag."""
    client = s3.client()
    assert "DeleteMarker" not in client.delete_object(Bucket=kept, Key="a", IfMatch="other")
    assert "DeleteMarkers" not in client.list_object_versions(Bucket=kept)
    tag = client.put_object(Bucket=kept, Key="a", Body=b"abc")["ETag"]
    assert client.delete_object(Bucket=kept, Key="a", IfMatch=tag)["DeleteMarker"]
    old = datetime(2015, 1, 1, tzinfo=UTC)
    for asked in ({"IfMatch": tag}, {"IfMatchSize": 3}, {"IfMatchLastModifiedTime": old}):
        with refused(412, "PreconditionFailed"):
            client.delete_object(Bucket=kept, Key="a", **asked)
    told = client.delete_objects(Bucket=kept, Delete={"Objects": [{"Key": "a", "ETag": tag}]})
    assert [error["Code"] for error in told["Errors"]] == ["PreconditionFailed"]
    client.delete_object(Bucket=kept, Key="a", IfMatch="*")


# --- what is not there


def test_errors_of_reads(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchKey") as error:
        client.get_object(Bucket=bucket, Key="none")
    assert error.response["Error"]["Key"] == "none"
    with refused(404, "404"):
        client.head_object(Bucket=bucket, Key="none")
    with refused(404, "NoSuchBucket"):
        client.get_object(Bucket="never-made-bucket", Key="a")
    with refused(404, "NoSuchBucket"):
        client.put_object(Bucket="never-made-bucket", Key="a", Body=b"")
    with refused(404, "NoSuchBucket"):
        client.delete_object(Bucket="never-made-bucket", Key="a")
    told = ask(s3, "HEAD", f"/{bucket}/none")
    assert (told.status, told.body) == (404, b"")
    client.delete_object(Bucket=bucket, Key="none")


def test_who_may_not(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    for user in ("alt", None):
        client = s3.client(user)
        refuse: Callable[[Any], object]
        for refuse in (
            lambda c: c.get_object(Bucket=bucket, Key="a"),
            lambda c: c.get_object(Bucket=bucket, Key="none"),
            lambda c: c.put_object(Bucket=bucket, Key="a", Body=b"y"),
            lambda c: c.delete_object(Bucket=bucket, Key="a"),
            lambda c: c.get_object_tagging(Bucket=bucket, Key="a"),
        ):
            with refused(403, "AccessDenied"):
                refuse(client)
    assert s3.client().get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"


def test_another_owner_is_expected(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"x", ExpectedBucketOwner="main")
    with refused(403, "AccessDenied"):
        client.put_object(Bucket=bucket, Key="a", Body=b"y", ExpectedBucketOwner="alt")
    with refused(403, "AccessDenied"):
        client.list_objects_v2(Bucket=bucket, ExpectedBucketOwner="alt")


# --- versions


def test_versions_of_a_key(s3: S3, kept: str) -> None:
    client = s3.client()
    first = client.put_object(Bucket=kept, Key="a", Body=b"1")["VersionId"]
    second = client.put_object(Bucket=kept, Key="a", Body=b"2")["VersionId"]
    got = client.get_object(Bucket=kept, Key="a")
    assert (got["Body"].read(), got["VersionId"]) == (b"2", second)
    got = client.get_object(Bucket=kept, Key="a", VersionId=first)
    assert (got["Body"].read(), got["VersionId"]) == (b"1", first)
    assert client.head_object(Bucket=kept, Key="a", VersionId=first)["VersionId"] == first
    done = client.delete_object(Bucket=kept, Key="a")
    assert done["DeleteMarker"] is True
    marker = done["VersionId"]
    with refused(404, "NoSuchKey") as error:
        client.get_object(Bucket=kept, Key="a")
    headers = error.response["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-amz-delete-marker"] == "true"
    assert headers["x-amz-version-id"] == marker
    with refused(405, "MethodNotAllowed") as error:
        client.get_object(Bucket=kept, Key="a", VersionId=marker)
    headers = error.response["ResponseMetadata"]["HTTPHeaders"]
    assert headers["allow"] == "DELETE"
    assert headers["x-amz-delete-marker"] == "true"
    assert "last-modified" in headers
    with refused(405, "405"):
        client.head_object(Bucket=kept, Key="a", VersionId=marker)
    with refused(404, "404") as error:
        client.head_object(Bucket=kept, Key="b")
    headers = error.response["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-amz-delete-marker"] == "false"
    with refused(404, "NoSuchVersion"):
        client.get_object(Bucket=kept, Key="b", VersionId=first)
    with refused(400, "InvalidArgument"):
        client.get_object(Bucket=kept, Key="a", VersionId="no-version")
    done = client.delete_object(Bucket=kept, Key="a", VersionId=marker)
    assert (done["DeleteMarker"], done["VersionId"]) == (True, marker)
    assert client.get_object(Bucket=kept, Key="a")["Body"].read() == b"2"
    done = client.delete_object(Bucket=kept, Key="a", VersionId=second)
    assert done["VersionId"] == second
    assert "DeleteMarker" not in done
    assert client.get_object(Bucket=kept, Key="a")["Body"].read() == b"1"
    with refused(404, "NoSuchVersion"):
        client.get_object(Bucket=kept, Key="a", VersionId=second)


def test_the_null_version(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"0")
    versioned(s3, bucket)
    assert client.get_object(Bucket=bucket, Key="a")["VersionId"] == "null"
    client.put_object(Bucket=bucket, Key="a", Body=b"1")
    assert client.get_object(Bucket=bucket, Key="a", VersionId="null")["Body"].read() == b"0"
    versioned(s3, bucket, "Suspended")
    assert "VersionId" not in client.put_object(Bucket=bucket, Key="a", Body=b"2")
    assert len(client.list_object_versions(Bucket=bucket)["Versions"]) == 2
    done = client.delete_object(Bucket=bucket, Key="a")
    assert (done["DeleteMarker"], done["VersionId"]) == (True, "null")
    client.delete_object(Bucket=bucket, Key="a", VersionId="null")
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"1"


# --- deleting many


def test_many_are_deleted(s3: S3, bucket: str) -> None:
    client = s3.client()
    keys = [f"k{n}" for n in range(5)]
    for key in keys:
        client.put_object(Bucket=bucket, Key=key, Body=b"")
    wanted = [{"Key": key} for key in [*keys, "none", keys[0]]]
    done = client.delete_objects(Bucket=bucket, Delete={"Objects": wanted})
    assert [each["Key"] for each in done["Deleted"]] == [*keys, "none", keys[0]]
    assert "Errors" not in done
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)


def test_many_quietly(s3: S3, bucket: str) -> None:
    client = s3.client()
    tag = client.put_object(Bucket=bucket, Key="a", Body=b"")["ETag"]
    client.put_object(Bucket=bucket, Key="b", Body=b"")
    wanted = [{"Key": "a", "ETag": tag}, {"Key": "b", "ETag": '"other"'}]
    done = client.delete_objects(Bucket=bucket, Delete={"Objects": wanted, "Quiet": True})
    assert "Deleted" not in done
    assert [(each["Key"], each["Code"]) for each in done["Errors"]] == [("b", "PreconditionFailed")]
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_many_of_versions(s3: S3, kept: str) -> None:
    client = s3.client()
    first = client.put_object(Bucket=kept, Key="a", Body=b"1")["VersionId"]
    done = client.delete_objects(Bucket=kept, Delete={"Objects": [{"Key": "a"}, {"Key": "b"}]})
    markers = [each["DeleteMarkerVersionId"] for each in done["Deleted"]]
    assert [each["DeleteMarker"] for each in done["Deleted"]] == [True, True]
    assert "VersionId" not in done["Deleted"][0]
    wanted = [
        {"Key": "a", "VersionId": first},
        {"Key": "a", "VersionId": markers[0]},
        {"Key": "b", "VersionId": markers[1]},
        {"Key": "c", "VersionId": "no-version"},
    ]
    done = client.delete_objects(Bucket=kept, Delete={"Objects": wanted})
    told = [(each["VersionId"], each.get("DeleteMarkerVersionId")) for each in done["Deleted"]]
    assert told == [(first, None), (markers[0], markers[0]), (markers[1], markers[1])]
    assert [each["Code"] for each in done["Errors"]] == ["InvalidArgument"]
    page = client.list_object_versions(Bucket=kept)
    assert "Versions" not in page
    assert "DeleteMarkers" not in page


def test_many_by_who_may_not(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"")
    wanted = {"Bucket": bucket, "Delete": {"Objects": [{"Key": "a"}]}}
    done = s3.client("alt").delete_objects(**wanted)
    assert [(each["Key"], each["Code"]) for each in done["Errors"]] == [("a", "AccessDenied")]
    with refused(403, "AccessDenied"):
        s3.client(None).delete_objects(**wanted)
    assert s3.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_too_many(s3: S3, bucket: str) -> None:
    wanted = [{"Key": f"k{n}"} for n in range(1001)]
    with refused(400, "MalformedXML"):
        s3.client().delete_objects(Bucket=bucket, Delete={"Objects": wanted})
    done = s3.client().delete_objects(Bucket=bucket, Delete={"Objects": wanted[:1000]})
    assert len(done["Deleted"]) == 1000
    told = ask(s3, "POST", f"/{bucket}?delete", b"<Delete></Delete>")
    assert (told.status, told.code) == (400, "MalformedXML")
    told = ask(s3, "POST", f"/{bucket}?delete", b"no document")
    assert (told.status, told.code) == (400, "MalformedXML")


# --- bodies


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
@pytest.mark.parametrize("size", [0, 5, 300_000])
def test_checksums(s3: S3, bucket: str, algorithm: str, size: int) -> None:
    client = s3.client()
    body = b"\xa5" * size
    put = client.put_object(Bucket=bucket, Key="a", Body=body, ChecksumAlgorithm=algorithm)
    value = put[f"Checksum{algorithm}"]
    assert put["ChecksumType"] == "FULL_OBJECT"
    got = client.get_object(Bucket=bucket, Key="a", ChecksumMode="ENABLED")
    assert got["Body"].read() == body
    assert got[f"Checksum{algorithm}"] == value
    assert got["ChecksumType"] == "FULL_OBJECT"
    head = client.head_object(Bucket=bucket, Key="a")
    assert f"Checksum{algorithm}" not in head
    told = client.get_object_attributes(
        Bucket=bucket, Key="a", ObjectAttributes=["Checksum", "ETag", "ObjectSize"]
    )
    assert told["Checksum"] == {f"Checksum{algorithm}": value, "ChecksumType": "FULL_OBJECT"}
    assert told["ObjectSize"] == size
    if algorithm == "SHA256":
        assert value == base64.b64encode(hashlib.sha256(body).digest()).decode()


def test_a_checksum_is_wrong(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(400, "BadDigest"):
        client.put_object(Bucket=bucket, Key="a", Body=b"x", ChecksumSHA256="A" * 43 + "=")
    with refused(400, "BadDigest"):
        client.put_object(Bucket=bucket, Key="a", Body=b"x", ChecksumSHA256="bad")
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("rL0Y20zC+Fzt72VPzMSk2A==", "BadDigest"),
        ("YWJyYWNhZGFicmE=", "InvalidDigest"),
        ("not base64 at all!", "InvalidDigest"),
    ],
)
def test_a_digest_is_wrong(s3: S3, bucket: str, value: str, code: str) -> None:
    told = ask(s3, "PUT", f"/{bucket}/a", b"bar", {"Content-MD5": value})
    assert (told.status, told.code) == (400, code)
    assert s3.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_a_digest_is_right(s3: S3, bucket: str) -> None:
    body = b"z" * 500_000  # more than has its MD5 as tag by itself
    digest = hashlib.md5(body)
    value = base64.b64encode(digest.digest()).decode()
    told = ask(s3, "PUT", f"/{bucket}/a", body, {"Content-MD5": value})
    assert told.headers["etag"] == f'"{digest.hexdigest()}"'


def test_the_length_must_be_told(s3: S3, bucket: str) -> None:
    path = s3.client().generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "a"})
    with s3.connect() as peer:
        target = path.removeprefix(s3.endpoint)
        peer.sendall(f"PUT {target} HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\n\r\n".encode())
        answer = peer.recv(65536)
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert b"<Code>MissingContentLength</Code>" in answer


def test_a_body_that_breaks_off_leaves_nothing(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"old")
    path = s3.client().generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "a"})
    target = path.removeprefix(s3.endpoint)
    with s3.connect() as peer:
        head = f"PUT {target} HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\nContent-Length: 100\r\n\r\n"
        peer.sendall(head.encode() + b"short")
    time.sleep(0.2)
    assert s3.client().get_object(Bucket=bucket, Key="a")["Body"].read() == b"old"


def test_leave_is_given_to_go_on(s3: S3, bucket: str) -> None:
    path = s3.client().generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "a"})
    target = path.removeprefix(s3.endpoint)
    for body in (b"", b"abc"):
        with s3.connect() as peer:
            head = (
                f"PUT {target} HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\n"
                f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            peer.sendall(head.encode())
            told = peer.recv(1024)
            assert told.startswith(b"HTTP/1.1 100 ")
            peer.sendall(body)
            while b"\r\n\r\nHTTP/1.1 200 " not in told:  # may have come with the first
                part = peer.recv(65536)
                assert part, told
                told += part
        assert s3.client().get_object(Bucket=bucket, Key="a")["Body"].read() == body


@pytest.mark.parametrize("expected", ["", "200"])
def test_what_is_no_expectation_is_passed_over(s3: S3, bucket: str, expected: str) -> None:
    told = ask(s3, "PUT", f"/{bucket}/a", b"abc", unsigned={"Expect": expected})
    assert told.status == 200


def test_an_expectation_that_cannot_be_met(s3: S3, bucket: str) -> None:
    told = ask(s3, "PUT", f"/{bucket}/a", b"abc", unsigned={"Expect": "200-maybe"})
    assert (told.status, told.code) == (417, "ExpectationFailed")


def test_the_bucket_goes_meanwhile(s3: S3) -> None:
    bucket = s3.new_bucket()
    path = s3.client().generate_presigned_url("put_object", Params={"Bucket": bucket, "Key": "a"})
    target = path.removeprefix(s3.endpoint)
    with s3.connect() as peer:
        head = f"PUT {target} HTTP/1.1\r\nHost: {s3.host}:{s3.port}\r\nContent-Length: 3\r\n\r\n"
        peer.sendall(head.encode() + b"a")
        time.sleep(0.1)
        s3.client().delete_bucket(Bucket=bucket)
        peer.sendall(b"bc")
        answer = peer.recv(65536)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"<Code>NoSuchBucket</Code>" in answer


def test_what_is_said_is_too_much(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"", Metadata={"x": "y" * 2047})
    with refused(400, "MetadataTooLarge"):
        client.put_object(Bucket=bucket, Key="a", Body=b"", Metadata={"x": "y" * 2048})
    with refused(400, "InvalidStorageClass"):
        client.put_object(Bucket=bucket, Key="a", Body=b"", StorageClass="GLACIER")
    client.put_object(Bucket=bucket, Key="a", Body=b"", StorageClass="STANDARD")
    with refused(400, "InvalidArgument"):
        client.put_object(Bucket=bucket, Key="a", Body=b"", WebsiteRedirectLocation="x")
    with refused(501, "NotImplemented"):
        client.put_object(Bucket=bucket, Key="a", Body=b"", WriteOffsetBytes=0)


def test_metadata_of_other_scripts(s3: S3, bucket: str) -> None:
    headers = {"x-amz-meta-a": "=?UTF-8?B?" + base64.b64encode("Größe".encode()).decode() + "?="}
    ask(s3, "PUT", f"/{bucket}/a", b"", headers)
    told = ask(s3, "HEAD", f"/{bucket}/a")
    assert told.headers["x-amz-meta-a"] == headers["x-amz-meta-a"]


def test_metadata_is_replaced_with_the_object(s3: S3, bucket: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key="a", Body=b"", Metadata={"one": "1"}, CacheControl="x")
    client.put_object(Bucket=bucket, Key="a", Body=b"", Metadata={"two": ""})
    got = client.head_object(Bucket=bucket, Key="a")
    assert got["Metadata"] == {"two": ""}
    assert "CacheControl" not in got


def test_when_it_will_expire(s3: S3, bucket: str) -> None:
    client = s3.client()
    rule = {"ID": "r 1", "Status": "Enabled", "Filter": {"Prefix": "a"}, "Expiration": {"Days": 1}}
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [rule]}
    )
    told = [
        client.put_object(Bucket=bucket, Key="a", Body=b""),
        client.get_object(Bucket=bucket, Key="a"),
        client.head_object(Bucket=bucket, Key="a"),
        client.copy_object(Bucket=bucket, Key="ab", CopySource=f"{bucket}/a"),
    ]
    midnight = (datetime.now(UTC) + timedelta(days=2)).strftime("%a, %d %b %Y 00:00:00 GMT")
    for each in told:
        assert each["Expiration"] == f'expiry-date="{midnight}", rule-id="r%201"'
    assert "Expiration" not in client.put_object(Bucket=bucket, Key="b", Body=b"")


def test_what_is_asked_for_is_never_taken_for_another(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    for method, target, status, code in (
        ("GET", "a?torrent", 501, "NotImplemented"),
        ("PUT", "a?append&position=1", 501, "NotImplemented"),
        ("PUT", "a?torrent", 405, "MethodNotAllowed"),
        ("POST", "a", 405, "MethodNotAllowed"),
        ("PUT", "a?encryption", 501, "NotImplemented"),
        ("POST", "a?select&select-type=2", 501, "NotImplemented"),
    ):
        told = ask(s3, method, f"/{bucket}/{target}")
        assert (told.status, told.code) == (status, code), (method, target)
    assert s3.client().get_object(Bucket=bucket, Key="a")["Body"].read() == b"x"


def test_nothing_is_archived(s3: S3, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")
    with refused(403, "InvalidObjectState"):
        s3.client().restore_object(Bucket=bucket, Key="a", RestoreRequest={"Days": 1})
    with refused(404, "NoSuchKey"):
        s3.client().restore_object(Bucket=bucket, Key="b", RestoreRequest={"Days": 1})


def test_the_host_that_is_signed_is_the_host_that_is_served(s3: S3, bucket: str) -> None:
    """A target of absolute form names another host than the Host that a presigned URL is for."""
    client, pair = s3.client("main"), s3.users["main"]
    client.put_object(Bucket=bucket, Key="k", Body=b"secret")
    own = f"own-{bucket}"
    client.create_bucket(Bucket=own)
    client.put_object(Bucket=own, Key="k", Body=b"own")
    host, other = f"{own}.localhost:{s3.port}", f"{bucket}.localhost:{s3.port}"
    url = presign(
        "GET",
        f"http://{host}",
        b"/k",
        pair.access_key,
        pair.secret,
        region=REGION,
        now=time.time(),
        expires_s=60,
    )
    query = url.partition("?")[2]

    def fetched(target: str) -> bytes:
        head = f"GET {target}?{query} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        return s3.exchange(head.encode())

    assert fetched("/k").endswith(b"own")
    assert fetched(f"http://{host}/k").endswith(b"own")
    for target in (f"http://{other}/k", f"http://127.0.0.1:{s3.port}/{bucket}/k"):
        assert b"<Code>SignatureDoesNotMatch</Code>" in fetched(target)
    client.delete_object(Bucket=own, Key="k")
    client.delete_bucket(Bucket=own)
