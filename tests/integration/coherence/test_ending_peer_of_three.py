"""A namespace ends being `peer` on three nodes while S3 receives objects and the parts of uploads:
none is lost, whether its bytes come before, during or after the change."""

import http.client
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.coherence.coherence_clients import change, content, is_there, waits_for
from tests.integration.harness import Node
from tests.integration.s3 import S3, users_of
from tests.integration.several import Several, paused, several

PART = 5 << 20
S3_FLAGS = ("--s3", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--s3-workers", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(0) as cluster:
        cluster.add(*S3_FLAGS)
        cluster.add()
        cluster.add()
        yield cluster


class SlowPut:
    """A request whose body comes in two halves."""

    def __init__(self, url: str, body: bytes) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        self._connection.putrequest("PUT", f"{where.path}?{where.query}")
        self._connection.putheader("Content-Length", str(len(body)))
        self._connection.endheaders(body[: len(body) // 2])
        self._rest = body[len(body) // 2 :]

    def end(self) -> tuple[int, str]:
        """Returns status and ETag."""
        self._connection.send(self._rest)
        answer = self._connection.getresponse()
        answer.read()
        self._connection.close()
        return answer.status, answer.headers.get("ETag", "")


def data_files(node: Node, top_ino: int) -> set[int]:
    """The numbers of the files of a namespace whose data a node has."""
    found = (node.store / "data").glob(f"???/{top_ino >> 48:04x}*")
    return {int(each.name[:16], 16) for each in found}


def test_what_s3_receives_meanwhile_is_there_afterwards(cluster: Several) -> None:
    one, other, third = cluster.nodes
    with users_of(one) as users:
        s3 = S3(one, {ADMINISTRATOR: users.find(ADMINISTRATOR)})
    client = s3.client(ADMINISTRATOR)
    change(one, "create", "parts", "--kind", "cache", "--coherence", "peer")
    for node in (other, third):
        wait_until((node.mount / "parts").is_dir, "all know it")
    names = [f"{at}-{each}" for at in range(3) for each in range(20)]
    for name in names:
        (cluster.nodes[int(name[0])].mount / "parts" / name).write_bytes(content(name))
    bodies = [os.urandom(PART), os.urandom(PART), os.urandom(1000)]
    named = {"Bucket": "parts", "Key": "d/whole"}
    named["UploadId"] = client.create_multipart_upload(**named)["UploadId"]
    aborted = {"Bucket": "parts", "Key": "aborted"}
    aborted["UploadId"] = client.create_multipart_upload(**aborted)["UploadId"]
    client.upload_part(**aborted, PartNumber=1, Body=bodies[0])
    etags = {1: client.upload_part(**named, PartNumber=1, Body=bodies[0])["ETag"]}

    def put(method: str, body: bytes, **parameters: object) -> SlowPut:
        return SlowPut(client.generate_presigned_url(method, Params=parameters), body)

    part = put("upload_part", bodies[1], **named, PartNumber=2)
    whole = put("put_object", bodies[1], Bucket="parts", Key="d/put")
    with paused(third):
        change(one, "set", "parts", "--coherence", "cache")
        wait_until(lambda: "waits" in waits_for(one, "parts"), "it is closed")
        late = put("upload_part", bodies[2], **named, PartNumber=3)
        (listed,) = client.list_parts(**named)["Parts"]
        assert listed["ETag"] == etags[1]
        assert client.get_object(Bucket="parts", Key="0-0")["Body"].read() == content("0-0")
    for number, request in ((2, part), (3, late)):
        status, etags[number] = request.end()
        assert status == 200
    assert whole.end()[0] == 200
    wait_until(lambda: "waits" not in waits_for(one, "parts"), "it is settled", 60)
    assert "peer" not in waits_for(one, "parts")
    wanted = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
    client.complete_multipart_upload(**named, MultipartUpload={"Parts": wanted})
    client.abort_multipart_upload(**aborted)
    for node in cluster.nodes:
        top = node.mount / "parts"
        for name in names:
            wait_until(lambda: is_there(top / name, name), f"{name} is there")  # noqa: B023
        wait_until((top / "d" / "whole").exists, "the upload is there")
        assert (top / "d" / "whole").read_bytes() == b"".join(bodies)
        assert (top / "d" / "put").read_bytes() == bodies[1]
    inos = {each.stat().st_ino for each in (one.mount / "parts").rglob("*") if each.is_file()}
    for node in cluster.nodes:
        top_ino = (node.mount / "parts").stat().st_ino
        wait_until(lambda: data_files(node, top_ino) <= inos, "nothing is left over")  # noqa: B023
    for each in s3.clients.values():
        each.close()
