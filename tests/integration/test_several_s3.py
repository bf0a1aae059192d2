"""One namespace over S3 on two nodes: what one answered for is true on the other."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from botocore.exceptions import ClientError

from s3api.identities import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.s3 import S3, code_of, refused, users_of
from tests.integration.several import several


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


def test_of_conditional_puts_on_both_one_wins(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="conditional")
    for number in range(5):
        here.put_object(Bucket="conditional", Key=f"k{number}", Body=b"a", IfNoneMatch="*")
        with refused(412, "PreconditionFailed"):
            there.put_object(Bucket="conditional", Key=f"k{number}", Body=b"b", IfNoneMatch="*")


def test_an_upload_goes_on_at_another_node(servers: tuple[S3, S3]) -> None:
    first, second = servers
    here, there = first.client(ADMINISTRATOR), second.client(ADMINISTRATOR)
    here.create_bucket(Bucket="uploads")
    part = b"p" * (5 << 20)
    upload = here.create_multipart_upload(Bucket="uploads", Key="k")["UploadId"]
    of = {"Bucket": "uploads", "Key": "k", "UploadId": upload}
    sent = [here.upload_part(**of, PartNumber=number, Body=part)["ETag"] for number in (1, 2)]
    listed = there.list_parts(**of)["Parts"]
    assert [each["ETag"] for each in listed] == sent
    parts = [{"PartNumber": at + 1, "ETag": tag} for at, tag in enumerate(sent)]
    here.complete_multipart_upload(**of, MultipartUpload={"Parts": parts})
    assert there.head_object(Bucket="uploads", Key="k")["ContentLength"] == 2 * len(part)


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


def _is_there(client: Any, bucket: str, key: str) -> bool:
    try:
        client.get_object(Bucket=bucket, Key=key)
    except ClientError as error:
        assert code_of(error)[0] == 503
        return False
    return True
