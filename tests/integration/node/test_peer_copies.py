"""Copies of blocks in namespaces that nodes keep themselves: three nodes, with the metadata server
paused throughout; the last test kills one of them, which are its own."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.harness import kvfs as command
from tests.integration.several import Several, several

FLAGS = {
    "blocks": ("--replicas", "1"),
    "sure": ("--replicas", "1", "--acknowledge", "sync"),
    "twice": ("--replicas", "2"),
    "small": ("--capacity", "64MiB"),  # a node begins with a quarter
}
BLOCKS = {f"block-{number}": b"%d" % number * 20_000 for number in range(40)}


def names(node: Node) -> Any:
    return node.status()["cluster"]["names"]


def counter(node: Node, name: str) -> int:
    found = node.status()["counters"][name]
    assert isinstance(found, int)
    return found


def make(node: Node, name: str, *flags: str) -> None:
    made = command(
        *("namespace", "create", name, "--kind", "cache", "--coherence", "peer", *flags),
        *("--store", str(node.store)),
    )
    assert made.returncode == 0, made.stderr


@contextmanager
def three_nodes(namespaces: Mapping[str, Sequence[str]]) -> Iterator[Several]:
    """Nodes that hold nothing, with namespaces by name and flags."""
    with several(3) as cluster:
        for name, flags in namespaces.items():
            make(cluster.nodes[0], name, *flags)
        for node in cluster.nodes:
            for name in namespaces:
                wait_until((node.mount / name).is_dir, "the namespace is known")
                first = node.mount / name / f"first-{node.mount.parent.name}"
                first.write_bytes(b"")  # takes numbers for files
                first.unlink()
            wait_until(lambda node=node: names(node) is not None, "it takes part")
        for node in cluster.nodes:
            wait_until(lambda node=node: names(node)["members"] == 3, "it sees the others")
        cluster.wait_for_room()
        wait_until(lambda: held(cluster.nodes) == 0, "what took numbers has gone")
        yield cluster


@contextmanager
def server_stopped(cluster: Several) -> Iterator[list[Node]]:
    """The nodes, while the metadata server is paused."""
    cluster.server.signal(signal.SIGSTOP)
    try:
        yield cluster.nodes
    finally:
        cluster.server.signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def three() -> Iterator[Several]:
    with three_nodes(FLAGS) as cluster:
        yield cluster


@pytest.fixture
def paused(three: Several) -> Iterator[list[Node]]:
    with server_stopped(three) as nodes:
        yield nodes


@pytest.fixture
def paused_anew() -> Iterator[list[Node]]:
    """Nodes among which no copies of other tests are under way: all that they hold counts."""
    with three_nodes({"blocks": FLAGS["blocks"]}) as cluster, server_stopped(cluster) as nodes:
        yield nodes


def own(node: Node) -> int:
    """Once all were announced."""
    wait_until(lambda: not names(node)["unannounced"], "it has announced all")
    found = names(node)["own"]
    assert isinstance(found, int)
    return found


def held(nodes: list[Node]) -> int:
    """The names that all of them hold together: those of the blocks, each copy one."""
    return sum(own(node) for node in nodes)


def made_by(nodes: Sequence[Node]) -> int:
    return sum(counter(node, "peer_copies_made") for node in nodes)


def has(node: Node, path: Path) -> bool:
    """Whether a node has the data of a file."""
    return bool(list((node.store / "data").glob(f"???/{path.stat().st_ino:016x}.*")))


@contextmanager
def stopped(nodes: Sequence[Node]) -> Iterator[None]:
    for node in nodes:
        assert node.pid is not None
        os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for node in nodes:
            assert node.pid is not None
            os.kill(node.pid, signal.SIGCONT)


def at(node: Node, name: str) -> Path:
    return node.mount / "blocks" / name


def test_a_close_that_promises_copies_returns_when_another_node_has_one(
    paused: list[Node],
) -> None:
    writer, *others = paused
    before, made = held(others), counter(writer, "peer_closes_acknowledged")
    for number in range(5):
        (writer.mount / "sure" / f"f{number}").write_bytes(b"s" * 10_000)
        assert counter(writer, "peer_closes_acknowledged") >= made + number + 1
    wait_until(lambda: held(others) == before + 5, "they tell of them")
    with stopped(others), pytest.raises(OSError, match="Input/output error"):
        (writer.mount / "sure" / "f9").write_bytes(b"nobody takes it")
    assert (writer.mount / "sure" / "f9").read_bytes() == b"nobody takes it"


def test_two_contents_of_one_name_stay_apart_and_are_told(paused: list[Node]) -> None:
    for number, node in enumerate(paused[:2]):
        (node.mount / "twice" / "same").write_bytes(b"%d" % number * 1000)
    wait_until(lambda: counter(paused[0], "peer_names_differing") == 1, "it is told")
    told = names(paused[0])["differing"]
    assert [each["path"] for each in told] == ["same"]
    shown = " ".join(command("status", "--store", str(paused[0].store)).stdout.split())
    assert "1 names have other content on other nodes, the last same on node" in shown
    for number, node in enumerate(paused[:2]):
        assert (node.mount / "twice" / "same").read_bytes() == b"%d" % number * 1000


def test_copies_that_others_keep_go_before_what_is_here_alone(paused: list[Node]) -> None:
    here, there, _ = paused
    alone = {f"alone{number}": os.urandom(1 << 20) for number in range(4)}
    shared = {f"shared{number}": os.urandom(1 << 20) for number in range(4)}
    for name, content in alone.items():
        (here.mount / "small" / name).write_bytes(content)
    sealed = counter(there, "sealed_files")
    for name, content in shared.items():
        (there.mount / "small" / name).write_bytes(content)
    wait_until(lambda: counter(there, "sealed_files") >= sealed + 4, "they are sealed")
    for name, content in shared.items():
        wait_until((here.mount / "small" / name).is_file, "it is found")
        assert (here.mount / "small" / name).read_bytes() == content
    for number in range(6):
        (here.mount / "small" / f"more{number}").write_bytes(os.urandom(1 << 20))
    wait_until(
        lambda: 0 < counter(here, "peer_copies_let_go") == counter(there, "peer_copies_promised"),
        "some go, and each was promised to be kept",
    )
    for name in alone:
        assert has(here, here.mount / "small" / name)
    for name in shared:
        assert has(there, there.mount / "small" / name)


def test_blocks_of_a_killed_node_are_found_and_copied_again(paused_anew: list[Node]) -> None:
    killed, *rest = paused_anew
    for name, content in BLOCKS.items():
        at(killed, name).write_bytes(content)
    wait_until(lambda: held(paused_anew) == 2 * len(BLOCKS), "each has two copies")
    assert counter(killed, "peer_copy_requests") <= 40  # not one a block
    made = made_by(rest)
    killed.kill()
    assert held(rest) == len(BLOCKS)
    for node in rest:
        assert all(at(node, name).stat().st_size == len(BLOCKS[name]) for name in BLOCKS)
    wait_until(lambda: made_by(rest) >= made + len(BLOCKS), "each has two copies again", 60)
    for name, content in BLOCKS.items():
        assert at(rest[0], name).read_bytes() == at(rest[1], name).read_bytes() == content
