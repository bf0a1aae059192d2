"""Decisions on copies of blocks: which nodes are offered which, what a change of a record means,
and which nodes live while nobody tells of leases."""

import pytest

from kvfs.meta.records import Flag, Inode, Namespace, namespace_root, pack
from kvfs.node.siblings import copy_plan
from kvfs.node.siblings.block_events import BlockEvent, event_of
from kvfs.node.siblings.copy_plan import LackingBlock
from kvfs.node.siblings.living_nodes import SILENT_S, LivingNodes
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.copies.siblings import HeldBlock

ME = 1
GIB = 1 << 30


def host(number: int, zone: str = "", *, alive: bool = True) -> Host:
    return Host(number, 100 * GIB, 80 * GIB, zone=zone, alive=alive)


def record(flags: int, *, nlink: int = 1, name: bytes = b"n", version: int = 0) -> Inode:
    return Inode(
        mode=0o100644,
        uid=0,
        gid=0,
        nlink=nlink,
        atime_ns=0,
        mtime_ns=0,
        ctime_ns=0,
        parent=namespace_root(1),
        name=name,
        boot=0,
        flags=flags,
        version=version,
        size=1000,
    )


def block(ino: int, *siblings: int, replicas: int = 1) -> HeldBlock:
    policy = Namespace(name=b"b", kind="cache", coherence="peer", replicas=replicas)
    inode = record(Flag.PUBLISHED | Flag.SEALED)
    return HeldBlock(ino, inode, b"n", HeldName([], ino), list(siblings), policy)


def lacking(each: HeldBlock, *claimed: int) -> LackingBlock:
    return LackingBlock(each, ME, claimed)


def test_blocks_made_one_after_the_other_go_together_and_to_other_zones() -> None:
    zones = [
        host(ME, "a"),
        *(host(n, "a") for n in range(2, 20)),
        *(host(n, "b") for n in (20, 21)),
    ]
    works = [lacking(block(64 * 5 + number)) for number in range(64)]
    plan = copy_plan.plan(ClusterSnapshot(zones), (), works)
    ((node, those),) = plan.items()
    assert node in (20, 21)
    assert those == works


def test_nodes_that_hold_a_name_are_asked_first_and_those_that_rest_are_not() -> None:
    snapshot = ClusterSnapshot(map(host, range(1, 5)))
    work = lacking(block(1), 3)
    assert list(copy_plan.plan(snapshot, (), [work])) == [3]
    assert 3 not in copy_plan.plan(snapshot, (3,), [work])
    work.refused.add(3)
    assert 3 not in copy_plan.plan(snapshot, (), [work])


def test_a_block_with_all_its_copies_is_offered_to_nobody() -> None:
    snapshot = ClusterSnapshot(map(host, range(1, 5)))
    assert not copy_plan.plan(snapshot, (), [lacking(block(1, 2))])
    dead = ClusterSnapshot([host(1), host(2, alive=False), host(3)])
    assert list(copy_plan.plan(dead, (), [lacking(block(1, 2))])) == [3]
    assert copy_plan.missing(snapshot, lacking(block(1, 2, replicas=3))) == 2


SEALED = Flag.PUBLISHED | Flag.SEALED


@pytest.mark.parametrize(
    ("before", "after", "event"),
    [
        (None, record(SEALED), BlockEvent.SEALED),
        (record(Flag.PUBLISHED), record(SEALED), BlockEvent.SEALED),
        (record(SEALED), record(SEALED, version=1), BlockEvent.SEALED),
        (record(SEALED), record(SEALED), BlockEvent.NONE),
        (record(SEALED), record(SEALED, name=b"other"), BlockEvent.RENAMED),
        (record(Flag.PUBLISHED), record(Flag.PUBLISHED), BlockEvent.NONE),
        (record(SEALED), record(SEALED | Flag.EVICTED, nlink=0), BlockEvent.EVICTED),
        (record(SEALED), record(SEALED | Flag.DAMAGED, nlink=0), BlockEvent.EVICTED),
        (record(SEALED), record(SEALED, nlink=0), BlockEvent.NONE),
        (
            record(SEALED | Flag.EVICTED, nlink=0),
            record(SEALED | Flag.EVICTED, nlink=0),
            BlockEvent.NONE,
        ),
    ],
)
def test_what_a_change_means(before: Inode | None, after: Inode, event: BlockEvent) -> None:
    assert event_of(None if before is None else pack(before), pack(after)) is event


def test_a_node_that_falls_silent_is_away_though_its_lease_does_not_end() -> None:
    now = 100.0
    heard: dict[int, float] = {2: 100.0}
    base = ClusterSnapshot(map(host, (1, 2, 3)))
    nodes = LivingNodes(ME, lambda: base, heard.get, lambda: now)
    first = nodes.snapshot()
    assert [each.number for each in first.alive([1, 2, 3])] == [1, 2, 3]  # 3 was not heard yet
    assert nodes.snapshot() is first
    now += SILENT_S + 1
    assert [each.number for each in nodes.snapshot().alive([1, 2, 3])] == [1, 3]
    heard[2] = now
    assert [each.number for each in nodes.snapshot().alive([1, 2, 3])] == [1, 2, 3]
