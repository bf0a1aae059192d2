"""What is in the stores of this directory: how it got there, and how it is read back.

All of it was on disk when the store was left, but for what `LATE` names: that was written last, and
the machine that opens the store cannot know that the one it was written on did not go down.
"""

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
PART: Final = 5 * MIB
FILES: Final = {
    b"cache/block-1": 64 * KIB,
    b"cache/a/b/block-2": 1,
    b"models/empty": 0,
    b"models/weights": 5 * MIB,
    b"models/caf\xe9 \xff": 100,
    b"team/plan": 3 * KIB,
}
"""Sizes, by names on the mount; `weights` has two chunks."""
LATE: Final = {b"cache/late": 4 * KIB}
SCRIPT: Final = b"models/script"
ATTRIBUTES: Final = {"user.note": b"n\0te", "user.empty": b""}
SPARSE: Final = b"models/sparse"
HOLE: Final = MIB
TEAM: Final = ("--kind", "cache", "--capacity", "1GiB", "--mode", "0770", "--owner", "1000:1001")
BUCKET: Final = "objects"
POLICY: Final = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*",'
    '"Action":"s3:GetObject","Resource":"arn:aws:s3:::objects/public/*"}]}'
)
TAGS: Final = [{"Key": "purpose", "Value": "fixture"}]
RULES: Final = [
    {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "old/"}, "Expiration": {"Days": 300}}
]


def data(name: bytes, size: int) -> bytes:
    """Different for each name, and small when it is compressed."""
    line = hashlib.sha256(name).hexdigest().encode() + b"\n"
    return (line * (size // len(line) + 1))[:size]


def write(mount: Path) -> None:
    """Everything is on disk when this returns."""
    for name, size in FILES.items():
        _write(mount, name, data(name, size))
    script = _path(mount, SCRIPT)
    _write(mount, SCRIPT, data(SCRIPT, 10))
    os.chmod(script, 0o751)
    os.chown(script, 1000, 1001)
    os.utime(script, ns=(1_600_000_000_000_000_001, 1_600_000_000_000_000_002))
    for attribute, value in ATTRIBUTES.items():
        os.setxattr(script, attribute, value)
    os.link(script, _path(mount, b"models/other"))
    os.symlink("script", _path(mount, b"models/link"))
    os.chmod(_path(mount, b"cache/a"), 0o750)
    with _path(mount, SPARSE).open("wb") as file:
        file.seek(HOLE)
        file.write(b"end")
        os.fsync(file.fileno())


def write_late(mount: Path) -> int:
    """Nothing is waited for. A descriptor of a file that was not closed yet."""
    for name, size in LATE.items():
        _path(mount, name).write_bytes(data(name, size))
    fd = os.open(_path(mount, b"models/not-closed"), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, b"half of it")
    return fd


def check(mount: Path) -> None:
    """By the mount."""
    for name, size in FILES.items():
        assert _path(mount, name).read_bytes() == data(name, size), name
    for name, size in LATE.items():
        with contextlib.suppress(FileNotFoundError):
            assert _path(mount, name).read_bytes() == data(name, size), name
    script, other = (_path(mount, name) for name in (SCRIPT, b"models/other"))
    found = script.stat()
    assert script.read_bytes() == other.read_bytes() == data(SCRIPT, 10)
    assert found.st_nlink == 2
    assert found.st_ino == other.stat().st_ino
    assert stat.S_IMODE(found.st_mode) == 0o751
    assert (found.st_uid, found.st_gid) == (1000, 1001)
    assert found.st_mtime_ns == 1_600_000_000_000_000_002
    assert {name: os.getxattr(script, name) for name in os.listxattr(script)} == ATTRIBUTES
    assert os.readlink(_path(mount, b"models/link")) == "script"
    assert stat.S_IMODE(_path(mount, b"cache/a").stat().st_mode) == 0o750
    team = _path(mount, b"team").stat()
    assert (stat.S_IMODE(team.st_mode), team.st_uid, team.st_gid) == (0o770, 1000, 1001)
    sparse = _path(mount, SPARSE)
    assert sparse.read_bytes() == bytes(HOLE) + b"end"
    assert sparse.stat().st_blocks * 512 < HOLE
    assert not _path(mount, b"models/not-closed").exists()
    assert set(os.listdir(mount)) == {"cache", "models", "team", BUCKET}
    assert set(os.listdir(_path(mount, b"cache"))) - {"late"} == {"a", "block-1"}


def put(client: Any) -> dict[str, str]:
    """By S3, into a bucket that keeps versions. What is known of it from then on alone: the ids of
    versions and of the upload."""
    client.create_bucket(Bucket=BUCKET)
    client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    client.put_bucket_policy(Bucket=BUCKET, Policy=POLICY)
    client.put_bucket_tagging(Bucket=BUCKET, Tagging={"TagSet": TAGS})
    client.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration={"Rules": RULES}
    )
    ids = {}
    for number in (1, 2):
        answer = client.put_object(
            Bucket=BUCKET,
            Key="a//key",
            Body=data(b"key %d" % number, 1000),
            ContentType="text/plain",
            CacheControl=f"max-age={number}",
            Metadata={"number": str(number)},
            Tagging="purpose=fixture",
            ChecksumAlgorithm="SHA256",
        )
        ids[f"version {number}"] = answer["VersionId"]
    client.put_object(Bucket=BUCKET, Key="gone", Body=b"gone")
    client.delete_object(Bucket=BUCKET, Key="gone")
    _upload(client, "whole", complete=True)
    ids["upload"] = _upload(client, "begun", complete=False)
    return ids


def _upload(client: Any, key: str, *, complete: bool) -> str:
    upload: str = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    parts = []
    for number, body in enumerate((data(b"part", PART), b"last"), 1):
        where = {"Bucket": BUCKET, "Key": key, "UploadId": upload, "PartNumber": number}
        answer = client.upload_part(**where, Body=body)
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    if complete:
        client.complete_multipart_upload(
            Bucket=BUCKET, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
        )
    return upload


def check_objects(client: Any, ids: dict[str, str]) -> None:
    """By S3. The upload that was begun is completed, and its object taken away."""
    assert [each["Name"] for each in client.list_buckets()["Buckets"]] == [BUCKET]
    versioning = client.get_bucket_versioning(Bucket=BUCKET)
    assert versioning["Status"] == "Enabled"
    assert client.get_bucket_policy(Bucket=BUCKET)["Policy"] == POLICY
    assert client.get_bucket_tagging(Bucket=BUCKET)["TagSet"] == TAGS
    assert client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"] == RULES
    for number in (1, 2):
        version = ids[f"version {number}"]
        found = client.get_object(
            Bucket=BUCKET, Key="a//key", VersionId=version, ChecksumMode="ENABLED"
        )
        body = data(b"key %d" % number, 1000)
        assert found["Body"].read() == body
        assert found["ETag"].strip('"') == hashlib.md5(body, usedforsecurity=False).hexdigest()
        assert found["ContentType"] == "text/plain"
        assert found["CacheControl"] == f"max-age={number}"
        assert found["Metadata"] == {"number": str(number)}
        assert found["TagCount"] == 1
        assert found["ChecksumSHA256"]
    listed = client.list_object_versions(Bucket=BUCKET)
    assert [(each["Key"], each["IsLatest"]) for each in listed["Versions"]] == [
        *(("a//key", True), ("a//key", False), ("gone", False), ("whole", True)),
    ]
    assert [each["Key"] for each in listed["DeleteMarkers"]] == ["gone"]
    whole = client.get_object(Bucket=BUCKET, Key="whole")
    assert whole["Body"].read() == data(b"part", PART) + b"last"
    assert whole["ETag"].endswith('-2"')
    _complete(client, ids["upload"])


def _complete(client: Any, upload: str) -> None:
    (begun,) = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert (begun["Key"], begun["UploadId"]) == ("begun", upload)
    where = {"Bucket": BUCKET, "Key": "begun", "UploadId": upload}
    parts = client.list_parts(**where)["Parts"]
    named = [{"PartNumber": each["PartNumber"], "ETag": each["ETag"]} for each in parts]
    client.complete_multipart_upload(**where, MultipartUpload={"Parts": named})
    body = client.get_object(Bucket=BUCKET, Key="begun")["Body"].read()
    assert body == data(b"part", PART) + b"last"


def _path(mount: Path, name: bytes) -> Path:
    return mount / os.fsdecode(name)


def _write(mount: Path, name: bytes, content: bytes) -> None:
    path = _path(mount, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
