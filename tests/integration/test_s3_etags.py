"""ETags: those of AWS for all that comes by S3, and one for the life of a version."""

import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvfs
from tests.integration.harness import kvfs as command
from tests.integration.s3 import S3
from tests.integration.s3_raw import ask
from tests.integration.test_client import sealed

MIB = 1 << 20


@pytest.fixture(scope="module")
def body() -> bytes:
    """Of no pattern, and of an odd length."""
    return random.Random(20).randbytes(9 * MIB + 77)


@pytest.fixture
def quick(s3: S3, either_bucket: str) -> str:
    """A bucket whose ETags are fast ones."""
    done = command(
        "namespace", "set", f"/{either_bucket}", "--etag", "fast", "--store", str(s3.node.store)
    )
    assert done.returncode == 0, done.stderr
    return either_bucket


def md5(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def shown(client: Any, bucket: str, key: str) -> set[str]:
    """Its ETags in all that tells one."""
    (listed,) = client.list_objects_v2(Bucket=bucket, Prefix=key)["Contents"]
    (version,) = client.list_object_versions(Bucket=bucket, Prefix=key)["Versions"]
    told = client.head_object(Bucket=bucket, Key=key)
    got = client.get_object(Bucket=bucket, Key=key)
    got["Body"].close()
    asked = client.get_object_attributes(Bucket=bucket, Key=key, ObjectAttributes=["ETag"])
    return {listed["ETag"], version["ETag"], told["ETag"], got["ETag"], f'"{asked["ETag"]}"'}


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (256 << 10) + 1, MIB, 9 * MIB + 77])
def test_a_body_has_its_md5(s3: S3, either_bucket: str, body: bytes, size: int) -> None:
    """As the SDK sends it, with a trailing checksum; without one, and with the signed chunks."""
    client, named, data = s3.client(), {"Bucket": either_bucket, "Key": "k"}, body[:size]
    plain = s3.client("main", request_checksum_calculation="when_required")
    for each in (client, plain):
        assert each.put_object(Body=data, **named)["ETag"] == md5(data)
        assert shown(client, either_bucket, "k") == {md5(data)}
    told = ask(s3, "PUT", f"/{either_bucket}/k", data)
    assert told.headers["etag"] == md5(data)
    assert client.get_object(**named)["Body"].read() == data


def test_several_bodies_at_once(s3: S3, bucket: str, body: bytes) -> None:
    """More than there are processors: some are hashed beside their writes, and some are not."""

    def put(number: int) -> bool:
        data = body[number:]
        told = s3.client().put_object(Bucket=bucket, Key=f"k{number}", Body=data)
        return bool(told["ETag"] == md5(data))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(put, range(24)))


def test_parts_and_what_is_made_of_them(s3: S3, bucket: str, body: bytes) -> None:
    client, named = s3.client(), {"Bucket": bucket, "Key": "k"}
    client.put_object(Bucket=bucket, Key="source", Body=body)
    upload = client.create_multipart_upload(**named)["UploadId"]
    pieces = [body[: 5 * MIB], body[MIB : 7 * MIB], b"end"]
    tags = [
        client.upload_part(PartNumber=1, UploadId=upload, Body=pieces[0], **named)["ETag"],
        client.upload_part_copy(
            PartNumber=2,
            UploadId=upload,
            CopySource=f"{bucket}/source",
            CopySourceRange=f"bytes={MIB}-{7 * MIB - 1}",
            **named,
        )["CopyPartResult"]["ETag"],
        client.upload_part(PartNumber=3, UploadId=upload, Body=pieces[2], **named)["ETag"],
    ]
    assert tags == [md5(each) for each in pieces]
    parts = [{"PartNumber": at + 1, "ETag": tag} for at, tag in enumerate(tags)]
    done = client.complete_multipart_upload(
        UploadId=upload, MultipartUpload={"Parts": parts}, **named
    )
    digests = b"".join(hashlib.md5(each).digest() for each in pieces)
    whole = f'"{hashlib.md5(digests).hexdigest()}-3"'
    assert done["ETag"] == whole
    assert shown(client, bucket, "k") == {whole}
    copied = client.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    assert copied["CopyObjectResult"]["ETag"] == md5(b"".join(pieces))
    assert shown(client, bucket, "copy") == {md5(b"".join(pieces))}
    again = client.copy_object(
        CopySource=f"{bucket}/k", MetadataDirective="REPLACE", Metadata={"a": "b"}, **named
    )
    assert again["CopyObjectResult"]["ETag"] == md5(b"".join(pieces))
    assert shown(client, bucket, "k") == {md5(b"".join(pieces))}


def test_a_copy_of_a_file_of_the_mount(s3: S3, bucket: str, body: bytes) -> None:
    (s3.mount / bucket / "file").write_bytes(body)
    told = s3.client().copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/file")
    assert told["CopyObjectResult"]["ETag"] == md5(body)


def test_what_is_fast_is_no_md5(s3: S3, quick: str, body: bytes) -> None:
    client = s3.client()
    told = client.put_object(Bucket=quick, Key="k", Body=body)["ETag"]
    assert told.endswith('-1"')
    assert shown(client, quick, "k") == {told}
    copied = client.copy_object(Bucket=quick, Key="copy", CopySource=f"{quick}/k")
    assert copied["CopyObjectResult"]["ETag"] == told
    small = client.put_object(Bucket=quick, Key="small", Body=b"x")
    assert small["ETag"] == md5(b"x")
    assert client.put_object(Bucket=quick, Key="k", Body=body)["ETag"] == told


def test_a_version_keeps_its_etag(s3: S3, bucket: str, body: bytes) -> None:
    """Through its seal, a new name, a change of its mode and of its metadata."""
    client = s3.client()
    tag = client.put_object(Bucket=bucket, Key="k", Body=body)["ETag"]
    with kvfs.Client(s3.node.store) as opened:
        sealed(opened, f"/{bucket}/k")
    path = s3.mount / bucket / "k"
    path.chmod(0o640)
    os.link(path, path.with_name("link"))
    assert shown(client, bucket, "k") == {tag}
    client.put_object_tagging(
        Bucket=bucket, Key="k", Tagging={"TagSet": [{"Key": "a", "Value": "b"}]}
    )
    path.rename(path.with_name("renamed"))
    assert shown(client, bucket, "renamed") == {tag}
    with open(path.with_name("renamed"), "r+b") as file:
        file.write(b"other")
    assert tag not in shown(client, bucket, "renamed")
