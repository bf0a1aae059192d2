"""Nodes whose data travel by movers: mounts, and what is said of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import lives, wait_until
from tests.integration.clients.environments import mooncake
from tests.integration.conftest import start
from tests.integration.harness import ROOT, CannotStart, Node, best_mode, kvfs
from tests.integration.several import Several, several

SIZE = 24 << 20


def having_mooncake() -> tuple[str, ...]:
    """What has a node find the package."""
    (packages,) = mooncake().parent.parent.glob("lib/python*/site-packages")
    return "env", f"PYTHONPATH={ROOT}:{packages}"


def add(cluster: Several) -> Node:
    flags = cluster.flags(f"n{len(cluster.nodes) + 1}")
    node = Node.make(best_mode(), *flags, "--transport", "rdma")
    node.inside = having_mooncake()
    cluster.nodes.append(node)
    return start(node)


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(0) as cluster:
        yield cluster


def test_a_file_is_read_on_another_node(cluster: Several) -> None:
    one, two = add(cluster), add(cluster)
    data = os.urandom(SIZE)
    (one.mount / "models" / "weights").write_bytes(data)
    assert (two.mount / "models" / "weights").read_bytes() == data
    counters = two.status()["counters"]
    assert counters["mover_bytes"] == SIZE
    assert not counters["mover_over_tcp"]
    assert "transport rdma" in kvfs("status", "--store", str(two.store)).stdout
    done = kvfs("doctor", "--json", "--store", str(two.store))
    lines = {each["name"]: each for each in json.loads(done.stdout)["paths"]}
    assert lines["transport rdma"]["active"] is True
    assert "Mooncake" in lines["transport rdma"]["reason"]
    mover = two.status()["cluster"]["rdma"]["process"]
    two.kill()
    wait_until(lambda: not lives(mover), "the mover of a killed node ends")


def test_without_the_package_a_node_does_not_start_so(cluster: Several, tmp_path: Path) -> None:
    node = Node.make(best_mode(), *cluster.flags("bare"), "--transport", "rdma")
    cluster.nodes.append(node)
    (tmp_path / "mooncake.py").write_text("raise ImportError('no such library')\n")
    node.inside = "env", f"PYTHONPATH={ROOT}:{tmp_path}"
    with pytest.raises(CannotStart, match=r"no such library.*kvfs\[rdma\]"):
        node.up()
