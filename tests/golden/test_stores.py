"""Stores that an earlier version left, in order or by a SIGKILL, are opened by this one: every
file, object and attribute is read back, and nothing is found to repair."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.client import Client
from kvfs.meta.redis.slots import slot_of
from kvfs.tree import namespaces
from tests.contract import redis_servers
from tests.contract.hosts import NOW, TOP, two_hosts
from tests.contract.redis_servers import RedisCluster, RedisServer
from tests.golden.conftest import VERSION, Running, running
from tests.golden.golden import hold
from tests.golden.stores import contents
from tests.integration.harness import kvfs


@pytest.fixture(params=["lone", "cluster"])
def killed(request: pytest.FixtureRequest) -> Iterator[Running]:
    with running(f"{VERSION}-{request.param}-killed") as found:
        yield found


def test_a_lone_node_s_store(lone: Running) -> None:
    check(lone)
    assert lone.node.status()["engine"]["is_upgraded"]


def test_a_store_of_a_cluster_s_node(cluster: Running) -> None:
    """Its metadata keep their form until somebody asks for the next."""
    check(cluster)
    assert not cluster.node.status()["engine"]["is_upgraded"]
    done = kvfs("node", "finish-upgrade", "--store", str(cluster.node.store))
    assert done.returncode == 0, done.stderr
    assert cluster.node.status()["engine"]["is_upgraded"]
    check_files(cluster)


def test_the_layout_of_an_engine(cluster: Running) -> None:
    assert cluster.server is not None
    hold("engine.txt", layout_of(cluster.server))


def test_the_layout_of_an_engine_whose_namespaces_were_spread(tmp_path: Path) -> None:
    """That of the registry, and of a namespace's shard, with what says that it was moved there."""
    with redis_servers.killed(RedisCluster(tmp_path / "redis")) as redis:
        with two_hosts(tmp_path, f"{redis.url}?prefix=kvfs") as (one, _):
            assert one.mirror.call(one.mirror.engine.spread) == [1]
            one.write(lambda t: namespaces.set_policy(t, 1, now=NOW, capacity=1 << 30))
            one.close_file(one.create(TOP, b"name"))
        lines = [
            line
            for shard in (0, 1)
            for line in layout_of(redis.owner(slot_of("kvfs", shard)), shard)
        ]
    hold("engine_spread.txt", lines)


def layout_of(server: RedisServer, shard: int = 0) -> list[str]:
    """Keys of Redis, fields of its hash of state, and of the log's entries."""
    call, lines = server.call, list[str]()
    for key in sorted(call("KEYS", f"{{*:{shard}}}*")):
        lines.append(f"{key.decode()}: {call('TYPE', key)}")
        if key.endswith(b"s"):
            fields = {field.decode().partition(":")[:2] for field in call("HKEYS", key)}
            lines += [f"    {name}{':*' if colon else ''}" for name, colon in sorted(fields)]
        if key.endswith(b"x"):
            ((_, fields),) = call("XRANGE", key, "-", "+", "COUNT", 1)
            lines += [f"    {name.decode()}" for name in fields[::2]]
    return lines


def test_stores_of_killed_nodes(killed: Running) -> None:
    check(killed)


def check(opened: Running) -> None:
    contents.check_objects(opened.s3.client("main"), opened.ids)
    check_files(opened)


def check_files(opened: Running) -> None:
    """By the mount, and by a client."""
    contents.check(opened.node.mount)
    with Client(opened.node.store) as client:
        for name, size in contents.FILES.items():
            assert client.get(name) == contents.data(name, size), name
        (found,) = client.get_many(["/models/weights"], verify=True)
        assert found == contents.data(b"models/weights", contents.FILES[b"models/weights"])
