"""Nodes whose engine is a shard of a Redis cluster, with their mounts."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.meta.redis.slots import slot_of
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisCluster, killed
from tests.integration.harness import kvfs
from tests.integration.several import Several, several

SLOT = slot_of("kvfs", 0)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"), timeout_ms=3_000)) as cluster:
        cluster.add_replica(cluster.owner(SLOT))
        yield cluster


@pytest.fixture(scope="module")
def nodes(redis: RedisCluster) -> Iterator[Several]:
    with several(2, url=redis.url) as made:
        yield made


def test_doctor_and_status_name_the_engine(nodes: Several, redis: RedisCluster) -> None:
    store = str(nodes.nodes[0].store)
    told = json.loads(kvfs("doctor", "--json", "--store", store).stdout)["paths"]
    (line,) = [each for each in told if each["name"] == "shared engine"]
    assert line["active"]
    assert redis.url in line["reason"]
    assert f"by 127.0.0.1:{redis.owner(SLOT).port}" in line["reason"]
    assert redis.url in nodes.nodes[0].status()["engine"]["name"]


def test_metadata_are_copied_out_of_it(nodes: Several, redis: RedisCluster, tmp_path: Path) -> None:
    (nodes.nodes[0].mount / "models" / "copied").write_bytes(b"data")
    out = kvfs("engine", "copy", redis.url, str(tmp_path / "backup"))
    assert out.returncode == 0, out.stderr
    listed = kvfs("namespace", "list", "--store", str(tmp_path / "backup"))
    assert "models" in listed.stdout
    over = kvfs("engine", "copy", str(tmp_path / "backup"), redis.url, "--replace")
    assert over.returncode == 4, "nodes live there"
    assert "stop all nodes first" in over.stderr
    assert (nodes.nodes[1].mount / "models" / "copied").read_bytes() == b"data"


def test_nodes_go_on_when_the_server_of_their_shard_is_killed(
    nodes: Several, redis: RedisCluster
) -> None:
    here, there = (node.mount / "models" for node in nodes.nodes)
    (here / "before").write_bytes(b"1")
    assert (there / "before").read_bytes() == b"1"
    master, replica = redis.owner(SLOT), redis.replicas[0]
    written = int(master.info("master_repl_offset"))
    wait_until(lambda: int(replica.info("slave_repl_offset")) >= written, "it is replicated")
    master.kill()
    wait_until(lambda: is_written(here / "after"), "the engine is heard again")
    assert (there / "after").read_bytes() == b"2"
    assert (there / "before").read_bytes() == b"1"
    assert replica.info("role") == "master"


def is_written(path: Path) -> bool:
    """False: the server is not replaced yet."""
    with contextlib.suppress(OSError):
        path.write_bytes(b"2")
        return True
    return False
