"""Access logs that are delivered into buckets."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from s3api.log_delivery import key_of
from tests.cluster.waiting import wait_until
from tests.integration.s3 import S3, refused, serving


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving("--s3-log-delivery-s", "1") as made:
        made.add_user("main")
        made.add_user("alt")
        yield made


def switch_on(client: Any, source: str, target: str, **more: object) -> None:
    wanted = {"TargetBucket": target, "TargetPrefix": "logs/", **more}
    client.put_bucket_logging(Bucket=source, BucketLoggingStatus={"LoggingEnabled": wanted})


def delivered(client: Any, target: str) -> list[str]:
    """All lines, of all log objects."""
    found = []
    for each in client.list_objects_v2(Bucket=target).get("Contents", ()):
        body = client.get_object(Bucket=target, Key=each["Key"])["Body"].read()
        found += body.decode().splitlines()
    return found


def test_what_is_asked_of_a_bucket_is_delivered(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    client.put_object(Bucket=source, Key="before", Body=b"x")
    switch_on(client, source, target)
    client.put_object(Bucket=source, Key="a b", Body=b"hello")
    client.get_object(Bucket=source, Key="a b")["Body"].read()
    with refused(404, "NoSuchKey"):
        client.get_object(Bucket=source, Key="none")
    client.put_object(Bucket=target, Key="of-the-target", Body=b"x")
    client.delete_object(Bucket=target, Key="of-the-target")
    pattern = re.compile(rf"main {source} .* (REST\.\S+) (\S+) .* HTTP/1.1\" (\d+) ")
    wanted = {
        ("REST.PUT.OBJECT", "a%20b", "200"),
        ("REST.GET.OBJECT", "a%20b", "200"),
        ("REST.GET.OBJECT", "none", "404"),
    }

    def told() -> set[tuple[str, ...]]:
        lines = [pattern.match(each) for each in delivered(client, target)]
        return {each.groups() for each in lines if each}

    wait_until(lambda: wanted <= told(), "all lines are there")
    assert not any(" before " in each or target in each for each in delivered(client, target))
    (key, *_) = (each["Key"] for each in client.list_objects_v2(Bucket=target)["Contents"])
    assert re.fullmatch(r"logs/\d{4}(-\d\d){5}-[0-9A-F]{16}", key)
    kept = client.get_bucket_logging(Bucket=source)["LoggingEnabled"]
    assert kept == {"TargetBucket": target, "TargetPrefix": "logs/"}
    client.put_bucket_logging(Bucket=source, BucketLoggingStatus={})
    assert "LoggingEnabled" not in client.get_bucket_logging(Bucket=source)


def test_where_logs_cannot_go(server: S3) -> None:
    client, source = server.client(), server.new_bucket()
    others, locked = server.new_bucket("alt"), server.new_bucket(ObjectLockEnabledForBucket=True)
    for target in ("there-is-none", "No Name", others, locked):
        with refused(400, "InvalidTargetBucketForLogging"):
            switch_on(client, source, target)
    with refused(403, "AccessDenied"):
        switch_on(server.client("alt"), source, others)
    with refused(501, "NotImplemented"):
        grantee = {"Type": "CanonicalUser", "ID": "alt"}
        grants = [{"Grantee": grantee, "Permission": "READ"}]
        switch_on(client, source, source, TargetGrants=grants)
    assert "LoggingEnabled" not in client.get_bucket_logging(Bucket=source)


def test_an_orderly_end_delivers_what_was_gathered() -> None:
    with serving("--s3-log-delivery-s", "3600") as s3:
        client = s3.client("admin")
        (s3.mount / "target").mkdir()
        switch_on(client, "target", "target")
        client.put_object(Bucket="target", Key="k", Body=b"x")
        s3.node.down()
        s3.node.up()
        found = list((s3.mount / "target" / "logs").iterdir())
        assert any(" REST.PUT.OBJECT k " in each.read_text() for each in found)


@pytest.mark.parametrize(
    ("source", "stamp"),
    [("DeliveryTime", "2026-11-23-09-08-07-X"), ("EventTime", "2026-11-23-00-00-00-X")],
)
def test_partitioned_keys(source: str, stamp: str) -> None:
    wanted = {
        "TargetPrefix": "p/",
        "TargetObjectKeyFormat": {"PartitionedPrefix": {"PartitionDateSource": source}},
    }
    key = key_of(wanted, "main", "us-east-1", "bucket", 1795424887, lambda: "X")
    assert key == f"p/main/us-east-1/bucket/2026/11/23/{stamp}"
