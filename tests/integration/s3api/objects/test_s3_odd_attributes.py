"""Attributes of objects that somebody sets on the mount, or that an old store has."""

import errno
import os
import time

import pytest

from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.tree import inodes
from tests.integration import posix
from tests.integration.s3 import S3, refused

BAD = {
    "user.s3.content-type": b"text/a\r\nx-injected: 1",
    "user.s3.cache-control": b"\xff\xfe",
    "user.s3.meta.a b": b"1",
    "user.s3.meta.bytes": b"\xff",
    "user.s3.tagging": b"a=%ff",
    "user.s3.checksum.crc32": b"not base64",
    "user.s3.checksum.type": b"SOME",
    "user.s3.part-checksums": b"a,,b",
    "user.s3.etag": b"a\r\nb 3 4",
    "trusted.s3.parts": b"1*999999999999",
    "trusted.s3.acl": b"{}",
    "trusted.s3.owner": b"",
    "trusted.s3.legal-hold": b"perhaps",
    "trusted.s3.retention": b"GOVERNANCE soon",
}


@pytest.fixture
def locking(s3: S3) -> str:
    return s3.new_bucket(ObjectLockEnabledForBucket=True)


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_what_s3_could_not_read_is_refused(s3: S3, bucket: str, name: str, value: bytes) -> None:
    path = s3.mount / bucket / "k"
    path.write_bytes(b"old")
    with posix.refused(errno.EINVAL):
        os.setxattr(path, name, value)
    assert name not in os.listxattr(path)


def test_what_s3_reads_can_be_set(s3: S3, bucket: str) -> None:
    path = s3.mount / bucket / "k"
    path.write_bytes(b"old")
    os.setxattr(path, "user.s3.content-type", b"text/x-mine")
    os.setxattr(path, "user.s3.meta.colour", "grün\n".encode())
    os.setxattr(path, "user.s3.tagging", b"a=b&c=")
    client = s3.client()
    assert client.head_object(Bucket=bucket, Key="k")["ContentType"] == "text/x-mine"
    tags = client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"]
    assert tags == [{"Key": "a", "Value": "b"}, {"Key": "c", "Value": ""}]
    os.removexattr(path, "user.s3.tagging")
    assert client.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == []


def test_what_is_said_of_an_object_is_as_long_by_s3_as_on_the_mount(s3: S3, bucket: str) -> None:
    client, path = s3.client(), s3.mount / bucket / "k"
    tags = [{"Key": str(number), "Value": "v" * 200} for number in range(10)]
    client.put_object(Bucket=bucket, Key="k", Body=b"x")
    os.setxattr(path, "user.s3.meta.long", b"x" * 64_000)
    with refused(400, "MetadataTooLarge"):
        client.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": tags})
    with posix.refused(errno.ENOSPC):
        os.setxattr(path, "user.other", b"x" * 2000)
    os.setxattr(path, "user.s3.meta.long", b"x" * 60_000)
    client.put_object_tagging(Bucket=bucket, Key="k", Tagging={"TagSet": tags})
    assert s3.node.status()["engine"]["bytes"] > 64_000


def test_a_lock_is_not_lifted_on_the_mount(s3: S3, locking: str) -> None:
    client, path = s3.client(), s3.mount / locking / "k"
    version = client.put_object(Bucket=locking, Key="k", Body=b"old")["VersionId"]
    until = int(time.time()) + 100_000
    os.setxattr(path, "trusted.s3.retention", b"GOVERNANCE %d" % until)
    os.setxattr(path, "trusted.s3.retention", b"GOVERNANCE %d" % (until + 1))
    os.setxattr(path, "trusted.s3.legal-hold", b"ON")
    for name, value in (
        ("trusted.s3.retention", b"GOVERNANCE %d" % until),
        ("trusted.s3.retention", b"COMPLIANCE %d" % (until + 9)),
        ("user.s3.retention", b"GOVERNANCE 1"),
        ("trusted.s3.legal-hold", b"OFF"),
        ("user.s3.legal-hold", b"OFF"),
        ("trusted.s3.version", b"x"),
    ):
        with posix.refused(errno.EPERM):
            os.setxattr(path, name, value)
    for name in ("retention", "legal-hold", "version"):
        with posix.refused(errno.EPERM):
            os.removexattr(path, f"trusted.s3.{name}")
    with refused(403, "AccessDenied"):
        client.delete_object(Bucket=locking, Key="k", VersionId=version)
    assert client.head_object(Bucket=locking, Key="k")["ObjectLockLegalHoldStatus"] == "ON"


def test_what_an_old_store_has_does_not_count_but_holds(s3: S3, locking: str) -> None:
    client, path = s3.client(), s3.mount / locking / "k"
    version = client.put_object(Bucket=locking, Key="k", Body=b"old")["VersionId"]
    values = BAD | {"user.s3.retention": b"GOVERNANCE 1", "user.s3.legal-hold": b"OFF"}
    engine = EmbeddedEngine(s3.node.store / "meta")
    try:
        for name, value in values.items():
            ino = path.stat().st_ino
            engine.transact_now(
                lambda t, n=name, v=value, i=ino: inodes.set_xattr(t, i, n.encode(), v, 0, 1)
            )
    finally:
        engine.close()
    asked = {"Bucket": locking, "Key": "k"}
    head = client.head_object(**asked, ChecksumMode="ENABLED")
    assert (head["ContentType"], head["Metadata"]) == ("binary/octet-stream", {})
    assert head["ObjectLockLegalHoldStatus"] == "ON"
    assert client.get_object(**asked)["Body"].read() == b"old"
    assert client.get_object(**asked, PartNumber=1)["Body"].read() == b"old"
    assert client.get_object_tagging(**asked)["TagSet"] == []
    assert client.get_object_attributes(**asked, ObjectAttributes=["Checksum", "ObjectParts"])
    assert client.get_object_acl(**asked)["Grants"]
    (listed,) = client.list_objects_v2(Bucket=locking)["Contents"]
    assert listed["ETag"] == head["ETag"]
    assert client.list_object_versions(Bucket=locking)["Versions"][0]["Owner"]
    client.put_object_legal_hold(**asked, LegalHold={"Status": "OFF"})
    with refused(403, "AccessDenied"):
        client.delete_object(**asked, VersionId=version, BypassGovernanceRetention=True)
    os.setxattr(path, "trusted.s3.retention", b"GOVERNANCE 1")
    client.delete_object(**asked, VersionId=version)
