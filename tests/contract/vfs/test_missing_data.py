"""What is decided of a record whose data nobody gives, on a real engine: each row of the table of
`kvfs.vfs.missing_data`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvfs.base.errors import Corrupt, KvfsError, Stale, Unavailable, Unreached
from kvfs.meta import keys
from kvfs.meta.records import Flag, namespace_root
from kvfs.vfs.missing_data import Loss, loss
from tests.contract.small_node import SmallNode, small_node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as node:
        yield node


def decided(
    node: SmallNode, kind: str, *, cold: bool, asks_tier: bool, away: Sequence[int], named: bool
) -> tuple[int, Loss]:
    space = node.namespace(f"of-{kind}", kind)
    ino = node.write(space, "block", b"data")
    inode = node.record(ino)
    assert inode is not None
    flags = inode.flags | (Flag.COLD if cold else 0)
    inode = msgspec.structs.replace(inode, flags=flags, nlink=int(named))
    return space, node.engine.read_now(
        lambda t: loss(t, ino, inode, "/a/block", asks_tier=asks_tier, away=away)
    )


@pytest.mark.parametrize(
    ("kind", "cold", "asks_tier", "away", "error", "forgets"),
    [
        ("cache", False, False, (), Unreached, True),
        ("cache", False, True, (), Unreached, True),
        ("cache", False, False, (3, 4), Unreached, True),
        ("cache", True, False, (), Unreached, False),
        ("cache", True, False, (3,), Unreached, False),
        ("cache", True, True, (), Unreached, True),
        ("durable", False, False, (), Corrupt, False),
        ("durable", False, True, (), Corrupt, False),
        ("durable", False, False, (3, 4), Unavailable, False),
        ("durable", True, False, (), Unavailable, False),
        ("durable", True, True, (), Corrupt, False),
        ("durable", True, True, (3,), Unavailable, False),
    ],
)
def test_the_decision_on_a_record_that_has_a_name(
    node: SmallNode,
    kind: str,
    cold: bool,
    asks_tier: bool,
    away: Sequence[int],
    error: type[KvfsError],
    forgets: bool,
) -> None:
    space, found = decided(node, kind, cold=cold, asks_tier=asks_tier, away=away, named=True)
    assert (type(found.error), found.forgets) == (error, forgets)
    assert str(found.error).startswith("/a/block: ")
    if isinstance(found.error, Unreached):
        assert found.error.at == keys.file_entry(namespace_root(space), b"block")


@pytest.mark.parametrize("kind", ["cache", "durable"])
def test_a_record_without_a_name_is_stale_and_left_to_whoever_reaps_it(
    node: SmallNode, kind: str
) -> None:
    _, found = decided(node, kind, cold=True, asks_tier=False, away=(3,), named=False)
    assert (type(found.error), found.forgets) == (Stale, False)


def test_what_is_told_names_the_remedy(node: SmallNode) -> None:
    _, gone = decided(node, "durable", cold=False, asks_tier=False, away=(), named=True)
    assert str(gone.error) == "/a/block: its data file is missing or torn: run `kvfs fsck`"
    _, cold = decided(node, "cache", cold=True, asks_tier=False, away=(), named=True)
    assert str(cold.error).endswith("are in the cold tier: start the node with --cold")
