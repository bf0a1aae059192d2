"""A miss says why: `kvfs status` counts names that were looked for and are not there by reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs, with_small_cache

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with with_small_cache(64 * MIB) as made:
        yield made


def counted(node: Node, path: Path) -> dict[str, int]:
    """By how much a read of a path that is not there moves the counters."""
    before = node.status()["counters"]
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    after = node.status()["counters"]
    moved = {name: after[name] - before[name] for name in after if name.startswith("misses_")}
    return {name: by for name, by in moved.items() if by}


def test_what_was_never_there(node: Node) -> None:
    assert counted(node, node.mount / "cache" / "never") == {"misses_never_stored": 1}


def test_what_was_evicted(node: Node) -> None:
    cache = node.mount / "cache"
    names = [cache / f"block-{number}" for number in range(20)]
    for path in names:
        path.write_bytes(bytes(8 * MIB))
    wait_until(
        lambda: node.status()["counters"]["evicted_files_namespace_full"] > 0,
        "some are evicted",
        60,
    )
    assert counted(node, names[0]) == {"misses_evicted": 1}


def test_what_was_damaged(node: Node) -> None:
    path = node.mount / "cache" / "damaged"
    path.write_bytes(b"data")
    ino = path.stat().st_ino
    [data] = (node.store / "data").glob(f"[0-9a-f]*/{ino:016x}.*")
    data.unlink()
    assert list(counted(node, path)) == ["misses_damaged"]  # the kernel looks twice


def test_status_shows_them(node: Node) -> None:
    shown = kvfs("status", "--store", str(node.store)).stdout
    assert "looked for and not there" in shown
