"""minio's client for Python."""

import io
import os
import tempfile
import urllib.request
from datetime import timedelta
from pathlib import Path

from common import BUCKET, beside, both_ways
from configured import client
from minio.commonconfig import ComposeSource, CopySource, Tags
from minio.deleteobjects import DeleteObject
from minio.error import S3Error
from objects import MIB, content


def put(key: str, data: bytes) -> None:
    client.put_object(BUCKET, key, io.BytesIO(data), len(data))


def get(key: str, **options: int) -> bytes:
    response = client.get_object(BUCKET, key, **options)
    try:
        return response.read()
    finally:
        response.close()
        response.release_conn()


def names(prefix: str = "") -> list[str]:
    found = client.list_objects(BUCKET, prefix=prefix, recursive=True)
    return [entry.object_name for entry in found]


def delete(key: str) -> None:
    client.remove_object(BUCKET, key)


def files() -> None:
    """fput and fget; a body of unknown length goes in parts."""
    with tempfile.TemporaryDirectory() as home:
        source, copy = Path(home) / "source", Path(home) / "copy"
        source.write_bytes(content(12 * MIB))
        client.fput_object(BUCKET, "file", str(source), part_size=5 * MIB, metadata={"x": "y z"})
        assert beside("file").read_bytes() == source.read_bytes()
        client.fget_object(BUCKET, "file", str(copy))
        assert copy.read_bytes() == source.read_bytes()
    stat = client.stat_object(BUCKET, "file")
    assert stat.size == 12 * MIB
    assert stat.etag.endswith("-3")
    assert stat.metadata["x-amz-meta-x"] == "y z"
    assert os.getxattr(beside("file"), "user.s3.meta.x") == b"y z"
    stream = io.BytesIO(content(11 * MIB))
    client.put_object(BUCKET, "stream", stream, -1, part_size=5 * MIB)
    assert beside("stream").read_bytes() == content(11 * MIB)
    assert get("file", offset=5 * MIB - 3, length=7) == content(12 * MIB)[5 * MIB - 3 :][:7]


def copies() -> None:
    client.copy_object(BUCKET, "copied", CopySource(BUCKET, "file"))
    assert get("copied") == content(12 * MIB)
    put("tail", b"the end")
    sources = [ComposeSource(BUCKET, key) for key in ("file", "stream", "tail")]
    client.compose_object(BUCKET, "composed", sources)
    composed = content(12 * MIB) + content(11 * MIB) + b"the end"
    assert beside("composed").read_bytes() == composed


def tags() -> None:
    wanted = Tags.new_object_tags()
    wanted["colour"] = "green + blue"
    client.set_object_tags(BUCKET, "tail", wanted)
    assert client.get_object_tags(BUCKET, "tail") == wanted
    client.delete_object_tags(BUCKET, "tail")
    assert client.get_object_tags(BUCKET, "tail") is None


def presigned() -> None:
    url = client.presigned_put_object(BUCKET, "pre signed", expires=timedelta(minutes=1))
    request = urllib.request.Request(url, b"by URL", method="PUT")
    with urllib.request.urlopen(request) as response:
        assert response.status == 200
    url = client.presigned_get_object(BUCKET, "pre signed", expires=timedelta(minutes=1))
    with urllib.request.urlopen(url) as response:
        assert response.read() == b"by URL"


def buckets() -> None:
    name = BUCKET + "-more"
    client.make_bucket(name)
    assert client.bucket_exists(name)
    assert name in [bucket.name for bucket in client.list_buckets()]
    client.remove_bucket(name)
    assert not client.bucket_exists(name)


def removal() -> None:
    everything = [DeleteObject(name) for name in names()]
    assert not list(client.remove_objects(BUCKET, everything))
    assert not names()
    try:
        client.stat_object(BUCKET, "tail")
    except S3Error as error:
        assert error.code == "NoSuchKey"
    else:
        raise AssertionError("it is still there")


both_ways(put, get, names, delete, also=("two//slashes",))
files()
copies()
tags()
presigned()
buckets()
removal()
