"""Data that other nodes have are brought here: several nodes on one engine, which fetch from each
other over loopback."""

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.abc
import trio.lowlevel
import trio.testing

from kvfs.base.errors import Busy, Corrupt, NoSpace, NotFound, Stale, Unavailable
from kvfs.datastore import file_lease, file_sync
from kvfs.datastore.checksum import checksum
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root
from kvfs.node.tasks.stale_data_gc import Strays
from kvfs.transfer import arrivals, origins
from kvfs.transfer.outdated_data import Change, OutdatedData
from kvfs.tree import lifecycle, namespaces, tree
from kvfs.tree.copies import cold_copies
from kvfs.tree.inodes import read_inode
from kvfs.vfs.space_accounting import STORE
from tests.cluster.waiting import until
from tests.contract.bringers import Host, Site, on_nodes, publish
from tests.contract.peers import content, open_files
from tests.contract.small_node import new_inode
from tests.fault.proxy import proxied

MIB = 1 << 20
LARGE = 72 * MIB


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("size", [0, 1, 3 * MIB, 9 * MIB + 5])
def test_what_is_not_here_is_brought_whole(tmp_path: Path, size: int, sealed: bool) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(size)
        ino = there.put(data, space=site.cache, sealed=sealed)
        await here.transfers.bring(ino)
        assert here.read(ino) == data
        st, inode = here.files.stat(ino, 0), here.inode(ino)
        assert (st.st_size, st.st_mtime_ns) == (inode.size, inode.mtime_ns)
        assert here.room == [size]
        await site.held_by(ino, [1, 2])
        await here.transfers.bring(ino)
        assert here.transfers.counters == {"brought_files": 1, "brought_bytes": size}

    on_nodes(tmp_path, 2, test)


def test_what_another_node_has_not_closed_yet_is_not_brought(tmp_path: Path) -> None:
    """It would be nothing, under the version that the whole content has when it is closed."""

    async def test(site: Site) -> None:
        here, there = site.hosts

        def make(t: Transaction) -> int:
            ino = namespaces.allocate_inodes(t, site.durable, 1)
            tree.add(t, namespace_root(site.durable), b"made", ino, new_inode())
            return ino

        ino = there.engine.transact_now(make)
        os.close(there.files.create(ino, 0))
        with pytest.raises(NotFound):
            await here.transfers.bring(ino)
        assert not here.files.has(ino, 0)

    on_nodes(tmp_path, 2, test)


def test_many_who_want_a_file_have_it_come_once(tmp_path: Path, over: Path | None) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(20 * MIB), space=site.durable)
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(here.transfers.bring, ino)
        assert here.transfers.counters["brought_files"] == 1
        assert here.room == [20 * MIB]

    on_nodes(tmp_path, 2, test, over)


def test_a_large_file_is_read_as_it_comes(tmp_path: Path, over: Path | None) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(LARGE)
        ino = there.put(data, space=site.durable)
        incoming = here.transfers.begin(ino, here.inode(ino))
        await incoming.begun()
        fd = here.files.open_arriving(ino, 0)
        await incoming.span(60 * MIB, MIB)
        assert os.pread(fd, MIB, 60 * MIB) == data[60 * MIB : 61 * MIB]
        assert incoming.has(60 * MIB, MIB)
        assert incoming.has(LARGE, 4096)
        incoming.want(0, 2 * LARGE)
        await incoming.whole()
        assert here.read(ino) == data
        assert os.pread(fd, LARGE, 0) == data
        os.close(fd)

    on_nodes(tmp_path, 2, test, over)


def test_many_wait_for_parts_of_a_file_and_it_comes_once(tmp_path: Path, over: Path | None) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(13 * MIB)
        ino = there.put(data, space=site.durable)
        transfer = here.transfers.begin(ino, here.inode(ino))
        assert here.transfers.begin(ino, here.inode(ino)) is transfer
        async with trio.open_nursery() as nursery:
            for offset in range(0, len(data), MIB):
                nursery.start_soon(transfer.span, offset, 100)
                nursery.start_soon(transfer.whole)
        assert here.read(ino) == data
        assert there.peer.server.counters["peers_sent_bytes"] == len(data)

    on_nodes(tmp_path, 2, test, over)


@pytest.mark.parametrize("size", [1, 9 * MIB])
def test_those_who_wait_to_open_it_get_it_open(tmp_path: Path, size: int) -> None:
    """One descriptor each, which lets nobody take the file for one that is being written."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(size)
        ino = there.put(data, space=site.durable)
        transfer = here.transfers.begin(ino, here.inode(ino))
        found: list[int] = []

        async def open_it() -> None:
            found.append(await transfer.opened())

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(open_it)
            with trio.CancelScope() as patience:
                patience.cancel()
                await open_it()
        assert len(set(found)) == 3
        fd = here.files.open(ino, 0, os.O_RDONLY)
        assert file_lease.is_quiet(fd) is not False
        os.close(fd)
        for each in found:
            assert os.pread(each, size, 0) == data
            os.close(each)
        assert open_files(tmp_path) == []

    on_nodes(tmp_path, 2, test)


def test_one_chunk_comes_by_one_task(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        first, second = (there.put(content(2 * MIB, seed), space=site.cache) for seed in range(2))
        await here.transfers.bring(first)  # the nodes know each other from now on
        await site.held_by(first, [1, 2])
        spawned = Spawned()
        trio.lowlevel.add_instrument(spawned)
        os.close(await here.transfers.begin(second, here.inode(second)).opened())
        trio.lowlevel.remove_instrument(spawned)
        assert len(spawned.names) == 1, spawned.names

    on_nodes(tmp_path, 2, test)


class Spawned(trio.abc.Instrument):
    """The names of tasks that began."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


def test_what_came_is_kept_where_the_rest_comes_from_another(tmp_path: Path) -> None:
    """A sealed file goes on at another holder, which is heard of when the first has gone."""

    async def test(site: Site) -> None:
        here, second, third = site.hosts
        data = content(15 * MIB)  # of more, third would send the reader to second
        ino = third.put(data, space=site.durable)
        await second.transfers.bring(ino)
        await site.held_by(ino, [2, 3])
        site.dead.add(2)
        with proxied(("127.0.0.1", 0), third.peer.address[1:]) as proxy:
            proxy.bytes_s = 16 * MIB
            site.at[3] = third.peer.address._replace(port=proxy.port)
            transfer = here.transfers.begin(ino, here.inode(ino))
            await transfer.span(0, 1)
            site.news.append(2)
            proxy.is_refusing = True
            proxy.cut()
            await transfer.whole()
        assert here.read(ino) == data
        sent = second.peer.server.counters["peers_sent_bytes"]
        assert 0 < sent <= 11 * MIB

    on_nodes(tmp_path, 3, test)


def test_who_waits_hears_that_the_node_stops(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(LARGE), space=site.durable)
        with proxied(("127.0.0.1", 0), there.peer.address[1:]) as proxy:
            proxy.held = "out"
            site.at[2] = there.peer.address._replace(port=proxy.port)
            transfer = here.transfers.begin(ino, here.inode(ino))

            async def wait(step: Callable[[], Awaitable[object]]) -> None:
                with pytest.raises(Unavailable, match="the node stops"):
                    await step()

            async with trio.open_nursery() as nursery:
                for step in (transfer.begun, transfer.whole, transfer.opened):
                    nursery.start_soon(wait, step)
                await trio.testing.wait_all_tasks_blocked(0.01)
                here.scope.cancel()
        assert here.peer.fetches.arriving(ino, 0) is None

    on_nodes(tmp_path, 2, test)


def test_what_nobody_alive_has_is_a_miss_in_a_cache(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"gone", space=site.cache)
        site.dead.add(2)
        with pytest.raises(NotFound):
            await here.transfers.bring(ino)
        assert not here.inode(ino).nlink
        with pytest.raises(FileNotFoundError):
            here.files.open_arriving(ino, 0)

    on_nodes(tmp_path, 2, test)


def test_what_nobody_alive_has_comes_back_in_a_durable_namespace(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"kept", space=site.durable)
        site.dead.add(2)
        with pytest.raises(Unavailable, match="which are on: 2"):
            await here.transfers.bring(ino)
        site.dead.clear()
        await here.transfers.bring(ino)
        assert here.read(ino) == b"kept"

    on_nodes(tmp_path, 2, test)


def test_a_holder_that_lost_its_data_is_passed_over(tmp_path: Path, over: Path | None) -> None:
    async def test(site: Site) -> None:
        here, second, third = site.hosts
        ino = third.put(content(5 * MIB), space=site.durable)
        await second.transfers.bring(ino)
        await site.held_by(ino, [2, 3])
        third.files.unlink(ino, 0)
        await here.transfers.bring(ino)
        assert here.read(ino) == content(5 * MIB)
        second.files.unlink(ino, 0)
        here.files.unlink(ino, 0)
        with pytest.raises((Unavailable, Corrupt)):
            await here.transfers.bring(ino)

    on_nodes(tmp_path, 3, test, over)


def test_the_cold_tier_has_what_no_node_has(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(MIB)
        ino = there.put(data, space=site.durable)
        site.dead.add(2)

        async def wrong(_: int, _inode: Inode, _fd: int) -> bytes:
            return bytes(16)

        async def fill(_: int, inode: Inode, fd: int) -> bytes:
            os.pwrite(fd, data, 0)
            found = checksum(fd, inode.size)
            assert found is not None
            return found.chunks

        here.cold = wrong
        with pytest.raises(Corrupt):
            await here.transfers.bring(ino)
        here.cold = fill
        await here.transfers.bring(ino)
        assert here.read(ino) == data

    on_nodes(tmp_path, 2, test)


@pytest.mark.parametrize("kind", ["durable", "cache"])
def test_what_went_to_the_cold_tier_while_it_was_asked_for(tmp_path: Path, kind: str) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(MIB)
        ino = there.put(data, space=getattr(site, kind))
        before = here.inode(ino)

        async def fill(_: int, inode: Inode, fd: int) -> bytes | None:
            if not inode.flags & Flag.COLD:
                return None
            os.pwrite(fd, data, 0)
            found = checksum(fd, inode.size)
            assert found is not None
            return found.chunks

        def demoted(t: Transaction) -> None:
            sent = cold_copies.object_of(ino, read_inode(t, ino))
            assert sent is not None
            assert cold_copies.begin(t, sent)
            assert cold_copies.finish(t, sent)
            assert cold_copies.release(t, sent)

        here.cold = fill
        there.engine.transact_now(demoted)
        there.files.unlink(ino, 0)
        await here.transfers.begin(ino, before).whole()
        assert here.read(ino) == data

    on_nodes(tmp_path, 2, test)


def test_the_last_copy_is_not_let_go(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"data", space=site.durable)
        assert not await there.transfers.let_go(ino)
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        assert await there.transfers.let_go(ino)
        assert (site.holders(ino), there.has(ino), here.has(ino)) == ([1], False, True)
        assert not await here.transfers.let_go(ino)

    on_nodes(tmp_path, 2, test)


def _changes(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> list[Change]:
    return [
        (key, before.get(key), now.get(key))
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key)
    ]


def test_content_that_was_replaced_elsewhere_goes(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"old", space=site.durable)
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        here.holders.opened(ino)
        before = site.engine._current.values
        there.files.add_version(ino, 0, 1)
        there.engine.transact_now(
            lambda t: lifecycle.publish(
                t, ino, size=3, blocks=8, mtime_ns=time.time_ns(), ctime_ns=0, boot=0, version=1
            )
        )
        here.transfers.outdated.applied(_changes(before, site.engine._current.values))
        await trio.testing.wait_all_tasks_blocked()
        here.files.stat(ino, 0)  # it is open
        here.holders.released(ino)
        here.transfers.outdated.closed(ino)

        def gone() -> bool:
            try:
                here.files.stat(ino, 0)
            except FileNotFoundError:
                return True
            return False

        await until(gone, "it has gone")
        assert site.holders(ino) == [2]

    on_nodes(tmp_path, 2, test)


def _unlink(t: Transaction, ino: int) -> None:
    root = namespace_root(namespace_of(ino))
    tree.unlink(t, root, b"f%d" % ino, time.time_ns(), lambda _: False)


def _replace(t: Transaction, ino: int) -> None:
    """By a file without data."""
    space = namespace_of(ino)
    other, root = namespaces.allocate_inodes(t, space, 1), namespace_root(space)
    tree.replace(t, root, b"f%d" % ino, other, new_inode(), time.time_ns(), lambda _: False)


def _evict(t: Transaction, ino: int) -> None:
    lifecycle.evict(t, ino, time.time_ns())


REMOVALS = {"unlinked": _unlink, "replaced": _replace, "evicted": _evict}


@pytest.mark.parametrize("removal", REMOVALS)
def test_a_removed_file_goes_on_every_node_that_has_it(tmp_path: Path, removal: str) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"data", space=site.durable)
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        before = site.engine._current.values
        there.engine.transact_now(lambda t: REMOVALS[removal](t, ino))
        changes = _changes(before, site.engine._current.values)
        for host in site.hosts:
            host.transfers.outdated.applied(changes)

        def gone() -> bool:
            try:
                here.inode(ino)
            except Stale:
                return True
            return False

        await until(gone, "it has gone")
        assert not list(here.files.scan())
        assert not list(there.files.scan())

    on_nodes(tmp_path, 2, test)


def test_what_came_of_an_orphan_goes_when_it_is_reaped(tmp_path: Path) -> None:
    """The others did not know of it: its record has gone with the last holder that they knew."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"data", space=site.durable)
        here.engine.commits = trio.Event()
        await here.transfers.bring(ino)
        for step in (_unlink, tree.reap):
            before = site.engine._current.values
            there.engine.transact_now(lambda t, step=step: step(t, ino))
            here.transfers.outdated.applied(_changes(before, site.engine._current.values))
        await until(lambda: not list(here.files.scan()), "it has gone")
        assert not list(here.files.quarantined())

    on_nodes(tmp_path, 2, test)


def test_what_comes_after_its_file_was_removed_stays_only_where_it_may_be_durable(
    tmp_path: Path,
) -> None:
    """The node heard of the removal when nothing was here yet."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        inos = {space: there.put(b"data", space=space) for space in (site.cache, site.durable)}
        here.engine.commits = trio.Event()
        for ino in inos.values():
            await here.transfers.bring(ino)
            for step in (_unlink, tree.reap):
                there.engine.transact_now(lambda t, step=step, ino=ino: step(t, ino))
        here.engine.commits.set()
        await until(lambda: not here.transfers.settles, "it is known what to do with them")
        here.peer.index.flush()
        await until(lambda: len(here.peer.index.entries()) == 1, "one has gone")
        assert [name for name, _ in here.files.scan()] == [inos[site.durable]]
        assert [ino for ino, _ in here.peer.index.entries()] == [inos[site.durable]]

    on_nodes(tmp_path, 2, test)


def test_what_others_commit_while_the_node_stops_ends_nothing(tmp_path: Path) -> None:
    """The engine is followed until the end; the tasks that act on it have ended by then."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(b"data", space=site.durable)
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        before = site.engine._current.values
        there.engine.transact_now(lambda t: _unlink(t, ino))
        changes = _changes(before, site.engine._current.values)
        outdated = OutdatedData(here.engine, here.files, here.peer.index, here.volume)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outdated.run)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        outdated.applied(changes)
        here.files.stat(ino, 0)  # its record stays too, for the next start

    on_nodes(tmp_path, 2, test)


def test_a_node_that_stops_says_that_it_brings_nothing(tmp_path: Path) -> None:
    stopped: list[Site] = []

    async def test(site: Site) -> None:
        stopped.append(site)

    async def ask() -> None:
        (here, there) = stopped[0].hosts
        ino = there.put(b"data", space=stopped[0].durable)
        with pytest.raises(Unavailable, match="not ready to bring"):
            here.transfers.begin(ino, here.inode(ino))

    on_nodes(tmp_path, 2, test)
    trio.run(ask)


def test_data_whose_record_was_lost_are_kept(tmp_path: Path) -> None:
    """The engine went back to what it was before: no node takes that for a removal."""

    async def test(site: Site) -> None:
        here, _ = site.hosts
        older = here.put(b"older", space=site.durable)
        back = site.engine._current.values
        _rewrite(here, older, b"newer")
        lost, block = (here.put(b"lost", space=each) for each in (site.durable, site.cache))
        now = site.engine._current.values

        def restore(t: Transaction) -> None:
            for key, _, value in _changes(now, back):
                if value is None:
                    t.delete(key)
                else:
                    t.put(key, value)

        site.engine.transact_now(restore)
        here.transfers.outdated.applied(_changes(now, back))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(here.files.scan()) == sorted([(older, 1), (lost, 0), (block, 0)])
        strays = Strays(here.engine, here.files, here.peer.index, here.holders)
        await strays.sweep(time.time_ns() + 1_000_000_000)
        kept = {each.ino: Path(each.path).read_bytes() for each in here.files.quarantined()}
        assert kept == {older: b"newer", lost: b"lost"}

    on_nodes(tmp_path, 2, test)


def test_copies_go_where_space_is_short_and_names_stay(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        here.is_bounded = True
        inos = [
            there.put(content(4 * MIB, number), space=space)
            for number in range(8)
            for space in (site.cache, site.durable)
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            for number, ino in enumerate(inos):
                await here.transfers.bring(ino)
                assert here.read(ino) == content(4 * MIB, number // 2)
            await site.held_by(inos[-1], [1, 2])
            await until(
                lambda: [i for i in inos if 1 in site.holders(i)] == [*filter(here.has, inos)],
                "records say what is here",
            )
            assert len([*filter(here.has, inos)]) <= 10  # of 4 MiB in 40
            assert all(map(there.has, inos))
            assert all(here.inode(ino).nlink for ino in inos)
            nursery.cancel_scope.cancel()

    on_nodes(tmp_path, 2, test)


def test_copies_that_were_in_use_at_a_first_look_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody else has would be next, and by the second look these are free."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        inos = [there.put(content(4 * MIB, number), space=site.cache) for number in range(9)]
        for ino in inos:
            await here.transfers.bring(ino)
            await site.held_by(ino, [1, 2])
        looked_at = set[int]()

        def is_in_use(ino: int) -> bool:
            is_first = ino not in looked_at
            looked_at.add(ino)
            return is_first

        monkeypatch.setattr(here.holders, "in_use", is_in_use)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            await here.evictor.room_for(STORE, 24 * MIB)
            nursery.cancel_scope.cancel()
        assert here.evictor.counters["dropped_copies"] >= 5
        assert all(here.inode(ino).nlink for ino in inos)

    on_nodes(tmp_path, 2, test)


def test_space_waits_for_what_came_and_is_not_recorded_yet(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        here.is_bounded = True
        here.engine.commits = trio.Event()
        inos = [there.put(content(4 * MIB), space=site.durable) for _ in range(12)]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            async with trio.open_nursery() as bringing:
                for ino in inos:
                    bringing.start_soon(here.transfers.bring, ino)
                await until(lambda: here.evictor.counters["passed_over_in_use"] > 0, "it is full")
                here.engine.commits.set()
            assert here.evictor.counters["dropped_copies"] >= 1
            nursery.cancel_scope.cancel()

    on_nodes(tmp_path, 2, test)


def test_what_nobody_else_has_stays_or_goes_with_its_name(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        here.is_bounded = True
        needed = [here.put(content(4 * MIB), space=site.durable) for _ in range(6)]
        evicted = here.put(content(4 * MIB), space=site.cache)
        wanted = there.put(content(8 * MIB), space=site.durable)
        large = there.put(content(20 * MIB), space=site.durable)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            await here.transfers.bring(wanted)
            with pytest.raises(NoSpace):
                await here.transfers.bring(large)
            nursery.cancel_scope.cancel()
        assert all(map(here.has, needed))
        with pytest.raises(Stale):
            here.inode(evicted)
        assert there.has(large)
        assert there.has(wanted)

    on_nodes(tmp_path, 2, test)


def test_what_came_a_moment_ago_stays_until_that_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its record might come when it has gone: others would count on a copy that nobody has."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        known, new = (there.put(content(10 * MIB, seed), space=site.cache) for seed in range(2))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            await here.transfers.bring(known)
            await site.held_by(known, [1, 2])
            monkeypatch.setattr(arrivals, "_GATHER_S", 3600)
            await here.transfers.bring(new)
            here.peer.index.touch(known)  # the other would go first
            await here.evictor.room_for(STORE, 24 * MIB)
            assert not await here.transfers.let_go(new)
            nursery.cancel_scope.cancel()
        assert here.has(new)
        assert not here.has(known)

    on_nodes(tmp_path, 2, test)


def test_what_comes_in_a_moment_is_recorded_together_and_at_once_for_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "_GATHER_S", 3600)
    hold, held = arrivals._hold, list[int]()

    def counted(t: Any, settled: Any) -> Any:
        held.append(len(settled))
        return hold(t, settled)

    monkeypatch.setattr(arrivals, "_hold", counted)

    async def test(site: Site) -> None:
        here, there = site.hosts
        inos = [there.put(content(MIB, seed), space=site.cache) for seed in range(3)]
        for ino in inos:
            await here.transfers.bring(ino)
            assert here.peer.index.has(ino, here.inode(ino).version)
        assert held == []
        here.transfers.record_now()
        for ino in inos:
            await site.held_by(ino, [1, 2])
            entry = here.peer.index.get(ino)
            assert entry is not None
            assert entry.chunks == there.peer.index.get(ino).chunks  # type: ignore[union-attr]
        assert held == [3]

    on_nodes(tmp_path, 2, test)


def test_what_is_replaced_before_it_is_recorded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that happens while it is synced."""
    monkeypatch.setattr(arrivals, "_GATHER_S", 3600)
    syncing, may_end = threading.Event(), threading.Event()

    def slowly(_fd: int) -> None:
        syncing.set()
        may_end.wait(60)

    async def test(site: Site) -> None:
        here, there = site.hosts
        inos = [there.put(content(MIB, seed), space=site.cache) for seed in range(2)]
        versions = [here.inode(ino).version for ino in inos]
        await here.transfers.bring(inos[0])
        await here.transfers.outdated.drop([(inos[0], versions[0])])
        await here.transfers.bring(inos[1])
        monkeypatch.setattr(file_sync, "sync", slowly)
        here.transfers.record_now()
        with trio.fail_after(60):
            while not syncing.is_set():
                await trio.sleep(0.01)
            await here.transfers.outdated.drop([(inos[1], versions[1])])
            may_end.set()
            while here.transfers.settles:
                await trio.sleep(0.01)
        here.peer.index.flush()
        assert here.peer.index.entries() == []
        assert here.peer.index.used_bytes() == {site.cache: 0} or not here.peer.index.used_bytes()

    on_nodes(tmp_path, 2, test)


def test_two_that_fit_alone_have_no_room_together(tmp_path: Path) -> None:
    """Each has more than half of the store: it is not counted twice."""

    async def test(site: Site) -> None:
        here, there = site.hosts
        here.is_bounded = True
        inos = [there.put(content(24 * MIB, seed), space=site.durable) for seed in range(2)]
        most: list[int] = [0]

        async def bring(ino: int) -> None:
            with contextlib.suppress(NoSpace):
                await here.transfers.bring(ino)

        async def watch() -> None:
            while True:
                most.append(here.transfers.coming_bytes)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.evictor.run)
            nursery.start_soon(watch)
            async with trio.open_nursery() as bringing:
                for ino in inos:
                    bringing.start_soon(bring, ino)
            nursery.cancel_scope.cancel()
        assert max(most) == 24 * MIB
        assert any(here.has(ino) for ino in inos)

    on_nodes(tmp_path, 2, test)


def _rewrite(host: Host, ino: int, data: bytes) -> None:
    """In place, closed, and published."""
    version = host.inode(ino).version
    st = host.write_in_place(ino, version, data)
    host.files.add_version(ino, version, version + 1)
    host.engine.transact_now(lambda t: publish(t, ino, st, version=version + 1))
    host.files.unlink(ino, version)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("size", [3 * MIB, LARGE])
def test_what_is_written_in_place_comes_once_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, sealed: bool
) -> None:
    monkeypatch.setattr(origins, "_WRITTEN_S", 60.0)

    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(size), space=site.durable, sealed=sealed)
        there.peer.written.add(ino)
        asked = there.peer.refused(ino)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(here.transfers.bring, ino)
            await asked.wait()
            assert not here.has(ino)
            _rewrite(there, ino, b"closed")
            there.peer.written.clear()
        assert here.read(ino) == b"closed"

    on_nodes(tmp_path, 2, test)


def test_of_what_is_written_in_place_an_older_copy_is_what_was_closed_last(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, second, third = site.hosts
        data = content(9 * MIB)
        ino = third.put(data, space=site.durable, sealed=False)
        await second.transfers.bring(ino)
        await site.held_by(ino, [2, 3])
        third.peer.written.add(ino)
        fd = third.files.open(ino, 0, os.O_WRONLY)
        os.pwrite(fd, bytes(MIB), 0)
        os.close(fd)
        await here.transfers.bring(ino)
        assert here.read(ino) == data

    on_nodes(tmp_path, 3, test)


def test_what_stays_open_for_writing_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origins, "_WRITTEN_S", 0.0)

    async def test(site: Site) -> None:
        here, there = site.hosts
        kept, cached = (there.put(b"data", space=each) for each in (site.durable, site.cache))
        there.peer.written.update((kept, cached))
        with pytest.raises(Busy):
            await here.transfers.bring(kept)
        with pytest.raises(NotFound):
            await here.transfers.bring(cached)
        there.peer.written.clear()
        for ino in (kept, cached):  # a miss, but nothing is forgotten
            await here.transfers.bring(ino)
            assert here.read(ino) == b"data"

    on_nodes(tmp_path, 2, test)
