"""Nodes of a peer namespace that know a share of who holds its names, and ask each other for the
rest: three that come to that by themselves, with one name that is more than each may know."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfs
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node
from tests.integration.harness import kvfs as command
from tests.integration.several import Several, paused, several

NODES = 3
FLAGS = ("--s3", "off", "--admin", "off", "--names-everywhere", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(NODES, *FLAGS) as cluster:
        made = command(
            *("namespace", "create", "blocks", "--kind", "cache", "--coherence", "peer"),
            *("--store", str(cluster.nodes[0].store)),
        )
        assert made.returncode == 0, made.stderr
        for number, node in enumerate(cluster.nodes):
            wait_until((node.mount / "blocks").is_dir, "the namespace is known")
            for block in range(4):
                (node.mount / "blocks" / f"first-{number}-{block}").write_bytes(b"first")
        for node in cluster.nodes:
            wait_until(lambda node=node: is_home(node), "it is a home", 120)
        yield cluster


def names(node: Node) -> Any:
    return node.status()["cluster"]["names"]


def is_home(node: Node) -> bool:
    homes = (names(node) or {}).get("homes")
    return homes is not None and homes["nodes"] == NODES and homes["ready"] == homes["ranges"] > 0


def can_read(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except FileNotFoundError:
        return False


def counter(node: Node, name: str) -> int:
    found = node.status()["counters"][name]
    assert isinstance(found, int)
    return found


def blocks(node: Node) -> Path:
    return node.mount / "blocks"


def test_a_block_is_found_by_a_question_to_a_home(cluster: Several) -> None:
    writer, _, reader = cluster.nodes
    made = {f"block-{number}": b"%d" % number * 1000 for number in range(48)}
    before = counter(reader, "home_requests")
    for name, content in made.items():
        draft = blocks(writer) / f"{name}.tmp"
        draft.write_bytes(content)
        draft.rename(blocks(writer) / name)
    for name, content in made.items():
        path = blocks(reader) / name
        wait_until(lambda path=path, content=content: can_read(path, content), f"{path} is read")
        assert not path.with_suffix(".tmp").exists()
    assert counter(reader, "home_requests") > before
    # A busy machine may miss the half second that a home has to answer, not each time.
    assert counter(reader, "home_questions_unanswered") < counter(reader, "home_questions")
    assert names(writer)["tombstones"] < len(made) // 2  # names of a moment cost few
    with kvfs.Client(reader.store) as client:
        asked = counter(reader, "home_requests")
        found = client.exists([f"/blocks/none-{number}" for number in range(512)])
        assert found == [False] * 512
        assert 1 <= counter(reader, "home_requests") - asked <= 32  # 64 or so would be one by one


def listed(node: Node) -> list[str]:
    try:
        return sorted(os.listdir(blocks(node) / "deep/er"))
    except FileNotFoundError:  # the directory is not known there yet
        return []


def test_lists_and_removals_reach_all(cluster: Several) -> None:
    first, second, third = cluster.nodes
    (blocks(first) / "deep/er").mkdir(parents=True)
    (blocks(first) / "deep/er/here").write_bytes(b"here")
    (blocks(second) / "deep/er").mkdir(parents=True, exist_ok=True)
    (blocks(second) / "deep/er/there").write_bytes(b"there")
    wait_until(lambda: listed(third) == ["here", "there"], "both are listed")
    (blocks(third) / "deep/er/here").unlink()
    wait_until(lambda: not (blocks(first) / "deep/er/here").exists(), "it is removed")
    wait_until(lambda: listed(second) == ["there"], "and listed nowhere")


def test_a_home_that_does_not_answer_delays_no_look_up_for_long(cluster: Several) -> None:
    writer, home, reader = cluster.nodes
    for number in range(24):
        (blocks(writer) / f"late-{number}").write_bytes(b"late")
    paths = [f"/blocks/late-{number}" for number in range(24)]
    with kvfs.Client(reader.store) as client:
        wait_until(lambda: client.exists(paths) == [True] * 24, "they are found")
        with paused(home):
            wait_until(
                lambda: client.exists([*paths, "/blocks/none"]) == [*[True] * 24, False],
                "the other home answers, which has half a second each time",
            )
    home.kill()
    for number in range(1, 24):
        path = blocks(reader) / f"late-{number}"
        wait_until(lambda path=path: can_read(path, b"late"), f"{path} is read")
    home.up()
    wait_until(lambda: is_home(home), "it is a home again", 60)
    (blocks(writer) / "after").write_bytes(b"after")
    wait_until(lambda: can_read(blocks(home) / "after", b"after"), "it finds names by others")
    wait_until(lambda: can_read(blocks(reader) / "after", b"after"), "and others by it")


def knows_any(node: Node) -> bool:
    found = names(node) or {"own": 0, "others": 0}
    return bool(found["own"] + found["others"])


def test_each_node_knows_all_again_where_there_are_few_names(cluster: Several) -> None:
    kept = blocks(cluster.nodes[0]) / "kept"
    kept.write_bytes(b"kept")

    def knows_all(node: Node) -> bool:
        """What a busy home did not tell of in time is listed, and removed, the next time."""
        for name in os.listdir(blocks(node)):
            if name != "kept":
                subprocess.run(["rm", "-rf", blocks(node) / name], check=False)
        return names(node)["homes"] is None

    for node in cluster.nodes:
        knows_all(node)
    for node in cluster.nodes:
        wait_until(lambda node=node: knows_all(node), "it knows all", 120)
    for node in cluster.nodes:
        wait_until(lambda node=node: can_read(blocks(node) / "kept", b"kept"), "it is read")
        wait_until(lambda node=node: knows_any(node), "and known")
