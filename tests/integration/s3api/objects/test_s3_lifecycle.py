"""Lifecycle rules: what is taken, and that they are carried out, with days of a second."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.s3 import S3, refused, serving

DAY_S = 1
Json = dict[str, Any]


@pytest.fixture(scope="module")
def quick() -> Iterator[S3]:
    """A server of its own, whose days are short."""
    with serving("--s3-workers", "2", "--s3-lifecycle-day-s", str(DAY_S)) as server:
        server.add_user("main")
        yield server


def put(client: Any, bucket: str, *rules: Json) -> None:
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": list(rules)}
    )


def rule(name: str, prefix: str = "", **actions: object) -> Json:
    return {"ID": name, "Filter": {"Prefix": prefix}, "Status": "Enabled", **actions}


def keys(client: Any, bucket: str) -> list[str]:
    listed = client.list_objects_v2(Bucket=bucket)
    return [each["Key"] for each in listed.get("Contents", [])]


def versions(client: Any, bucket: str) -> tuple[int, int]:
    """Versions and delete markers."""
    listed = client.list_object_versions(Bucket=bucket)
    return len(listed.get("Versions", [])), len(listed.get("DeleteMarkers", []))


def eventually(holds: Callable[[], bool]) -> None:
    """Within some days, and as many more as a busy machine takes."""
    wait_until(holds, "the rules are carried out")


def test_rules_are_put_read_and_deleted(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchLifecycleConfiguration"):
        client.get_bucket_lifecycle_configuration(Bucket=bucket)
    rules = [
        {"ID": "a", "Prefix": "test1/", "Status": "Enabled", "Expiration": {"Days": 31}},
        {"ID": "b", "Prefix": "test2/", "Status": "Disabled", "Expiration": {"Days": 120}},
        {
            "ID": "c",
            "Filter": {
                "And": {"Prefix": "x", "Tags": [{"Key": "k", "Value": "v"}]},
            },
            "Status": "Enabled",
            "Expiration": {"Date": datetime(2030, 9, 27, tzinfo=UTC)},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 2, "NewerNoncurrentVersions": 5},
        },
        rule("d", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 4}),
        rule("e", Expiration={"ExpiredObjectDeleteMarker": True}),
    ]
    put(client, bucket, *rules)
    assert client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == rules
    put(client, bucket, {"Prefix": "", "Status": "Enabled", "Expiration": {"Days": 1}})
    (found,) = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert found["ID"]
    client.delete_bucket_lifecycle(Bucket=bucket)
    with refused(404, "NoSuchLifecycleConfiguration"):
        client.get_bucket_lifecycle_configuration(Bucket=bucket)


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"Expiration": {"Days": 0}}, 400, "InvalidArgument"),
        ({"ID": "a" * 256}, 400, "InvalidArgument"),
        ({"Status": "enabled"}, 400, "MalformedXML"),
        ({"Status": "invalid"}, 400, "MalformedXML"),
        ({"Expiration": {"Date": datetime(2030, 1, 1, 5, tzinfo=UTC)}}, 400, "InvalidArgument"),
        ({"Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}, 501, "NotImplemented"),
        ({"Transitions": [{"Date": 20220927, "StorageClass": "GLACIER"}]}, 400, "InvalidArgument"),
    ],
)
def test_rules_that_are_refused(s3: S3, bucket: str, changes: Json, status: int, code: str) -> None:
    with refused(status, code):
        put(s3.client(), bucket, rule("one", Expiration={"Days": 1}) | changes)
    with refused(400, "InvalidArgument"):
        put(s3.client(), bucket, *[rule("same", Expiration={"Days": 1})] * 2)


def test_the_end_of_an_object_is_announced(s3: S3, bucket: str) -> None:
    client = s3.client()
    put(client, bucket, rule("one", "doomed/", Expiration={"Days": 1}))
    told = client.put_object(Bucket=bucket, Key="doomed/a", Body=b"x")["Expiration"]
    assert 'rule-id="one"' in told
    assert client.head_object(Bucket=bucket, Key="doomed/a")["Expiration"] == told
    assert "Expiration" not in client.put_object(Bucket=bucket, Key="kept/a", Body=b"x")


def test_objects_expire_by_prefix_tag_and_size(quick: S3) -> None:
    client, bucket = quick.client(), quick.new_bucket()
    for key, size, tags in (
        ("expire/a", 1, ""),
        ("kept/a", 1, ""),
        ("later/a", 1, ""),
        ("past/a", 1, ""),
        ("size/large", 2001, ""),
        ("size/small", 2000, ""),
        ("tag/other", 1, "tom=other"),
        ("tag/tom", 1, "a=b&tom=sawyer"),
    ):
        client.put_object(Bucket=bucket, Key=key, Body=b"x" * size, Tagging=tags)
    of_mount = quick.mount / bucket / "expire" / "from-the-mount"
    of_mount.write_text("x")
    tag = {"Key": "tom", "Value": "sawyer"}
    put(
        client,
        bucket,
        rule("prefix", "expire/", Expiration={"Days": 1}),
        rule("off", "kept/", Expiration={"Days": 1}) | {"Status": "Disabled"},
        rule("tag", Expiration={"Days": 1}) | {"Filter": {"Tag": tag}},
        rule("size", Expiration={"Days": 1}) | {"Filter": {"ObjectSizeGreaterThan": 2000}},
        rule("later", "later/", Expiration={"Days": 1000}),
        rule("date", "past/", Expiration={"Date": datetime(2020, 1, 1, tzinfo=UTC)}),
    )
    left = ["kept/a", "later/a", "size/small", "tag/other"]
    eventually(lambda: keys(client, bucket) == left)
    # A list has the commit, of which the kernel is told just after.
    eventually(lambda: not of_mount.exists())
    time.sleep(2 * DAY_S)
    assert keys(client, bucket) == left


def test_versions_and_delete_markers(quick: S3) -> None:
    client, bucket = quick.client(), quick.new_bucket()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for number in range(5):
        client.put_object(Bucket=bucket, Key="many", Body=b"%d" % number)
    client.put_object(Bucket=bucket, Key="current/a", Body=b"x")
    put(
        client,
        bucket,
        rule(
            "noncurrent",
            "many",
            NoncurrentVersionExpiration={"NoncurrentDays": 1, "NewerNoncurrentVersions": 2},
        ),
        rule("current", "current/", Expiration={"Days": 1}),
    )
    # The current one and the two newest of the others; the expired one behind its marker.
    eventually(lambda: versions(client, bucket) == (4, 1))
    assert client.get_object(Bucket=bucket, Key="many")["Body"].read() == b"4"
    assert keys(client, bucket) == ["many"]
    put(
        client,
        bucket,
        rule("noncurrent", NoncurrentVersionExpiration={"NoncurrentDays": 1}),
        rule("markers", Expiration={"ExpiredObjectDeleteMarker": True}),
    )
    eventually(lambda: versions(client, bucket) == (1, 0))
    assert keys(client, bucket) == ["many"]


def test_more_versions_than_a_page_has(quick: S3) -> None:
    client, bucket = quick.client(), quick.new_bucket()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for number in range(150):
        client.put_object(Bucket=bucket, Key="a", Body=b"%d" % number)
        client.put_object(Bucket=bucket, Key="b", Body=b"%d" % number)
    end = {"NoncurrentDays": 1, "NewerNoncurrentVersions": 60}
    put(client, bucket, rule("noncurrent", NoncurrentVersionExpiration=end))
    eventually(lambda: versions(client, bucket) == (122, 0))
    time.sleep(2 * DAY_S)
    assert versions(client, bucket) == (122, 0)


def test_locked_versions_stay(quick: S3) -> None:
    client, bucket = quick.client(), quick.new_bucket(ObjectLockEnabledForBucket=True)
    client.put_object(Bucket=bucket, Key="a", Body=b"1", ObjectLockLegalHoldStatus="ON")
    client.put_object(Bucket=bucket, Key="a", Body=b"2")
    client.put_object(Bucket=bucket, Key="a", Body=b"3")
    put(client, bucket, rule("all", NoncurrentVersionExpiration={"NoncurrentDays": 1}))
    eventually(lambda: versions(client, bucket) == (2, 0))
    time.sleep(2 * DAY_S)
    assert versions(client, bucket) == (2, 0)


def test_uploads_are_aborted(quick: S3) -> None:
    client, bucket = quick.client(), quick.new_bucket()
    for key in ("doomed/a", "kept/a"):
        upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x")

    def left() -> list[str]:
        listed = client.list_multipart_uploads(Bucket=bucket)
        return [each["Key"] for each in listed.get("Uploads", [])]

    assert left() == ["doomed/a", "kept/a"]
    put(
        client,
        bucket,
        rule("abort", "doomed/", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 2}),
    )
    eventually(lambda: left() == ["kept/a"])


def test_when_an_upload_and_its_object_end_is_told(s3: S3, bucket: str) -> None:
    client, now = s3.client(), datetime.now(UTC)
    put(
        client,
        bucket,
        rule("later\r\nx: \xe9", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 9}),
        rule("abort", "a/", AbortIncompleteMultipartUpload={"DaysAfterInitiation": 2}),
        rule("end", "a/", Expiration={"Days": 3}),
    )
    begun = client.create_multipart_upload(Bucket=bucket, Key="a/b")
    assert begun["AbortRuleId"] == "abort"
    assert begun["AbortDate"].time() == datetime.min.time()
    assert 2 <= (begun["AbortDate"] - now).total_seconds() / 86_400 <= 3.1
    asked = {"Bucket": bucket, "Key": "a/b", "UploadId": begun["UploadId"]}
    tag = client.upload_part(PartNumber=1, Body=b"x", **asked)["ETag"]
    listed = client.list_parts(**asked)
    assert (listed["AbortDate"], listed["AbortRuleId"]) == (begun["AbortDate"], "abort")
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    done = client.complete_multipart_upload(MultipartUpload=parts, **asked)
    assert 'rule-id="end"' in done["Expiration"]
    assert client.head_object(Bucket=bucket, Key="a/b")["Expiration"] == done["Expiration"]
    other = client.create_multipart_upload(Bucket=bucket, Key="other")
    assert other["AbortRuleId"] == "later%0D%0Ax%3A%20%C3%A9"
    put(client, bucket, rule("end", Expiration={"Days": 3}))
    assert "AbortDate" not in client.create_multipart_upload(Bucket=bucket, Key="none")


def test_another_worker_takes_over(quick: S3) -> None:
    """Whichever worker carries the rules out: they are killed one after the other."""
    client, bucket = quick.client(), quick.new_bucket()
    put(client, bucket, rule("all", Expiration={"Days": 1}))
    for pid in quick.node.status()["s3"]["workers"]:
        os.kill(pid, signal.SIGKILL)
        time.sleep(1)
    fresh = quick.client("main", max_pool_connections=3)
    fresh.put_object(Bucket=bucket, Key="a", Body=b"x")
    eventually(lambda: keys(fresh, bucket) == [])
