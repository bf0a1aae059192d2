"""ETags: those of AWS for all that comes by S3, and one for the life of a version."""

import hashlib
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvfs
from tests.integration.client.test_client import sealed
from tests.integration.harness import kvfs as command
from tests.integration.s3 import S3
from tests.integration.s3_raw import ask

MIB = 1 << 20


@pytest.fixture(scope="module")
def body() -> bytes:
    """Of no pattern, and of an odd length."""
    return random.Random(20).randbytes(9 * MIB + 77)


def set_etags(s3: S3, bucket: str, how: str) -> str:
    done = command("namespace", "set", f"/{bucket}", "--etag", how, "--store", str(s3.node.store))
    assert done.returncode == 0, done.stderr
    return bucket


@pytest.fixture
def quick(s3: S3, either_bucket: str) -> str:
    """A bucket whose ETags are fast ones."""
    return set_etags(s3, either_bucket, "fast")


@pytest.fixture
def summed(s3: S3, either_bucket: str) -> str:
    """A bucket in which files of the mount have MD5s, too."""
    return set_etags(s3, either_bucket, "md5-all")


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


LOOKS: dict[str, Callable[[Any, str], str]] = {
    "HeadObject": lambda c, b: c.head_object(Bucket=b, Key="k")["ETag"],
    "GetObject": lambda c, b: c.get_object(Bucket=b, Key="k")["ETag"],
    "ListObjectsV2": lambda c, b: c.list_objects_v2(Bucket=b)["Contents"][0]["ETag"],
    "ListObjectVersions": lambda c, b: c.list_object_versions(Bucket=b)["Versions"][0]["ETag"],
    "GetObjectAttributes": lambda c, b: (
        f'"{c.get_object_attributes(Bucket=b, Key="k", ObjectAttributes=["ETag"])["ETag"]}"'
    ),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_file_of_the_mount_has_its_md5_from_the_first_look_on(
    s3: S3, summed: str, body: bytes, look: str
) -> None:
    """It is sealed for who looks, a moment after its close; so is what is written over it."""
    path = s3.mount / summed / "k"
    for data in (body, body[::-1], b"", b"small"):
        path.write_bytes(data)
        assert LOOKS[look](s3.client(), summed) == md5(data)
        assert shown(s3.client(), summed, "k") == {md5(data)}
        path.chmod(0o644)
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
        assert shown(s3.client(), summed, "k") == {md5(data)}


def test_files_of_clients_have_their_md5_too(s3: S3, summed: str, body: bytes) -> None:
    with kvfs.Client(s3.node.store) as opened:
        opened.put(f"/{summed}/one", body)
        opened.put(f"/{summed}/two", b"two")
    listed = s3.client().list_objects_v2(Bucket=summed)["Contents"]
    assert [each["ETag"] for each in listed] == [md5(body), md5(b"two")]


def test_an_etag_outlives_new_times(s3: S3, summed: str, body: bytes) -> None:
    """`rsync -t` and `touch` set them once the content is there; it stays what it was."""
    client = s3.client()
    client.put_object(Bucket=summed, Key="by S3", Body=body)
    (s3.mount / summed / "k").write_bytes(body)
    for key in ("k", "by S3"):
        with kvfs.Client(s3.node.store) as opened:
            sealed(opened, f"/{summed}/{key}")
        os.utime(s3.mount / summed / key, (1_700_000_000, 1_700_000_000))
        assert shown(client, summed, key) == {md5(body)}
        os.utime(s3.mount / summed / key)
        assert shown(client, summed, key) == {md5(body)}


def test_holes_have_the_md5_of_their_zeros(s3: S3, summed: str) -> None:
    path = s3.mount / summed / "k"
    with path.open("wb") as file:
        file.truncate(20 * MIB + 3)
        file.seek(9 * MIB)
        file.write(b"data")
    assert shown(s3.client(), summed, "k") == {md5(path.read_bytes())}


def test_what_comes_by_s3_keeps_its_etag_at_the_seal(s3: S3, summed: str, body: bytes) -> None:
    client, named = s3.client(), {"Bucket": summed, "Key": "k"}
    upload = client.create_multipart_upload(**named)["UploadId"]
    part = client.upload_part(PartNumber=1, UploadId=upload, Body=body, **named)
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    told = client.complete_multipart_upload(UploadId=upload, MultipartUpload=parts, **named)
    assert told["ETag"].endswith('-1"')
    with kvfs.Client(s3.node.store) as opened:
        sealed(opened, f"/{summed}/k")
    assert shown(client, summed, "k") == {told["ETag"]}


def test_what_is_open_for_writing_has_an_etag_until_its_close(s3: S3, summed: str) -> None:
    path, client = s3.mount / summed / "k", s3.client()
    with path.open("wb") as file:
        file.write(b"half")
        os.fsync(file.fileno())
        (told,) = shown(client, summed, "k")
        assert told.endswith('-1"')
        file.write(b" done")
    assert shown(client, summed, "k") == {md5(b"half done")}


def test_what_was_sealed_before_keeps_its_etag(s3: S3, either_bucket: str) -> None:
    """The setting is of files that come after, and of others once they are written again."""
    path, client = s3.mount / either_bucket / "k", s3.client()
    path.write_bytes(b"before")
    with kvfs.Client(s3.node.store) as opened:
        sealed(opened, f"/{either_bucket}/k")
    (told,) = shown(client, either_bucket, "k")
    assert told.endswith('-1"')
    set_etags(s3, either_bucket, "md5-all")
    assert shown(client, either_bucket, "k") == {told}
    path.write_bytes(b"after")
    assert shown(client, either_bucket, "k") == {md5(b"after")}


def test_conditions_are_held_against_the_md5(s3: S3, summed: str) -> None:
    (s3.mount / summed / "k").write_bytes(b"x")
    client, named = s3.client(), {"Bucket": summed, "Key": "k"}
    got = client.get_object(IfMatch=md5(b"x"), **named)
    assert got["Body"].read() == b"x"
    client.put_object(IfMatch=md5(b"x"), Body=b"y", **named)
    assert (s3.mount / summed / "k").read_bytes() == b"y"
