"""Who makes a cluster, how its nodes may be called, and how a node is stopped that has none yet."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import ROOT, CannotStart, Node, best_mode, kvfs
from tests.integration.several import Several, members, several


@pytest.fixture
def cluster() -> Iterator[Several]:
    with several(1) as made:
        yield made


def another(cluster: Several, name: str, *flags: str) -> Node:
    """A node with a store of its own that is not started yet."""
    node = Node.make(best_mode(), *cluster.flags(name), *flags)
    cluster.nodes.append(node)
    return node


def test_a_name_is_that_of_one_node(cluster: Several) -> None:
    first = cluster.nodes[0]
    second = another(cluster, "n1")
    with pytest.raises(
        CannotStart, match=r"node 1 of this cluster is named n1 already.*--node-name"
    ):
        second.up()
    second.flags = cluster.flags("1")
    with pytest.raises(CannotStart, match="1 would be taken for another one's number"):
        second.up()
    second.flags = cluster.flags("n2")
    second.up()
    assert sorted(members(first)) == ["n1", "n2"]
    first.down()
    first.up()  # by its own name


def test_a_node_that_is_named_by_a_number_has_it(cluster: Several) -> None:
    another(cluster, "7").up()
    another(cluster, "n3").up()
    assert {name: each["number"] for name, each in members(cluster.nodes[0]).items()} == {
        "n1": 1,
        "7": 7,
        "n3": 8,
    }


def test_an_emptied_engine_is_no_new_one(cluster: Several) -> None:
    first = cluster.nodes[0]
    (first.mount / "models" / "lasting").write_text("x" * 1000)
    first.down()
    cluster.server.call("FLUSHALL")
    stranger = another(cluster, "stranger")
    own = ("--secret-file", str(stranger.home / "cluster.key"))
    stranger.flags += own
    with pytest.raises(CannotStart, match=r"was emptied.*kvfs rebuild --engine.*--found"):
        stranger.up()
    with_secret = another(cluster, "new")
    with pytest.raises(CannotStart, match=rf"{cluster.home}/cluster.key is of .*--found"):
        with_secret.up()
    assert cluster.server.call("DBSIZE") == 0
    stranger.flags += ("--found",)
    stranger.up()
    with pytest.raises(CannotStart, match="--replace"):
        first.up()
    stranger.down()
    secret = ("--secret-file", str(cluster.home / "cluster.key"))
    place = ("--store", str(first.store), "--engine", cluster.url, *secret)
    done = kvfs("rebuild", *place, "--replace", "--finish")
    assert done.returncode == 0, done.stderr
    first.up()
    assert (first.mount / "models" / "lasting").read_text() == "x" * 1000
    with pytest.raises(CannotStart, match="the engine of"):
        stranger.up()


def test_a_node_that_waits_for_its_engine_is_stopped(cluster: Several) -> None:
    cluster.server.kill()
    node = another(cluster, "waits")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVFS_S3": "off"}
    command = ("up", *node.place(), *node.flags)
    process = subprocess.Popen(
        [sys.executable, "-c", "from cli.main import main; main()", *command],
        cwd="/",
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        wait_until(lambda: "tried again" in process.stderr.readline(), "it waits")  # type: ignore[union-attr]
        done = kvfs("status", "--store", str(node.store))
        assert done.returncode
        assert "has not started yet" in done.stderr
        done = kvfs("down", *node.place(), "--timeout", "60")
        assert done.returncode == 0, done.stderr
        assert f"stopped the node on {node.store}" in done.stdout
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
        cluster.server.start()
