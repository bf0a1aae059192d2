"""CopyObject as clients see it."""

import hashlib
import os
from datetime import timedelta
from typing import Any

import pytest

from tests.integration.s3 import S3, refused
from tests.integration.s3_raw import ask

SOON = timedelta(days=1)
MINE = {"one": "1", "two": "zwei"}


@pytest.fixture
def source(s3: S3, bucket: str) -> dict[str, str]:
    """A small object that all sorts of things are said of."""
    s3.client().put_object(
        Bucket=bucket,
        Key="source",
        Body=b"source",
        ContentType="text/x-source",
        CacheControl="no-store",
        WebsiteRedirectLocation="/there",
        Metadata=MINE,
        Tagging="tag=value",
        ChecksumAlgorithm="SHA256",
    )
    return {"Bucket": bucket, "Key": "source"}


def _versioned(s3: S3, bucket: str) -> None:
    s3.client().put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})


def test_a_copy_is_as_its_source(s3: S3, bucket: str, source: dict[str, str]) -> None:
    client = s3.client()
    done = client.copy_object(Bucket=bucket, Key="copy", CopySource=source)
    told = done["CopyObjectResult"]
    first, copy = (
        client.get_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        for key in ("source", "copy")
    )
    assert copy["Body"].read() == b"source"
    assert told["ETag"] == copy["ETag"] == first["ETag"]
    assert told["LastModified"].replace(microsecond=0) == copy["LastModified"]
    assert told["ChecksumSHA256"] == copy["ChecksumSHA256"] == first["ChecksumSHA256"]
    assert told["ChecksumType"] == copy["ChecksumType"] == "FULL_OBJECT"
    assert (copy["ContentType"], copy["CacheControl"]) == ("text/x-source", "no-store")
    assert copy["Metadata"] == MINE
    assert "WebsiteRedirectLocation" not in copy
    tags = client.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"]
    assert tags == [{"Key": "tag", "Value": "value"}]
    assert "VersionId" not in done
    assert "CopySourceVersionId" not in done
    assert (s3.mount / bucket / "copy").read_bytes() == b"source"


def test_what_is_said_can_be_replaced(s3: S3, bucket: str, source: dict[str, str]) -> None:
    client = s3.client()
    client.copy_object(
        Bucket=bucket,
        Key="copy",
        CopySource=source,
        MetadataDirective="REPLACE",
        TaggingDirective="REPLACE",
        Metadata={"three": "3"},
        ContentType="text/x-copy",
        Tagging="other=1",
        ChecksumAlgorithm="CRC32",
    )
    copy = client.get_object(Bucket=bucket, Key="copy", ChecksumMode="ENABLED")
    assert copy["Metadata"] == {"three": "3"}
    assert copy["ContentType"] == "text/x-copy"
    assert "CacheControl" not in copy
    assert "ChecksumSHA256" not in copy
    tags = client.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"]
    assert tags == [{"Key": "other", "Value": "1"}]
    put = client.put_object(Bucket=bucket, Key="same", Body=b"source", ChecksumAlgorithm="CRC32")
    assert copy["ChecksumCRC32"] == put["ChecksumCRC32"]
    for directive in ({"MetadataDirective": "KEEP"}, {"TaggingDirective": "KEEP"}):
        with refused(400, "InvalidArgument"):
            client.copy_object(Bucket=bucket, Key="copy", CopySource=source, **directive)


def test_what_is_given_counts_with_replace_alone(
    s3: S3, bucket: str, source: dict[str, str]
) -> None:
    client = s3.client()
    client.copy_object(
        Bucket=bucket,
        Key="copy",
        CopySource=source,
        Metadata={"three": "3"},
        ContentType="text/x-copy",
        Tagging="other=1",
        WebsiteRedirectLocation="/elsewhere",
    )
    copy = client.head_object(Bucket=bucket, Key="copy")
    assert (copy["Metadata"], copy["ContentType"]) == (MINE, "text/x-source")
    assert copy["WebsiteRedirectLocation"] == "/elsewhere"
    tags = client.get_object_tagging(Bucket=bucket, Key="copy")["TagSet"]
    assert tags == [{"Key": "tag", "Value": "value"}]


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_sizes(s3: S3, bucket: str, size: int) -> None:
    client = s3.client()
    body = os.urandom(size)
    client.put_object(Bucket=bucket, Key="a", Body=body)
    client.copy_object(Bucket=bucket, Key="b", CopySource={"Bucket": bucket, "Key": "a"})
    client.delete_object(Bucket=bucket, Key="a")
    assert client.get_object(Bucket=bucket, Key="b")["Body"].read() == body


def test_onto_itself(s3: S3, bucket: str, source: dict[str, str]) -> None:
    client = s3.client()
    for asked in ({}, {"TaggingDirective": "REPLACE"}, {"MetadataDirective": "COPY"}):
        with refused(400, "InvalidRequest"):
            client.copy_object(Bucket=bucket, Key="source", CopySource=source, **asked)
    client.copy_object(
        Bucket=bucket,
        Key="source",
        CopySource=source,
        MetadataDirective="REPLACE",
        Metadata={"new": "1"},
    )
    got = client.get_object(Bucket=bucket, Key="source", ChecksumMode="ENABLED")
    assert got["Body"].read() == b"source"
    assert got["Metadata"] == {"new": "1"}
    assert got["ContentType"] == "binary/octet-stream"
    assert "ChecksumSHA256" in got
    client.copy_object(Bucket=bucket, Key="source", CopySource=source, ChecksumAlgorithm="CRC32C")
    got = client.head_object(Bucket=bucket, Key="source", ChecksumMode="ENABLED")
    assert "ChecksumCRC32C" in got
    assert got["Metadata"] == {"new": "1"}


@pytest.mark.parametrize(
    ("asked", "is_met"),
    [
        ({"IfMatch": "same"}, True),
        ({"IfMatch": '"other"'}, False),
        ({"IfNoneMatch": "same"}, False),
        ({"IfNoneMatch": '"other"'}, True),
        ({"IfModifiedSince": -SOON}, True),
        ({"IfModifiedSince": timedelta(0)}, False),
        ({"IfUnmodifiedSince": -SOON}, False),
        ({"IfUnmodifiedSince": timedelta(0)}, True),
        ({"IfMatch": "same", "IfUnmodifiedSince": -SOON}, True),
        ({"IfNoneMatch": "same", "IfModifiedSince": -SOON}, False),
    ],
)
def test_conditions_on_the_source(
    s3: S3, bucket: str, source: dict[str, str], asked: dict[str, Any], is_met: bool
) -> None:
    client = s3.client()
    head = client.head_object(**source)
    conditions = {}
    for name, value in asked.items():
        meant = head["ETag"] if value == "same" else value
        if isinstance(value, timedelta):
            meant = head["LastModified"] + value
        conditions[f"CopySource{name}"] = meant
    wanted: dict[str, Any] = {"Bucket": bucket, "Key": "copy", "CopySource": source, **conditions}
    if is_met:
        client.copy_object(**wanted)
    else:
        with refused(412, "PreconditionFailed"):
            client.copy_object(**wanted)


def test_conditions_on_what_is_there(s3: S3, bucket: str, source: dict[str, str]) -> None:
    client = s3.client()
    wanted: dict[str, Any] = {"Bucket": bucket, "Key": "copy", "CopySource": source}
    client.copy_object(**wanted, IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        client.copy_object(**wanted, IfNoneMatch="*")
    with refused(412, "PreconditionFailed"):
        client.copy_object(**wanted, IfMatch='"other"')
    client.copy_object(**wanted, IfMatch=client.head_object(**source)["ETag"])


def test_versions(s3: S3, bucket: str) -> None:
    client = s3.client()
    _versioned(s3, bucket)
    first = client.put_object(Bucket=bucket, Key="a", Body=b"1")["VersionId"]
    second = client.put_object(Bucket=bucket, Key="a", Body=b"2")["VersionId"]
    old = {"Bucket": bucket, "Key": "a", "VersionId": first}
    done = client.copy_object(Bucket=bucket, Key="b", CopySource=old)
    assert done["CopySourceVersionId"] == first
    got = client.get_object(Bucket=bucket, Key="b")
    assert (got["Body"].read(), got["VersionId"]) == (b"1", done["VersionId"])
    done = client.copy_object(Bucket=bucket, Key="b", CopySource={"Bucket": bucket, "Key": "a"})
    assert done["CopySourceVersionId"] == second
    # An old version becomes the current one again.
    done = client.copy_object(Bucket=bucket, Key="a", CopySource=old)
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == b"1"
    assert len(client.list_object_versions(Bucket=bucket, Prefix="a")["Versions"]) == 3
    marker = client.delete_object(Bucket=bucket, Key="a")["VersionId"]
    with refused(404, "NoSuchKey"):
        client.copy_object(Bucket=bucket, Key="c", CopySource={"Bucket": bucket, "Key": "a"})
    with refused(400, "InvalidRequest"):
        client.copy_object(Bucket=bucket, Key="c", CopySource=old | {"VersionId": marker})
    with refused(404, "NoSuchVersion"):
        client.copy_object(
            Bucket=bucket,
            Key="c",
            CopySource={"Bucket": bucket, "Key": "none", "VersionId": first},
        )
    with refused(400, "InvalidArgument"):
        client.copy_object(Bucket=bucket, Key="c", CopySource=old | {"VersionId": "bad"})


@pytest.mark.parametrize("key", ["a b", "a+b", "a%20b", "\u00e9\u4e2d", "a?b", "a//../b", "/lead"])
def test_names_of_sources(s3: S3, bucket: str, key: str) -> None:
    client = s3.client()
    client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    client.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key})
    assert client.get_object(Bucket=bucket, Key="copy")["Body"].read() == key.encode()


@pytest.mark.usefixtures("source")
def test_forms_of_sources(s3: S3, bucket: str) -> None:
    for text in (f"{bucket}/source", f"/{bucket}/source", f"/{bucket}%2Fsource"):
        told = ask(s3, "PUT", f"/{bucket}/copy", b"", {"x-amz-copy-source": text})
        assert told.status == 200, text
    for text in ("", "/", bucket, f"/{bucket}/", "/%ff/a", f"/{bucket}/source?versionId="):
        told = ask(s3, "PUT", f"/{bucket}/copy", b"", {"x-amz-copy-source": text or " "})
        assert (told.status, told.code) == (400, "InvalidArgument"), text


def test_sources_that_are_not_there(s3: S3, bucket: str) -> None:
    client = s3.client()
    with refused(404, "NoSuchKey"):
        client.copy_object(Bucket=bucket, Key="b", CopySource={"Bucket": bucket, "Key": "none"})
    with refused(404, "NoSuchBucket") as told:
        client.copy_object(
            Bucket=bucket, Key="b", CopySource={"Bucket": "never-made-bucket", "Key": "a"}
        )
    assert told.response["Error"]["BucketName"] == "never-made-bucket"
    with refused(404, "NoSuchBucket"):
        client.copy_object(
            Bucket="never-made-bucket", Key="b", CopySource={"Bucket": bucket, "Key": "a"}
        )


def test_between_owners(s3: S3, source: dict[str, str]) -> None:
    theirs = s3.new_bucket("alt")
    try:
        for user in ("main", "alt"):
            with refused(403, "AccessDenied"):
                s3.client(user).copy_object(Bucket=theirs, Key="copy", CopySource=source)
        s3.client().put_object_acl(**source, ACL="public-read")
        with refused(403, "AccessDenied"):  # its tags are not for all
            s3.client("alt").copy_object(Bucket=theirs, Key="copy", CopySource=source)
        s3.client("alt").copy_object(
            Bucket=theirs, Key="copy", CopySource=source, TaggingDirective="REPLACE"
        )
        got = s3.client("alt").get_object(Bucket=theirs, Key="copy")
        assert got["Body"].read() == b"source"
        grants = s3.client("alt").get_object_acl(Bucket=theirs, Key="copy")["Grants"]
        assert [each["Grantee"].get("ID") for each in grants] == ["alt"]
        with refused(403, "AccessDenied"):
            s3.client("admin").copy_object(
                Bucket=theirs, Key="c", CopySource=source, ExpectedSourceBucketOwner="alt"
            )
    finally:
        s3.remove_bucket(theirs)


def test_a_file_of_the_mount_is_a_source(s3: S3, bucket: str) -> None:
    (s3.mount / bucket / "file").write_bytes(b"of the mount")
    client = s3.client()
    wanted = {"Bucket": bucket, "Key": "copy", "CopySource": f"{bucket}/file"}
    done = client.copy_object(**wanted)
    assert done["CopyObjectResult"]["ETag"] == f'"{hashlib.md5(b"of the mount").hexdigest()}"'
    done = client.copy_object(**wanted, ChecksumAlgorithm="SHA1")
    assert "ChecksumSHA1" in done["CopyObjectResult"]
    assert client.get_object(Bucket=bucket, Key="copy")["Body"].read() == b"of the mount"


def test_a_copy_of_parts_is_whole(s3: S3, bucket: str) -> None:
    client = s3.client()
    asked = {"Bucket": bucket, "Key": "parts"}
    upload = client.create_multipart_upload(**asked, ChecksumAlgorithm="SHA256")["UploadId"]
    parts = []
    for number, body in ((1, b"1" * (5 << 20)), (2, b"2")):
        told = client.upload_part(
            **asked,
            UploadId=upload,
            PartNumber=number,
            Body=body,
            ChecksumAlgorithm="SHA256",
        )
        names = ("ETag", "ChecksumSHA256")
        parts.append({"PartNumber": number} | {name: told[name] for name in names})
    client.complete_multipart_upload(**asked, UploadId=upload, MultipartUpload={"Parts": parts})
    whole = client.put_object(
        Bucket=bucket, Key="whole", Body=b"1" * (5 << 20) + b"2", ChecksumAlgorithm="SHA256"
    )
    done = client.copy_object(Bucket=bucket, Key="copy", CopySource=asked)["CopyObjectResult"]
    assert done["ChecksumSHA256"] == whole["ChecksumSHA256"]
    assert done["ChecksumType"] == "FULL_OBJECT"
    assert client.head_object(Bucket=bucket, Key="parts", PartNumber=2)["PartsCount"] == 2
    assert "PartsCount" not in client.head_object(Bucket=bucket, Key="copy", PartNumber=1)


def test_who_may_not_read_the_source_learns_nothing_of_its_versions(s3: S3, bucket: str) -> None:
    _versioned(s3, bucket)
    there = s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    gone = s3.client().put_object(Bucket=bucket, Key="a", Body=b"x")["VersionId"]
    s3.client().delete_object(Bucket=bucket, Key="a", VersionId=gone)
    own = s3.new_bucket("alt")
    for version in (there, gone):
        source = {"Bucket": bucket, "Key": "a", "VersionId": version}
        with refused(403, "AccessDenied"):
            s3.client("alt").copy_object(Bucket=own, Key="a", CopySource=source)
    s3.remove_bucket(own)
