"""Why a name is missing on a node of a cluster: what another node did to it, or cannot give."""

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

import kvfs
from kvfs.base import control
from kvfs.base.errors import NotFound
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.harness import kvfs as command
from tests.integration.posix import refused
from tests.integration.several import Several, several

MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    with several(2) as cluster:
        place = ("--store", str(cluster.nodes[0].store))
        done = command("namespace", "set", "cache", "--capacity", str(32 * MIB), *place)
        assert done.returncode == 0, done.stderr
        yield cluster


def status(node: Node) -> dict[str, Any]:
    told = control.call(node.store / "run" / "control.sock", "status")
    assert isinstance(told, dict)
    return told


def counted(node: Node, look: Callable[[], object]) -> dict[str, dict[str, int]]:
    """By how much it moves the counters of the node."""
    before = status(node)["misses"]
    look()
    after = status(node)["misses"]
    moved = {
        door: {reason: n - before[door][reason] for reason, n in counts.items()}
        for door, counts in after.items()
    }
    told = {door: {each: n for each, n in by.items() if n} for door, by in moved.items()}
    return {door: by for door, by in told.items() if by}


def by_mount(node: Node, name: str) -> None:
    with refused(errno.ENOENT):
        (node.mount / "cache" / name).read_bytes()


def by_client(node: Node, name: str) -> None:
    with kvfs.Client(node.store) as client, pytest.raises(NotFound):
        client.get(f"/cache/{name}")


def knows(node: Node, name: str) -> bool:
    with kvfs.Client(node.store) as client:
        return client.exists([f"/cache/{name}"]) == [True]


def test_what_another_node_evicted(nodes: Several) -> None:
    there, here = nodes.nodes
    for name in ("evicted-1", "evicted-2"):
        (there.mount / "cache" / name).write_bytes(bytes(4096))
        wait_until(lambda name=name: knows(here, name), "the other node knows it")
    for number in range(12):
        (there.mount / "cache" / f"later-{number}").write_bytes(bytes(4 * MIB))
    for name in ("evicted-1", "evicted-2"):
        wait_until(lambda name=name: not knows(here, name), "it is evicted", 60)
    assert counted(here, lambda: by_mount(here, "evicted-1")) == {"mount": {"evicted": 1}}
    assert counted(here, lambda: by_client(here, "evicted-2")) == {"client": {"evicted": 1}}


def test_what_another_node_is_changing(nodes: Several) -> None:
    """Of a cache: it is waited for a while."""
    there, here = nodes.nodes
    name = "changing"
    (there.mount / "cache" / name).write_bytes(b"before")
    wait_until(lambda: knows(here, name), "the other node knows it")

    def look() -> None:
        beside = threading.Thread(target=by_client, args=(here, name))
        beside.start()
        by_mount(here, name)
        beside.join()

    with (there.mount / "cache" / name).open("r+b", buffering=0) as file:
        file.write(b"after!")
        found = counted(here, look)
    assert found == {"mount": {"other_version": 1}, "client": {"other_version": 1}}


def test_what_is_on_a_node_that_died(nodes: Several) -> None:
    there, here = nodes.nodes
    for name in ("died-1", "died-2"):
        (there.mount / "cache" / name).write_bytes(bytes(4096))
        wait_until(lambda name=name: knows(here, name), "the other node knows it")
    there.kill()
    found = counted(here, lambda: by_mount(here, "died-1"))
    assert list(found) == ["mount"]
    assert list(found["mount"]) == ["unavailable"]
    assert counted(here, lambda: by_client(here, "died-2")) == {"client": {"unavailable": 1}}
    there.up()
