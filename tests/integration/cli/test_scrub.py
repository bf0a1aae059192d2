"""`kvfs scrub` on a running node: what users see of files that the disk has damaged."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.posix import refused

LATEST_S = 120.0


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = start(Node.make(best_mode()))
    yield made
    made.remove()


def until(node: Node, field: str, least: int) -> None:
    """This counter has come so far."""
    wait_until(lambda: node.status()["counters"][field] >= least, f"{field} is {least}", LATEST_S)


def spoil(node: Node, path: Path) -> None:
    ino = path.stat().st_ino
    [data] = (node.store / "data").glob(f"*/{ino:016x}.*")
    with data.open("r+b") as file:
        file.write(b"x")


def quarantined(node: Node) -> list[dict[str, Any]]:
    done = kvfs("quarantine", "--store", str(node.store), "--json")
    assert done.returncode == 0, done.stderr
    listed: list[dict[str, Any]] = json.loads(done.stdout)
    return listed


def test_what_the_disk_damaged_is_a_miss_or_an_error_and_never_read(node: Node) -> None:
    lost, kept = node.mount / "cache" / "lost", node.mount / "models" / "kept"
    whole = node.mount / "models" / "whole"
    for path in (lost, kept, whole):
        path.write_bytes(bytes(100_000))
    until(node, "sealed_files", 3)
    spoil(node, lost)
    spoil(node, kept)
    done = kvfs("scrub", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    until(node, "scrub_damaged", 2)
    wait_until(lambda: not lost.exists(), "the lost one is a miss", LATEST_S)
    wait_until(lambda: node.status()["quarantine"]["files"] == 1, "one is quarantined", LATEST_S)
    with refused(errno.EIO):
        kept.read_bytes()
    assert whole.read_bytes() == bytes(100_000)
    [left] = quarantined(node)
    assert Path(left["path"]).read_bytes() == b"x" + bytes(99_999)
    assert (left["reason"], left["last_name"]) == ("damaged", "/models/kept")
    shown = kvfs("status", "--store", str(node.store)).stdout
    assert "2 were damaged" in shown
    assert "in quarantine: 1 data files" in shown
    done = kvfs("quarantine", "--store", str(node.store), "--empty", left["path"])
    assert (done.returncode, done.stdout[:20]) == (0, "1 data files removed")
    assert node.status()["quarantine"] == {"files": 0, "used_bytes": 0}
    assert quarantined(node) == []
    assert "models/kept is damaged" in node.log


def test_a_name_gives_no_orders_to_terminals_and_no_lines_to_the_log(node: Node) -> None:
    """Whoever may create files chooses their names; root reads them."""
    path = node.mount / "models" / "a\n2026 ERROR forged\x1b[2J"
    before = node.status()["counters"]
    path.write_bytes(bytes(100_000))
    until(node, "sealed_files", before["sealed_files"] + 1)
    spoil(node, path)
    assert kvfs("scrub", "--store", str(node.store)).returncode == 0
    until(node, "scrub_damaged", before["scrub_damaged"] + 1)
    wait_until(lambda: node.status()["quarantine"]["files"] == 1, "it is quarantined", LATEST_S)
    assert r"models/a\n2026 ERROR forged\x1b[2J is damaged" in node.log
    [left] = quarantined(node)
    os.mkfifo(
        Path(left["path"]).with_name(f"{1:016x}.1.1.damaged")
    )  # who opens it for reading waits
    shown = kvfs("quarantine", "--store", str(node.store))
    assert shown.returncode == 0
    assert r"  /models/a\n2026 ERROR forged\x1b[2J, 97.7 KiB" in shown.stdout
    assert kvfs("quarantine", "--store", str(node.store), "--empty").returncode == 0
