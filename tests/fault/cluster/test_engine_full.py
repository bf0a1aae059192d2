"""The engine's server has no memory left: what removes passes, what adds is refused, and reads go
on."""

import errno
import os
from collections.abc import Iterator

import pytest

from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.integration.coherence.coherence_clients import change, content, is_there, waits_for
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


def test_a_namespace_whose_names_the_engine_cannot_keep_stays_peer(cluster: Several) -> None:
    one, other = cluster.nodes[0], cluster.add()
    change(one, "create", "blocks", "--kind", "cache", "--coherence", "peer")
    wait_until((other.mount / "blocks").is_dir, "the other node knows it")
    names = [f"{at}-{number}" for at in range(2) for number in range(40)]
    for name in names:
        path = cluster.nodes[int(name[0])].mount / "blocks" / name
        path.write_bytes(content(name))
        os.setxattr(path, "user.long", bytes(60_000))
    used = int(cluster.server.info("used_memory"))
    cluster.server.call("CONFIG", "SET", "maxmemory", used + (2 << 20))
    change(one, "set", "blocks", "--coherence", "cache")
    wait_until(lambda: "waits" not in waits_for(one, "blocks"), "it is asked back", 60)
    assert "peer" in waits_for(one, "blocks")
    assert any("being peer: the memory of the engine" in each.log for each in cluster.nodes)
    for node in cluster.nodes:
        (node.mount / "blocks" / "new").write_bytes(b"x")
        (node.mount / "blocks" / "new").unlink()
    cluster.server.call("CONFIG", "SET", "maxmemory", "0")
    change(one, "set", "blocks", "--coherence", "cache")
    wait_until(lambda: "waits" not in waits_for(one, "blocks"), "it is done", 60)
    assert "peer" not in waits_for(one, "blocks")
    for node in cluster.nodes:
        for name in names:
            assert is_there(node.mount / "blocks" / name, name)
