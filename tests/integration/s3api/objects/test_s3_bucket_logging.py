"""Access logs that are delivered into buckets."""

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from s3api.server.log_delivery import key_of
from tests.cluster.waiting import wait_until
from tests.integration.s3 import S3, refused, serving
from tests.integration.s3_raw import ask


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


class Line(NamedTuple):
    """Of what the tests look at."""

    operation: str
    key: str
    status: str
    code: str
    version: str
    signature: str
    auth_type: str
    by_acl: str


def lines(client: Any, target: str, source: str) -> set[Line]:
    """What is delivered of one bucket."""
    found = set()
    for each in delivered(client, target):
        fields = shlex.split(each.replace("[", '"').replace("]", '"'))
        assert len(fields) == 26, each
        if fields[1] == source:
            found.add(Line(*(fields[at] for at in (6, 7, 9, 10, 17, 19, 21, 25))))
    return found


def test_each_key_that_is_deleted_with_others_has_a_line(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    client.put_bucket_versioning(Bucket=source, VersioningConfiguration={"Status": "Enabled"})
    version = client.put_object(Bucket=source, Key="a b", Body=b"x")["VersionId"]
    switch_on(client, source, target)
    wanted = [{"Key": "a b", "VersionId": version}, {"Key": "none"}, {"Key": "k" * 1025}]
    client.delete_objects(Bucket=source, Delete={"Objects": wanted, "Quiet": True})
    signed = ("SigV4", "AuthHeader", "-")
    told = {
        Line("REST.POST.MULTI_OBJECT_DELETE", "-", "200", "-", "-", *signed),
        Line("BATCH.DELETE.OBJECT", "a%20b", "204", "-", version, *signed),
        Line("BATCH.DELETE.OBJECT", "none", "204", "-", "-", *signed),
        Line("BATCH.DELETE.OBJECT", "k" * 1025, "400", "KeyTooLongError", "-", *signed),
    }
    wait_until(lambda: told <= lines(client, target, source), "all lines are there")


def test_the_source_of_a_copy_is_told_in_its_own_log(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    other, logs = server.new_bucket(), server.new_bucket()
    client.put_object(Bucket=source, Key="k", Body=b"x")
    switch_on(client, source, target)
    switch_on(client, other, logs)
    where = {"Bucket": source, "Key": "k"}
    client.copy_object(Bucket=other, Key="copy", CopySource=where)
    upload = client.create_multipart_upload(Bucket=other, Key="u")["UploadId"]
    part = {"Bucket": other, "Key": "u", "UploadId": upload, "PartNumber": 1}
    client.upload_part_copy(CopySource=where, **part)
    with refused(404, "NoSuchKey"):
        client.copy_object(Bucket=other, Key="copy", CopySource={"Bucket": source, "Key": "none"})

    def told(bucket: str, target: str) -> set[tuple[str, str, str]]:
        return {each[:3] for each in lines(client, target, bucket)}

    read = {("REST.COPY.OBJECT_GET", "k", "200"), ("REST.COPY.PART_GET", "k", "200")}
    written = {
        ("REST.COPY.OBJECT", "copy", "200"),
        ("REST.COPY.PART", "u", "200"),
        ("REST.COPY.OBJECT", "copy", "404"),
    }
    wait_until(lambda: read <= told(source, target), "the reads are there")
    wait_until(lambda: written <= told(other, logs), "the writes are there")
    assert not any("GET" in operation for operation, *_ in told(other, logs))
    assert not any(key == "none" for _, key, _ in told(source, target))


def test_lines_say_how_a_request_was_signed_and_whether_an_acl_allowed_it(server: S3) -> None:
    client, target = server.client(), server.new_bucket()
    source = server.new_bucket(ObjectOwnership="ObjectWriter")
    switch_on(client, source, target)
    client.delete_public_access_block(Bucket=source)
    client.put_object(Bucket=source, Key="k", Body=b"x", ACL="public-read")
    got = {"Bucket": source, "Key": "k"}
    client.get_object(**got)
    server.client(None).get_object(**got)
    server.client("alt").head_object(**got)
    for version in ("s3v4", "s3"):
        signing = server.client("main", signature_version=version)
        url = signing.generate_presigned_url("get_object", got, ExpiresIn=60)
        urllib.request.urlopen(url).close()
    told = {
        Line("REST.GET.OBJECT", "k", "200", "-", "-", "SigV4", "AuthHeader", "-"),
        Line("REST.GET.OBJECT", "k", "200", "-", "-", "-", "-", "Yes"),
        Line("REST.HEAD.OBJECT", "k", "200", "-", "-", "SigV4", "AuthHeader", "Yes"),
        Line("REST.GET.OBJECT", "k", "200", "-", "-", "SigV4", "QueryString", "-"),
        Line("REST.GET.OBJECT", "k", "200", "-", "-", "SigV2", "QueryString", "-"),
    }
    wait_until(lambda: told <= lines(client, target, source), "all lines are there")


def test_the_policy_that_aws_wants_on_a_target_is_accepted(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    statement = {
        "Sid": "S3ServerAccessLogsPolicy",
        "Effect": "Allow",
        "Principal": {"Service": "logging.s3.amazonaws.com"},
        "Action": ["s3:PutObject"],
        "Resource": f"arn:aws:s3:::{target}/logs/*",
        "Condition": {
            "ArnLike": {"aws:SourceArn": f"arn:aws:s3:::{source}"},
            "StringEquals": {"aws:SourceAccount": "main"},
        },
    }
    document = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket=target, Policy=json.dumps(document))
    switch_on(client, source, target)
    client.put_object(Bucket=source, Key="k", Body=b"x")
    wait_until(lambda: bool(lines(client, target, source)), "it is delivered")
    with refused(403, "AccessDenied"):
        server.client(None).put_object(Bucket=target, Key="logs/forged", Body=b"x")


def test_only_the_owner_says_where_logs_go(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": f"arn:aws:s3:::{source}",
    }
    document = {"Version": "2012-10-17", "Statement": [statement]}
    client.delete_public_access_block(Bucket=source)
    client.put_bucket_policy(Bucket=source, Policy=json.dumps(document))
    alt = server.client("alt")
    with refused(403, "AccessDenied"):
        switch_on(alt, source, target)
    switch_on(client, source, target)
    with refused(403, "AccessDenied"):
        alt.put_bucket_logging(Bucket=source, BucketLoggingStatus={})
    assert client.get_bucket_logging(Bucket=source)["LoggingEnabled"]["TargetBucket"] == target
    switch_on(server.client("admin"), source, source)


def test_malformed_wishes_are_refused(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    with refused(400, "MalformedXML"):
        wanted = {"PartitionedPrefix": {"PartitionDateSource": "another"}}
        switch_on(client, source, target, TargetObjectKeyFormat=wanted)
    with refused(404, "NoSuchBucket"):
        switch_on(client, "there-is-none", target)
    assert ask(server, "POST", f"/{source}?logging").status == 405
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


def test_a_prefix_that_leaves_no_key_is_refused(server: S3) -> None:
    client, source, target = server.client(), server.new_bucket(), server.new_bucket()
    switch_on(client, source, target, TargetPrefix="p" * 900)
    with refused(400, "KeyTooLongError"):
        switch_on(client, source, target, TargetPrefix="p" * 1000)
    partitioned = {"PartitionedPrefix": {"PartitionDateSource": "EventTime"}}
    with refused(400, "KeyTooLongError"):
        switch_on(client, source, target, TargetPrefix="p" * 960, TargetObjectKeyFormat=partitioned)


@pytest.mark.parametrize(
    ("source", "stamp"),
    [("DeliveryTime", "2026-11-23-09-08-07"), ("EventTime", "2026-11-23-00-00-00")],
)
def test_partitioned_keys(source: str, stamp: str) -> None:
    wanted = {
        "TargetPrefix": "p/",
        "TargetObjectKeyFormat": {"PartitionedPrefix": {"PartitionDateSource": source}},
    }
    key = key_of(wanted, "main", "us-east-1", "bucket", 1795424887)
    assert re.fullmatch(f"p/main/us-east-1/bucket/2026/11/23/{stamp}-[0-9A-F]{{16}}", key)
