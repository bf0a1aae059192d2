"""Eviction on real files: limits hold, what is in use stays, durable namespaces lose nothing."""

import errno
import mmap
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import trio
import trio.testing

from kvfs.base.errors import NoSpace, Stale
from kvfs.meta.engine import Engine
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.siblings import peer_spares
from kvfs.node.siblings.peer_spares import PeerSpares
from kvfs.policy.eviction import headroom
from kvfs.tree import lifecycle
from kvfs.vfs.space_accounting import STORE
from tests.cluster.waiting import until
from tests.contract.bringers import Site, on_nodes
from tests.contract.small_node import SmallNode, small_node

MIB = 1 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as made:
        yield made


def keeping(node: SmallNode, main: Callable[[], Awaitable[None]]) -> None:
    """Run `main` beside the evictor."""

    async def both() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.evictor.run)
            with trio.fail_after(120):
                await main()
            nursery.cancel_scope.cancel()

    trio.run(both)


def fill(node: SmallNode, space: int, names: str, size: int = MIB) -> list[int]:
    return [node.write(space, name, bytes(size)) for name in names]


def within(node: SmallNode, space: int) -> Callable[[], bool]:
    def check() -> bool:
        used, capacity = node.used(space), node.census().namespaces[space].space.capacity
        return used <= capacity - headroom(capacity)

    return check


def keep_within(node: SmallNode, space: int) -> None:
    keeping(node, lambda: until(within(node, space), "the cache is within its limit"))


def test_the_coldest_go_until_the_headroom_is_free(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    inos = fill(node, space, "abcdefgh")
    node.index.touch(inos[0])

    def settled() -> bool:
        return within(node, space)() and len(node.announced) == 8 - len(node.names(space))

    keeping(node, lambda: until(settled, "the mount is told of all that went"))
    left = node.names(space)
    assert "a" in left
    assert "b" not in left
    assert left == {"a"} | set(sorted("bcdefgh")[-(len(left) - 1) :])
    assert {name for _, name in node.announced} == {
        name.encode() for name in set("abcdefgh") - left
    }
    assert set(node.files.scan()) == {(ino, 0) for ino in inos if node.record(ino)}
    assert {ino for ino, _ in node.index.entries()} == {ino for ino, _ in node.files.scan()}
    assert node.evictor.counters["evicted_files_namespace_full"] == 8 - len(left)
    assert node.evictor.counters["evicted_bytes_namespace_full"] >= (8 - len(left)) * MIB


def test_no_eviction_waits_for_a_mount(node: SmallNode) -> None:
    """A create that waits for room may hold the lock which forgetting a name needs."""
    space = node.namespace("cache", capacity=8 * MIB)

    async def never(_evicted: object) -> None:
        await trio.sleep_forever()

    node.evictor._on_removed = never
    fill(node, space, "abcdefgh")
    keep_within(node, space)
    fill(node, space, "ijklmnop")
    keep_within(node, space)


def test_a_mount_that_cannot_be_told_ends_nothing(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    told = []

    async def failing(evicted: object) -> None:
        told.append(evicted)
        raise OSError(errno.EIO, "Input/output error")

    node.evictor._on_removed = failing
    fill(node, space, "abcdefgh")
    keeping(node, lambda: until(lambda: bool(told), "the mount is told"))
    fill(node, space, "ijklmnop")
    keep_within(node, space)


def test_a_file_that_the_disk_does_not_give_up_stops_no_other(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    stubborn, *_ = fill(node, space, "abcdefgh")
    unlink = node.files.unlink

    def failing(ino: int, version: int) -> bool:
        if ino == stubborn:
            raise OSError(errno.EIO, "Input/output error")
        return unlink(ino, version)

    monkeypatch.setattr(node.files, "unlink", failing)
    keep_within(node, space)
    assert node.names(space)
    orphans = node.engine.read_now(lambda t: lifecycle.orphans(t, 0, 100))
    assert orphans == [stubborn], "what a later sweep drops"


def test_nothing_goes_while_there_is_room(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    fill(node, space, "abcdef")

    async def main() -> None:
        await node.evictor.make_room(space)

    keeping(node, main)
    assert node.names(space) == set("abcdef")


@pytest.mark.parametrize("how", ["handle", "descriptor", "mapping"])
def test_what_is_in_use_stays(node: SmallNode, how: str) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    inos = fill(node, space, "abcdefgh")
    file = open(node.files.path(inos[0], 0), "r+b")  # noqa: SIM115
    mapping = mmap.mmap(file.fileno(), 0)
    if how != "mapping":
        mapping.close()
    if how != "descriptor":
        file.close()
    if how == "handle":
        node.holders.opened(inos[0])
    keep_within(node, space)
    assert "a" in node.names(space)
    assert "b" not in node.names(space)
    assert node.evictor.counters["passed_over_in_use"] >= 1
    mapping.close()
    file.close()


def test_an_unpublished_file_stays(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    ino, fd = node.make(space, "young")
    os.write(fd, bytes(2 * MIB))
    fill(node, space, "abcdef")
    node.index.add(ino, 0)
    keep_within(node, space)
    assert "young" in node.names(space)
    node.close(ino, fd)


def test_every_link_of_an_evicted_file_goes(node: SmallNode) -> None:
    from kvfs.meta.records import namespace_root
    from kvfs.tree import tree

    space = node.namespace("cache", capacity=8 * MIB)
    inos = fill(node, space, "a")
    node.engine.transact_now(lambda t: tree.link(t, inos[0], namespace_root(space), b"again", 1))
    fill(node, space, "bcdefgh")
    keep_within(node, space)
    assert not {"a", "again"} & node.names(space)


def test_durable_namespaces_lose_nothing_and_say_that_they_are_full(node: SmallNode) -> None:
    space = node.namespace("models", kind="durable", capacity=4 * MIB)
    fill(node, space, "abcd")

    async def main() -> None:
        await node.evictor.sample()
        assert node.evictor.pressed(space)
        with pytest.raises(NoSpace, match=r"namespace models is full.*kvfs namespace set models"):
            await node.evictor.make_room(space)

    keeping(node, main)
    assert node.names(space) == set("abcd")
    assert node.evictor.counters["refused_no_space"] == 1


def test_a_full_store_evicts_from_every_cache_by_age_and_spares_the_durable(tmp_path: Path) -> None:
    with small_node(tmp_path / "store", "16MiB") as node:
        durable = node.namespace("models", kind="durable")
        first, second = node.namespace("first"), node.namespace("second")
        fill(node, durable, "mnop")
        fill(node, first, "ab")
        fill(node, second, "cdefgh")
        fill(node, first, "ijkl")

        async def main() -> None:
            await until(lambda: node.census().store.used <= 12 * MIB, "there is room")

        keeping(node, main)
        assert node.names(durable) == set("mnop")
        assert not set("ab") & node.names(first), "the coldest of all were in the first namespace"
        assert set("ijkl") <= node.names(first)
        assert node.evictor.counters["evicted_files_store_full"] >= 4


def test_a_store_full_of_durable_files_refuses(tmp_path: Path) -> None:
    with small_node(tmp_path / "store", "4MiB") as node:
        durable, cache = node.namespace("models", kind="durable"), node.namespace("cache")
        fill(node, durable, "mnop")

        async def main() -> None:
            for space in (durable, cache):
                with pytest.raises(NoSpace, match="the store is full"):
                    await node.evictor.make_room(space)

        keeping(node, main)


def test_a_cache_whose_files_are_all_in_use_refuses_at_the_deadline(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=4 * MIB)
    opened = [node.files.open(ino, 0, os.O_RDONLY) for ino in fill(node, space, "abcd")]

    async def main() -> None:
        with pytest.raises(NoSpace, match="namespace cache is full"):
            await node.evictor.make_room(space, deadline_s=5)

    keeping(node, main)
    for fd in opened:
        os.close(fd)


def test_a_waiting_create_goes_on_when_room_was_made(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=4 * MIB)
    fill(node, space, "abcd")

    async def main() -> None:
        await node.evictor.make_room(space)

    keeping(node, main)
    assert node.census().space(space).free > 0


def test_a_create_waits_for_files_that_are_being_sealed(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk has the sealer keep all files of a small cache open."""
    space = node.namespace("cache", capacity=4 * MIB)
    fill(node, space, "abcd")
    syncing, synced, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        syncing.set()
        synced.wait()
        fsync(fd)

    async def fill_up() -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.evictor.make_room, space)
                await until(lambda: node.evictor.counters["passed_over_in_use"] >= 8, "it is full")
                synced.set()
        finally:
            synced.set()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.settle)
            await until(syncing.is_set, "files are being sealed")
            nursery.start_soon(node.evictor.run)
            await fill_up()
            nursery.cancel_scope.cancel()

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", slow)
        trio.run(main)
    assert node.names(space) < set("abcd")


def test_a_create_goes_by_no_round_that_began_before_it(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = node.namespace("cache", capacity=4 * MIB)
    opened = [node.files.open(ino, 0, os.O_RDONLY) for ino in fill(node, space, "abcd")]
    looked, go_on, choose = trio.Event(), trio.Event(), node.evictor._candidates.coldest

    async def slow(*arguments: Any) -> list[tuple[int, int]]:
        chosen = await choose(*arguments)
        looked.set()
        await go_on.wait()
        return chosen

    monkeypatch.setattr(node.evictor._candidates, "coldest", slow)

    async def main() -> None:
        await looked.wait()
        for fd in opened:
            os.close(fd)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.evictor.make_room, space)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
        assert node.names(space) < set("abcd")

    keeping(node, main)


def test_growth_of_open_files_counts(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=64 * MIB)
    before = node.used(space)
    ino, fd = node.make(space, "young")
    os.write(fd, bytes(3 * MIB))
    assert node.used(space) - before >= 3 * MIB
    node.publish(ino, fd)
    assert 3 * MIB <= node.used(space) - before < 4 * MIB, "counted once"
    os.write(fd, bytes(2 * MIB))
    assert node.used(space) - before >= 5 * MIB
    node.close(ino, fd)
    assert node.census().store.used == node.used(space)


def test_the_tighter_limit_is_what_a_writer_has(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.statvfs(node.files.root)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)  # others write to it meanwhile
    small = node.namespace("small", capacity=8 * MIB)
    fill(node, small, "ab")
    space = node.census().space(small)
    assert space.capacity == 8 * MIB
    assert 5 * MIB < space.free <= 6 * MIB
    whole = node.census().space(STORE)
    assert 0 < whole.free <= disk.f_bavail * disk.f_frsize


def test_an_eviction_that_a_kill_cut_short_leaves_an_orphan(node: SmallNode) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    inos = fill(node, space, "abcdefgh")
    unlink = node.files.unlink

    node.files.unlink = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        keep_within(node, space)
    assert caught.group_contains(KeyboardInterrupt)
    node.files.unlink = unlink  # type: ignore[method-assign]
    orphans = node.engine.read_now(lambda t: lifecycle.orphans(t, 0, 100))
    assert orphans
    assert set(orphans) <= set(inos)
    assert set(node.files.scan()) == {(ino, 0) for ino in inos}


def test_sixteen_writers_at_full_speed_never_pass_the_limit_by_more_than_the_headroom(
    node: SmallNode,
) -> None:
    """The blocks and the limit are a sixteenth of 64 MiB and 4 GiB; their ratio is the same."""
    capacity, block = 256 * MIB, 4 * MIB
    space = node.namespace("cache", capacity=capacity)
    highest = 0

    async def writer(number: int) -> None:
        nonlocal highest
        for round_number in range(10):
            if node.evictor.pressed(space):
                await node.evictor.make_room(space)
            ino, fd = node.make(space, f"{number}.{round_number}")
            await trio.to_thread.run_sync(os.write, fd, bytes(block))
            highest = max(highest, node.used(space))
            node.close(ino, fd)
            node.sealer.published(ino, 0, 0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(writer, number)

    keeping(node, main)
    assert highest <= capacity + headroom(capacity)
    assert node.evictor.counters["refused_no_space"] == 0
    assert (
        node.evictor.counters["evicted_files_namespace_full"] >= 16 * 10 - node.used(space) // block
    )
    assert node.used(space) == sum(
        512 * node.files.stat(ino, version).st_blocks for ino, version in node.files.scan()
    )
    assert threading.active_count() < 50


def test_of_a_node_that_is_drained_the_last_copies_of_caches_go_and_nothing_else(
    tmp_path: Path,
) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        alone = here.put(b"alone", space=site.cache)
        empty = here.put(b"", space=site.cache)
        used = here.put(b"used", space=site.cache)
        twice = here.put(b"twice", space=site.cache)
        durable = here.put(b"durable", space=site.durable)
        await there.transfers.bring(twice)
        await site.held_by(twice, [1, 2])
        here.holders.opened(used)
        found = (alone, empty, used, twice, durable)
        evicted = {ino for ino in found if await here.evictor.evict(ino)}
        assert evicted == {alone, empty}
        assert set(here.files.scan()) == {(used, 0), (twice, 0), (durable, 0)}
        for ino in evicted:
            assert site.holders(ino) == []
            with pytest.raises(Stale):
                here.inode(ino)
        assert here.evictor.counters["evicted_files_drained"] == 2
        here.holders.released(used)
        assert await here.evictor.evict(used)

    on_nodes(tmp_path, 2, test)


class _Waits(PeerSpares):
    """The cold tier, or another node that promises to keep its copy: `meanwhile` happens while it
    is waited for."""

    is_sending = False
    rests = False

    def __init__(self, engine: Engine, meanwhile: Callable[[], None]) -> None:
        self._engine = cast(ReplicaEngine, engine)
        self._meanwhile = meanwhile
        self.let_go = 0

    async def sent(
        self,
        chosen: list[tuple[int, int]],
        *,
        patient: bool,  # noqa: ARG002
    ) -> list[tuple[int, int]]:
        self._meanwhile()
        return chosen

    def rest(self) -> None:
        self.rests = True

    async def elsewhere(self, inos: Sequence[int]) -> list[int]:
        return list(inos)

    async def promised(self, inos: Sequence[int]) -> dict[int, bytes]:
        self._meanwhile()
        return dict.fromkeys(inos, SEAL)

    def may_go(self, _ino: int) -> bool:
        return True

    def done(self, _asked: Sequence[int], gone: int) -> None:
        self.let_go += gone


SEAL = bytes(16)


def _seal(node: SmallNode, ino: int) -> None:
    record = node.record(ino)
    assert record is not None
    what = {"size": record.size, "blocks": record.blocks, "mtime_ns": record.mtime_ns}
    what |= {"version": 0, "ctime_ns": record.ctime_ns}
    assert node.engine.transact_now(lambda t: lifecycle.seal(t, ino, record, checksum=SEAL, **what))


def _rewrite(node: SmallNode, ino: int) -> None:
    node.engine.transact_now(lambda t: lifecycle.reopen(t, ino))
    fd = node.files.open(ino, 0, os.O_RDWR)
    os.write(fd, b"other content")
    node.publish(ino, fd)
    os.close(fd)


@pytest.mark.parametrize("meanwhile", ["nothing", "opened", "rewritten"])
@pytest.mark.parametrize("who", ["the cold tier", "another node"])
def test_what_is_used_or_changed_while_others_are_waited_for_stays(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch, meanwhile: str, who: str
) -> None:
    space = node.namespace("cache", capacity=8 * MIB)
    ino = node.write(space, "block", bytes(MIB))
    _seal(node, ino)
    happens: dict[str, Callable[[], None]] = {
        "nothing": lambda: None,
        "opened": lambda: node.holders.opened(ino),
        "rewritten": lambda: _rewrite(node, ino),
    }
    waits: Any = _Waits(node.engine, happens[meanwhile])
    if who == "the cold tier":
        monkeypatch.setattr(node.evictor, "_cold_blocks", waits)
        trio.run(node.evictor.evict, ino)
    else:
        monkeypatch.setattr(node.evictor, "_spares", lambda: waits)
        monkeypatch.setattr(type(node.engine), "is_local", lambda _engine, _space: True)
        monkeypatch.setattr(peer_spares, "is_peer", lambda _t, _space: True)
        trio.run(node.evictor._evict_spares, [space], MIB, "namespace_full")
        assert waits.rests == (meanwhile != "nothing")  # enough went: it looks on at once
    stays = meanwhile != "nothing"
    assert (node.names(space) == {"block"}) == stays
    assert bool(node.record(ino)) == stays
