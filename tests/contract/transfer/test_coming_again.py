"""Data files that come again under their number while former ones of that name are dropped, as it
happens where names are each node's own: several may be about to drop one, and its record is gone
when the first of them is done."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.datastore import file_sync
from kvfs.datastore.index import Sealed
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.tree import lifecycle
from kvfs.tree.copies import held_names
from kvfs.tree.inodes import read_inode
from tests.cluster.waiting import until
from tests.contract.bringers import Host, Site, on_nodes, publish
from tests.contract.peers import content

_DEADLINE_S = 60.0


class Slow:
    """A disk that unlinks nothing for a while."""

    def __init__(self, host: Host) -> None:
        self._unlink = host.files.unlink
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, ino: int, version: int) -> bool:
        self.begun.set()
        assert self.may_end.wait(_DEADLINE_S)
        return self._unlink(ino, version)


@contextmanager
def slow(host: Host) -> Iterator[Slow]:
    disk = Slow(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.files, "unlink", disk)
        try:
            yield disk
        finally:
            disk.may_end.set()


def everything_of(t: Transaction, ino: int) -> list[tuple[bytes, bytes]]:
    """The keys and values by which a node knows what another one has."""
    inode = read_inode(t, ino)
    kept = [keys.inode(ino), keys.file_entry(inode.parent, inode.name)]
    kept += [keys.placement(ino, keys.pack_node(2)), keys.held(keys.pack_node(2), ino)]
    return [(key, value) for key in kept if (value := t.get(key)) is not None]


@pytest.mark.parametrize("by_evictor", [True, False])
def test_what_came_again_is_not_dropped_for_a_former_one(tmp_path: Path, by_evictor: bool) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        data = content(5_000)
        ino = there.put(data, space=site.cache)
        told = site.engine.read_now(lambda t: everything_of(t, ino))
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        inode = here.inode(ino)

        def forget(t: Transaction) -> None:
            held_names.drop(t, ino)
            t.delete(keys.orphan(ino))

        def take_over(t: Transaction) -> None:
            for key, value in told:
                t.put(key, value)

        evicted = here.engine.transact_now(lambda t: lifecycle.evict(t, ino, 1))
        assert evicted is not None
        async with trio.open_nursery() as nursery:
            with slow(here) as disk:
                if by_evictor:
                    nursery.start_soon(here.evictor._drop, [evicted])
                else:
                    nursery.start_soon(here.volume.drop, [(ino, inode.version)])
                await until(disk.begun.is_set, "the data file is about to be unlinked")
                # Meanwhile another one does so, and drops the record; then somebody asks for it.
                (Path(here.files.path(ino, inode.version))).unlink()
                here.peer.index.remove([ino])
                here.engine.transact_now(forget)
                here.engine.transact_now(take_over)
                nursery.start_soon(here.transfers.bring, ino)
                await until(
                    lambda: here.transfers.share(ino, 0) == 1.0 or site.holders(ino) == [1, 2],
                    "its data came",
                )
        await site.held_by(ino, [1, 2])
        assert here.read(ino) == data
        entry = here.peer.index.get(ino)
        assert entry is not None
        assert entry.chunks

    on_nodes(tmp_path, 2, test)


def test_what_came_while_its_former_content_is_dropped_is_recorded(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(5_000), space=site.cache)
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        data = content(6_000)
        st = there.write_in_place(ino, 0, data)
        there.files.add_version(ino, 0, 1)
        there.engine.transact_now(lambda t: publish(t, ino, st, version=1))
        assert site.holders(ino) == [2]
        here.engine.commits = trio.Event()
        await here.transfers.bring(ino)
        await until(lambda: here.peer.index.has(ino, 1), "it is about to be recorded")
        async with trio.open_nursery() as nursery:
            with slow(here) as disk:
                nursery.start_soon(here.transfers.outdated.drop, [(ino, 0)])
                await until(disk.begun.is_set, "the former data file is about to be unlinked")
                here.engine.commits.set()
                await trio.testing.wait_all_tasks_blocked(0.1)
        await site.held_by(ino, [1, 2])
        assert here.read(ino) == data

    on_nodes(tmp_path, 2, test)


def test_what_went_before_it_was_recorded_is_not_recorded(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(5_000), space=site.cache)
        here.engine.commits = trio.Event()
        await here.transfers.bring(ino)
        await until(lambda: here.peer.index.get(ino) is not None, "it is about to be recorded")
        here.files.unlink(ino, 0)
        here.peer.index.remove([ino])
        here.engine.commits.set()
        await until(lambda: here.holders.is_recorded(ino), "its end is known")
        assert site.holders(ino) == [2]
        await here.transfers.bring(ino)
        await site.held_by(ino, [1, 2])

    on_nodes(tmp_path, 2, test)


def test_what_is_dropped_while_it_is_settled_has_no_place_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = there.put(content(5_000), space=site.cache)
        syncing, may_sync, stored = threading.Event(), threading.Event(), threading.Event()
        store = here.peer.index.store

        def sync(_fd: int) -> None:
            syncing.set()
            assert may_sync.wait(_DEADLINE_S)

        def storing(sealed: Iterable[Sealed]) -> None:
            store(sealed)
            stored.set()

        monkeypatch.setattr(file_sync, "sync", sync)
        monkeypatch.setattr(here.peer.index, "store", storing)
        await here.transfers.bring(ino)
        await until(syncing.is_set, "it is settled")
        site.engine.transact_now(lambda t: held_names.drop(t, ino))
        here.engine.commits = trio.Event()
        async with trio.open_nursery() as nursery:
            with slow(here) as disk:
                nursery.start_soon(here.transfers.outdated.drop, [(ino, 0)])
                await until(disk.begun.is_set, "the data file is about to be unlinked")
                may_sync.set()
                await until(stored.is_set, "it is about to be recorded")
        here.engine.commits.set()
        await until(lambda: here.holders.is_recorded(ino), "its end is known")
        assert here.peer.index.get(ino) is None
        assert not list(here.files.scan())

    on_nodes(tmp_path, 2, test)
