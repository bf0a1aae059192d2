"""One namespace over S3 on two nodes: what one answered for is true on the other."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from botocore.exceptions import ClientError

from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.s3 import S3, code_of, refused, users_of
from tests.integration.several import several

MIB = 1 << 20
PART = 5 << 20


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[S3, S3]]:
    flags = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")
    with several(2, *flags) as cluster, ExitStack() as closing:
        found = []
        for node in cluster.nodes:
            with users_of(node) as users:
                found.append(S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)}))
        first, second = found
        yield first, second
        for server in found:
            for client in server.clients.values():
                closing.callback(client.close)


def knows(server: S3, user: str) -> bool:
    try:
        server.client(user).list_buckets()
    except ClientError as error:
        assert code_of(error) == (403, "InvalidAccessKeyId")
        return False
    return True


def test_keys_and_buckets_are_those_of_all_nodes(servers: tuple[S3, S3]) -> None:
    first, second = servers
    assert first.users == second.users
    first.client(ADMINISTRATOR).create_bucket(Bucket="everywhere")
    names = [each["Name"] for each in second.client(ADMINISTRATOR).list_buckets()["Buckets"]]
    assert "everywhere" in names
    second.users["new"] = first.add_user("new")
    # Who may what is read as it is on the node, which is told of it within milliseconds.
    wait_until(lambda: knows(second, "new"), "the other node knows the new key")


def test_what_one_answered_for_is_seen_on_the_other_at_once(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="strict")
    for number in range(20):
        with refused(404, "NoSuchKey"):
            there.get_object(Bucket="strict", Key=f"k{number}")
        here.put_object(Bucket="strict", Key=f"k{number}", Body=b"x" * number)
        assert there.head_object(Bucket="strict", Key=f"k{number}")["ContentLength"] == number
        assert (second.mount / "strict" / f"k{number}").stat().st_size == number
        body = there.get_object(Bucket="strict", Key=f"k{number}")["Body"].read()
        assert body == b"x" * number
    listed = there.list_objects_v2(Bucket="strict")["Contents"]
    assert {each["Key"] for each in listed} == {f"k{number}" for number in range(20)}
    there.delete_object(Bucket="strict", Key="k0")
    with refused(404, "404"):
        here.head_object(Bucket="strict", Key="k0")
    assert not (first.mount / "strict" / "k0").exists()


def test_an_md5_that_the_other_node_computes_is_waited_for(servers: tuple[S3, S3]) -> None:
    """A file is sealed where it was written; until then it has no ETag that stays."""
    first, second = servers
    there = second.client(ADMINISTRATOR)
    first.client(ADMINISTRATOR).create_bucket(Bucket="summed")
    done = kvfs(
        "namespace", "set", "/summed", "--etag", "md5-all", "--store", str(first.node.store)
    )
    assert done.returncode == 0, done.stderr
    for number, data in enumerate((b"first", bytes(MIB), b"third")):
        (first.mount / "summed" / f"k{number}").write_bytes(data)
        md5 = f'"{hashlib.md5(data).hexdigest()}"'
        named = {"Bucket": "summed", "Key": f"k{number}"}
        looks: list[Callable[[], str]] = [
            partial(_etag, there.head_object, named),
            partial(_etag, there.get_object, named),
            lambda: str(there.list_objects_v2(Bucket="summed")["Contents"][-1]["ETag"]),
        ]
        for look in looks[number:] + looks[:number]:
            assert look() == md5


def _etag(operation: Any, named: dict[str, str]) -> str:
    return str(operation(**named)["ETag"])


def test_of_conditional_puts_on_both_one_wins(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="conditional")
    for number in range(5):
        here.put_object(Bucket="conditional", Key=f"k{number}", Body=b"a", IfNoneMatch="*")
        with refused(412, "PreconditionFailed"):
            there.put_object(Bucket="conditional", Key=f"k{number}", Body=b"b", IfNoneMatch="*")


class Sent:
    """An upload whose parts are put by whichever client."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self.of = {"Bucket": bucket, "Key": key}
        self.of["UploadId"] = client.create_multipart_upload(**self.of)["UploadId"]
        self.parts: list[dict[str, Any]] = []
        self.data = b""

    def put(self, client: Any, size: int) -> None:
        number = len(self.parts) + 1
        data = random.Random(number).randbytes(size)
        sent = client.upload_part(**self.of, PartNumber=number, Body=data)
        self.sent(sent["ETag"], data)

    def copy(self, client: Any, source: str, first: int, data: bytes) -> None:
        number, last = len(self.parts) + 1, first + len(data) - 1
        sent = client.upload_part_copy(
            **self.of,
            PartNumber=number,
            CopySource=source,
            CopySourceRange=f"bytes={first}-{last}",
        )
        self.sent(sent["CopyPartResult"]["ETag"], data)

    def sent(self, tag: str, data: bytes) -> None:
        self.parts.append({"PartNumber": len(self.parts) + 1, "ETag": tag})
        self.data += data

    def listed(self, client: Any) -> list[dict[str, Any]]:
        found = client.list_parts(**self.of)["Parts"]
        return [{name: each[name] for name in ("PartNumber", "ETag")} for each in found]

    def complete(self, client: Any) -> None:
        client.complete_multipart_upload(**self.of, MultipartUpload={"Parts": self.parts})

    def check(self, client: Any) -> None:
        """That it is read whole, and in ranges over the seams of its parts."""
        key = {name: self.of[name] for name in ("Bucket", "Key")}
        for at in (0, PART - 7, 2 * PART - 1, len(self.data) - 20):
            ranged = client.get_object(**key, Range=f"bytes={at}-{at + 19}")
            assert ranged["Body"].read() == self.data[at : at + 20]
        assert client.get_object(**key)["Body"].read() == self.data


def data_of(server: S3) -> set[str]:
    """The data files of a node."""
    return {path.name for path in server.node.store.glob("data/???/*")}


@pytest.mark.parametrize("bucket", ["uploads", "cache"])
def test_an_upload_goes_on_at_another_node(servers: tuple[S3, S3], bucket: str) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    if bucket != "cache":
        here.create_bucket(Bucket=bucket)
    before = data_of(first)
    upload = Sent(here, bucket, "k")
    for size in (PART, PART, 1000):
        upload.put(here, size)
    sent = data_of(first) - before
    assert sent
    assert upload.listed(there) == upload.parts
    upload.complete(there)
    upload.check(there)
    with refused(404, "NoSuchUpload"):
        here.list_parts(**upload.of)
    if bucket == "cache":
        wait_until((first.mount / bucket / "k").exists, "the first node shows the object")
    upload.check(here)
    wait_until(lambda: not sent & data_of(first), "what the parts were in has gone")


@pytest.mark.parametrize("last", [0, 1])
def test_an_upload_has_its_parts_on_both_nodes(servers: tuple[S3, S3], last: int) -> None:
    clients = [each.client(ADMINISTRATOR) for each in servers]
    here, there = clients
    bucket = f"mixed{last}"
    here.create_bucket(Bucket=bucket)
    source = random.Random(7).randbytes(PART + 100)
    here.put_object(Bucket=bucket, Key="source", Body=source)
    upload = Sent(here, bucket, "k")
    upload.put(here, PART)
    upload.put(there, PART)
    upload.copy(there, f"{bucket}/source", 50, source[50 : 50 + PART])
    upload.put(here, PART)
    upload.put(there, 1000)
    for client in clients:
        assert upload.listed(client) == upload.parts
    upload.complete(clients[last])
    for client in clients:
        upload.check(client)


def test_an_upload_that_is_aborted_elsewhere_leaves_nothing(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="aborted")
    before = data_of(first)
    upload = Sent(here, "aborted", "k")
    upload.put(here, PART)
    upload.put(here, 1000)
    assert data_of(first) - before
    there.abort_multipart_upload(**upload.of)
    wait_until(lambda: not data_of(first) - before, "the parts' data have gone")
    with refused(404, "NoSuchUpload"):
        here.list_parts(**upload.of)


def test_what_is_removed_by_either_leaves_nothing_on_both(servers: tuple[S3, S3]) -> None:
    """Replaced, deleted, completed, renamed over, and unlinked, with its data on both nodes."""
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="freed")
    before = data_of(first), data_of(second)
    for body in (b"a", b"b" * 100_000):
        for name in ("put", "over", "unlinked"):
            here.put_object(Bucket="freed", Key=name, Body=body)
            assert there.get_object(Bucket="freed", Key=name)["Body"].read() == body
    upload = Sent(here, "freed", "upload")
    for client, size in ((here, PART), (there, PART), (here, 1000)):
        upload.put(client, size)
    upload.complete(there)
    upload.check(here)
    assert data_of(first) - before[0]
    assert data_of(second) - before[1]
    there.delete_object(Bucket="freed", Key="upload")
    here.delete_object(Bucket="freed", Key="put")
    (second.mount / "freed" / "over").rename(second.mount / "freed" / "unlinked")
    (second.mount / "freed" / "unlinked").unlink()
    for server, were in zip(servers, before, strict=True):
        wait_until(lambda: not data_of(server) - were, "their data have gone")  # noqa: B023
        assert not list(server.node.store.glob("data/quarantine/*"))


def test_objects_are_copied_and_replaced_where_they_are_not(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="there")
    of = {"Bucket": "there", "Key": "k"}
    data = random.Random(3).randbytes(PART)
    tag = here.put_object(**of, Body=data, Metadata={"said": "here"})["ETag"]
    there.copy_object(Bucket="there", Key="copy", CopySource="there/k")
    copied = here.get_object(Bucket="there", Key="copy", Range="bytes=100-199")
    assert (copied["Metadata"], copied["ETag"]) == ({"said": "here"}, tag)
    assert copied["Body"].read() == data[100:200]
    with refused(412, "PreconditionFailed"):
        there.put_object(**of, Body=b"other", IfMatch='"other"')
    there.put_object(**of, Body=b"other", IfMatch=tag)
    with refused(412, "PreconditionFailed"):
        here.put_object(**of, Body=b"late", IfMatch=tag)
    assert here.get_object(**of)["Body"].read() == b"other"


def test_objects_of_a_cache_are_seen_soon(servers: tuple[S3, S3]) -> None:
    first, second = servers
    first.client(ADMINISTRATOR).put_object(Bucket="cache", Key="soon", Body=b"x")
    wait_until((second.mount / "cache" / "soon").exists, "the other node shows the object")
    there = second.client(ADMINISTRATOR)
    assert there.get_object(Bucket="cache", Key="soon")["Body"].read() == b"x"


def test_a_large_object_is_sent_as_its_data_come(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="large")
    data = random.Random(1).randbytes(72 << 20)
    for key in ("whole", "range", "copied"):
        here.put_object(Bucket="large", Key=key, Body=data)
    got = there.get_object(Bucket="large", Key="whole")
    assert got["ContentLength"] == len(data)
    assert got["Body"].read() == data
    at = len(data) - (3 << 20) - 1
    ranged = there.get_object(Bucket="large", Key="range", Range=f"bytes={at}-{at + 99}")
    assert ranged["Body"].read() == data[at : at + 100]
    there.copy_object(Bucket="large", Key="copy", CopySource="large/copied")
    assert here.get_object(Bucket="large", Key="copy")["Body"].read() == data


def test_without_its_holder_a_cached_object_is_a_miss(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="kept")
    here.put_object(Bucket="kept", Key="only", Body=b"kept")
    here.put_object(Bucket="cache", Key="only", Body=b"lost")
    wait_until((second.mount / "cache" / "only").exists, "the other node shows the object")
    first.node.down()
    with refused(503, "ServiceUnavailable"):
        there.get_object(Bucket="kept", Key="only")
    with refused(404, "NoSuchKey"):
        there.get_object(Bucket="cache", Key="only")
    first.node.up()
    wait_until(lambda: _is_there(there, "kept", "only"), "the holder is back")
    assert there.get_object(Bucket="kept", Key="only")["Body"].read() == b"kept"


def test_an_upload_outlives_a_kill_of_the_node_that_has_its_parts(servers: tuple[S3, S3]) -> None:
    first, second = servers
    there = second.client(ADMINISTRATOR)
    there.create_bucket(Bucket="killed")
    upload = Sent(there, "killed", "k")
    with _restarted(first) as here:
        for size in (PART, PART, 1000):
            upload.put(here, size)
        first.node.kill()
        with refused(503, "ServiceUnavailable"):
            upload.complete(there)
        first.node.up()
    with _restarted(first) as here:
        upload.complete(here)
        upload.check(here)
    upload.check(there)


@contextmanager
def _restarted(server: S3) -> Iterator[Any]:
    """A client of a node whose S3 has another port by now."""
    renewed = S3(server.node, server.users)
    try:
        yield renewed.client(ADMINISTRATOR)
    finally:
        for client in renewed.clients.values():
            client.close()


def _is_there(client: Any, bucket: str, key: str) -> bool:
    try:
        client.get_object(Bucket=bucket, Key=key)
    except ClientError as error:
        assert code_of(error)[0] == 503
        return False
    return True
