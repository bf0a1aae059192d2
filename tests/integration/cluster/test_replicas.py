"""Copies of files on three nodes, each its own zone: made, waited for, restored, moved, mended."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs
from tests.integration.several import Several, several

DEADLINE_S = 150
"""A lease ends after ten seconds; the machine may be a slow one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(0) as made:
        for zone in "abc":
            made.add("--zone", zone, "--capacity", "4GiB")
        made.wait_for_room()
        yield made


def until(condition: Callable[[], Any], what: str) -> None:
    wait_until(condition, what, DEADLINE_S)


def namespace(node: Node, name: str, *policy: str) -> Path:
    """A namespace with a policy; where the node's mount has it."""
    done = kvfs("namespace", "create", name, *policy, "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    return node.mount / name


def data_file(node: Node, ino: int) -> Path | None:
    """Where the node has the file's data; None where it has them not, or not all of them."""
    found = (node.store / "data").glob(f"[0-9a-f][0-9a-f][0-9a-f]/{ino:016x}.*")
    return next(found, None)


def copies(cluster: Several, ino: int) -> list[int]:
    """Which nodes have a data file of it."""
    return [number for number, node in enumerate(cluster.nodes) if data_file(node, ino) is not None]


def recorded_copies(node: Node, path: str) -> int:
    """How many copies all nodes know of: a data file comes a moment before."""
    done = kvfs("where", "--json", path, "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    return len(json.loads(done.stdout)["copies"])


def test_what_is_closed_gets_a_replica_in_another_zone(cluster: Several) -> None:
    one = cluster.nodes[0]
    place = namespace(one, "twice", "--replicas", "1")
    content = os.urandom(5 << 20)
    (place / "a").write_bytes(content)
    ino = (place / "a").stat().st_ino
    until(lambda: len(copies(cluster, ino)) == 2, "a second copy")
    for node in cluster.nodes:
        assert (node.mount / "twice" / "a").read_bytes() == content


def test_a_close_that_promises_copies_returns_when_they_are_there(cluster: Several) -> None:
    one = cluster.nodes[0]
    place = namespace(one, "sure", "--replicas", "2", "--acknowledge", "sync")
    for number in range(5):
        path = place / f"{number}"
        path.write_bytes(os.urandom(100_000))
        assert copies(cluster, path.stat().st_ino) == [0, 1, 2]


def test_a_damaged_copy_is_replaced_by_a_good_one(cluster: Several) -> None:
    one = cluster.nodes[0]
    place = namespace(one, "mended", "--replicas", "1")
    content = os.urandom(100_000)
    (place / "a").write_bytes(content)
    ino = (place / "a").stat().st_ino
    until(lambda: len(copies(cluster, ino)) == 2, "a second copy")
    data = data_file(one, ino)
    assert data is not None
    with data.open("r+b") as file:
        file.write(b"damage")
    assert kvfs("scrub", "--store", str(one.store)).returncode == 0
    until(lambda: one.status()["counters"]["damage_mended"] == 1, "the copy to be mended")
    assert (place / "a").read_bytes() == content
    data = data_file(one, ino)
    assert data is not None
    assert data.read_bytes() == content
    assert one.status()["quarantine"]["files"] == 0


def test_what_a_drain_left_without_copies_is_said_and_copied_when_a_node_returns(
    cluster: Several,
) -> None:
    one = cluster.nodes[0]
    place = namespace(one, "left", "--replicas", "1")
    (place / "a").write_bytes(b"x" * 100_000)
    ino = (place / "a").stat().st_ino
    until(lambda: len(copies(cluster, ino)) == 2, "a second copy")
    drained = copies(cluster, ino)[1]
    away = cluster.nodes[3 - drained]
    away.down()
    drain = ("node", "drain", f"n{drained + 1}", "--store", str(one.store))
    assert kvfs(*drain).returncode == 0
    until(lambda: copies(cluster, ino) == [0], "the drained node has given it up")
    until(lambda: lacking(one) > 0, "it is said to lack copies")
    away.up()
    until(lambda: copies(cluster, ino) == [0, 3 - drained], "a copy on the node that returned")
    assert kvfs(*drain, "--stop").returncode == 0
    until(lambda: lacking(one) == 0, "all files have their copies")


def lacking(node: Node) -> int:
    """Files that lack copies, as a node's status says."""
    return sum(each["lacking_files"] for each in node.status()["cluster"]["nodes"])


def test_after_a_kill_reads_go_on_and_lost_copies_are_made_again(cluster: Several) -> None:
    one, two, three = cluster.nodes
    place = namespace(two, "lost", "--replicas", "1")
    contents = {f"{number}": os.urandom(50_000) for number in range(10)}
    for name, content in contents.items():
        (place / name).write_bytes(content)
    inos = {name: (place / name).stat().st_ino for name in contents}
    for name in contents:
        until(lambda: recorded_copies(one, f"/lost/{name}") == 2, "a second copy")  # noqa: B023
    two.kill()
    for name, content in contents.items():
        assert (one.mount / "lost" / name).read_bytes() == content
        assert (three.mount / "lost" / name).read_bytes() == content
    until(
        lambda: all(set(copies(cluster, ino)) >= {0, 2} for ino in inos.values()),
        "copies on both nodes that are left",
    )
    (one.mount / "lost" / "new").write_bytes(b"new")
    (one.mount / "lost" / "0").unlink()
    subprocess.run(["umount", "-l", str(two.mount)], check=True)
    two.up()
    assert (two.mount / "lost" / "new").read_bytes() == b"new"
    assert not (two.mount / "lost" / "0").exists()
    for name, content in list(contents.items())[1:]:
        assert (two.mount / "lost" / name).read_bytes() == content


def test_a_drained_node_gives_all_away_while_it_serves(cluster: Several) -> None:
    one, _, three = cluster.nodes
    place = namespace(three, "moved")
    content = os.urandom(300_000)
    (place / "a").write_bytes(content)
    ino = (place / "a").stat().st_ino
    assert copies(cluster, ino) == [2]
    done = kvfs("node", "drain", "n3", "--store", str(one.store))
    assert done.returncode == 0, done.stderr

    def is_drained() -> bool:
        assert (place / "a").read_bytes() == content
        return state_of(one, "n3") == "drained"

    until(is_drained, "the node to be drained")
    assert copies(cluster, ino) != [2]
    lack = "files lack copies"
    until(lambda: lack in kvfs("status", "--store", str(one.store)).stdout, "it is told")
    assert (one.mount / "moved" / "a").read_bytes() == content
    kvfs("node", "drain", "n3", "--stop", "--store", str(one.store))
    until(lambda: state_of(one, "n3") == "active", "the node to be active again")


def state_of(node: Node, name: str) -> str:
    [found] = [each for each in node.status()["cluster"]["nodes"] if each["name"] == name]
    return str(found["state"])


def test_an_engine_that_lost_all_gets_it_back_from_the_nodes(cluster: Several) -> None:
    contents = {}
    for number, node in enumerate(cluster.nodes):
        place = namespace(node, f"back{number}", "--replicas", str(number))
        (place / "d").mkdir()
        contents[f"back{number}/d/a"] = content = os.urandom(50_000)
        (place / "d" / "a").write_bytes(content)
        os.symlink("a", place / "d" / "link")
    for node in cluster.nodes:
        node.down()
    cluster.server.call("FLUSHALL")
    refused = kvfs("up", "--daemon", *cluster.nodes[0].place(), *cluster.nodes[0].flags)
    assert refused.returncode != 0
    assert "kvfs rebuild" in refused.stderr
    for node in cluster.nodes:
        last = ["--finish"] if node is cluster.nodes[-1] else []
        where = cluster.flags("any")
        flags = [*where[:2], *where[-2:], "--store", str(node.store), *last]
        done = kvfs("rebuild", *flags)
        assert done.returncode == 0, done.stderr
    for node in cluster.nodes:
        node.up()
    for node in cluster.nodes:
        for name, content in contents.items():
            assert (node.mount / name).read_bytes() == content
            assert (node.mount / name).with_name("link").read_bytes() == content
    (cluster.nodes[0].mount / "back0" / "new").write_bytes(b"new")
    assert (cluster.nodes[2].mount / "back0" / "new").read_bytes() == b"new"
