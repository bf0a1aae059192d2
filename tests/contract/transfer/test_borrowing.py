"""Bytes of a data file that another node has, for a process of this host: nodes on one engine,
which fetch from each other over loopback."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Invalid, Stale, Unavailable
from kvfs.meta.records import namespace_root
from kvfs.transfer.transfers import Transfers
from kvfs.tree import reserved_inodes, tree
from tests.contract.bringers import Host, Site, on_nodes
from tests.contract.peers import content

MIB = 1 << 20


def begun(host: Host, space: int) -> int:
    """The number of a data file that a process has begun."""
    ino = host.engine.transact_now(lambda t: reserved_inodes.reserve(t, space, 1))
    os.close(host.files.create(ino, 0))
    return ino


def borrowers(
    root: Path, test: Callable[[Site, Transfers], Awaitable[None]], count: int = 2
) -> None:
    """With what borrows on the first of so many nodes."""

    async def main(site: Site) -> None:
        await test(site, site.hosts[0].transfers)

    on_nodes(root, count, main)


def bytes_of(host: Host, ino: int) -> bytes:
    fd = host.files.open(ino, 0, os.O_RDONLY)
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def test_each_borrower_gets_as_much_as_it_asked_for(tmp_path: Path) -> None:
    async def test(site: Site, transfers: Transfers) -> None:
        here, there = site.hosts
        data = content(9 * MIB + 5)
        ino = there.put(data, space=site.durable, sealed=False)
        sizes = (len(data), 5 * MIB, 1)
        into = [begun(here, site.durable) for _ in sizes]
        async with trio.open_nursery() as nursery:
            for size, number in zip(sizes, into, strict=True):
                nursery.start_soon(transfers.borrow, ino, size, number)
        assert [bytes_of(here, number) for number in into] == [data[:size] for size in sizes]
        assert not here.has(ino)
        assert site.holders(ino) == [2]

    borrowers(tmp_path, test)


def test_who_asks_again_waits_for_the_same_bytes(tmp_path: Path) -> None:
    async def test(site: Site, transfers: Transfers) -> None:
        here, there = site.hosts
        ino = there.put(content(MIB), space=site.durable, sealed=False)
        into = begun(here, site.durable)
        with trio.CancelScope() as patience:
            patience.cancel()
            await transfers.borrow(ino, MIB, into)
        assert patience.cancelled_caught
        await transfers.borrow(ino, MIB, into)
        assert bytes_of(here, into) == content(MIB)
        assert there.peer.server.counters["peers_sent_bytes"] == MIB

    borrowers(tmp_path, test)


def test_nothing_is_brought_into_a_file_that_is_somebodys(tmp_path: Path) -> None:
    async def test(site: Site, transfers: Transfers) -> None:
        here, there = site.hosts
        ino = there.put(b"lent", space=site.durable, sealed=False)
        own = here.put(b"own", space=site.durable)
        with pytest.raises(Invalid):
            await transfers.borrow(ino, 4, own)
        assert here.read(own) == b"own"

    borrowers(tmp_path, test)


def test_what_nobody_has_is_not_waited_for(tmp_path: Path) -> None:
    async def test(site: Site, transfers: Transfers) -> None:
        here, there = site.hosts
        ino = there.put(b"lent", space=site.cache, sealed=False)
        into = begun(here, site.cache)
        site.dead.add(2)
        with pytest.raises(Unavailable):
            await transfers.borrow(ino, 4, into)
        site.dead.clear()
        await transfers.borrow(ino, 4, into)
        assert bytes_of(here, into) == b"lent"
        root, name = namespace_root(site.cache), b"f%d" % ino
        there.engine.transact_now(lambda t: tree.unlink(t, root, name, 1, lambda _: False))
        there.engine.transact_now(lambda t: tree.reap(t, ino))
        with pytest.raises(Stale):
            await transfers.borrow(ino, 4, into)

    borrowers(tmp_path, test)
