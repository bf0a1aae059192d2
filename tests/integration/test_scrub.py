"""`kvfs scrub` on a running node: what users see of files that the disk has damaged."""

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import start
from tests.integration.harness import Node, best_mode, kvfs

DEADLINE_S = 120


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = start(Node.make(best_mode()))
    yield made
    made.remove()


def until(node: Node, field: str, least: int) -> dict[str, Any]:
    """The status, once this counter has come so far."""
    deadline = time.monotonic() + DEADLINE_S
    while (status := node.status())["counters"][field] < least:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def spoil(node: Node, path: Path) -> None:
    ino = path.stat().st_ino
    [data] = (node.store / "data").glob(f"*/{ino:016x}.*")
    with data.open("r+b") as file:
        file.write(b"x")


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
    status = until(node, "scrub_damaged", 2)
    deadline = time.monotonic() + DEADLINE_S
    while lost.exists() or not status["scrub"]["set_aside"]:
        assert time.monotonic() < deadline, node.log
        time.sleep(0.1)
        status = node.status()
    with pytest.raises(OSError) as error:
        kept.read_bytes()
    assert error.value.errno == errno.EIO
    assert whole.read_bytes() == bytes(100_000)
    [aside] = status["scrub"]["set_aside"]
    assert Path(aside).read_bytes() == b"x" + bytes(99_999)
    shown = kvfs("status", "--store", str(node.store)).stdout
    assert "2 were damaged" in shown and aside in shown.replace("\n", "")
    assert "models/kept is damaged" in node.log
