"""The engine's server has no memory left: what removes passes, what adds is refused, and reads go
on."""

import errno
import os
from collections.abc import Iterator

import pytest

from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.posix import refused
from tests.integration.s3 import S3, users_of
from tests.integration.s3 import refused as s3_refused
from tests.integration.several import Several, several

FLAGS = ("--s3", "127.0.0.1:0", "--s3-workers", "1", "--admin", "127.0.0.1:0")


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(1, *FLAGS) as made:
        yield made


def beat(cluster: Several) -> int:
    """How often the node has renewed its lease."""
    (leases,) = (key for key in cluster.server.call("KEYS", "*") if key.endswith(b"l"))
    return int(cluster.server.call("HGET", leases, "1").split()[1])


def test_a_full_engine_is_emptied_and_read(cluster: Several) -> None:
    (node,) = cluster.nodes
    models = node.mount / "models"
    for number in range(20):
        (models / f"{number}").write_bytes(b"x" * number)
    with users_of(node) as users:
        s3 = S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)}).client("admin")
    cluster.server.call("CONFIG", "SET", "maxmemory", "1")
    beaten = beat(cluster)
    with refused(errno.ENOSPC):
        (models / "new").write_bytes(b"x")
    for number in range(20):
        assert (models / f"{number}").read_bytes() == b"x" * number
    assert s3.get_object(Bucket="models", Key="3")["Body"].read() == b"xxx"
    with s3_refused(507, "InsufficientStorage"):
        s3.put_object(Bucket="models", Key="new", Body=b"x")
    for number in range(5):
        (models / f"{number}").unlink()
        s3.delete_object(Bucket="models", Key=f"{10 + number}")
    left = {str(number) for number in (*range(5, 10), *range(15, 20))}
    assert set(os.listdir(models)) - {"new"} == left
    assert node.status()["engine"]["is_full"]
    assert "MEMORY IS FULL" in kvfs("status", "--store", str(node.store)).stdout
    wait_until(lambda: beat(cluster) >= beaten + 2, "the lease is renewed")
    cluster.server.call("CONFIG", "SET", "maxmemory", "0")
    (models / "new").write_bytes(b"x")
    assert not node.status()["engine"]["is_full"]
