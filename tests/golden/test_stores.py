"""Stores that an earlier version left, in order or by a SIGKILL, are opened by this one: every
file, object and attribute is read back, and nothing is found to repair."""

from collections.abc import Iterator

import pytest

from kvfs.client import Client
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
    """Keys of Redis, fields of its hash of state, and of the log's entries."""
    assert cluster.server is not None
    call, lines = cluster.server.call, []
    for key in sorted(call("KEYS", "*")):
        lines.append(f"{key.decode()}: {call('TYPE', key)}")
        if key.endswith(b"s"):
            fields = {field.decode().partition(":")[:2] for field in call("HKEYS", key)}
            lines += [f"    {name}{':*' if colon else ''}" for name, colon in sorted(fields)]
        if key.endswith(b"x"):
            ((_, fields),) = call("XRANGE", key, "-", "+", "COUNT", 1)
            lines += [f"    {name.decode()}" for name in fields[::2]]
    hold("engine.txt", lines)


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
