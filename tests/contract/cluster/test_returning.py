"""A node of a cluster that returns after a kill, or after others went on without it."""

import errno
import os
import time
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Conflict, Stale
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, namespace_root
from kvfs.node.recover import Recovery
from kvfs.node.tasks.stale_data_gc import Strays
from kvfs.tree import lifecycle, tree
from kvfs.tree.copies import placements
from tests.contract.bringers import Host, Site, on_nodes
from tests.contract.peers import content

BOOT = 12345


def strays_of(host: Host) -> Strays:
    return Strays(host.engine, host.files, host.peer.index, host.holders)


async def sweep(host: Host) -> None:
    await strays_of(host).sweep(time.time_ns() + 1_000_000_000)


def lose_placement(host: Host, ino: int) -> None:
    host.engine.transact_now(lambda t: placements.let_go(t, ino, t.node))


def recovery_of(host: Host) -> Recovery:
    return Recovery(host.engine, host.files, host.peer.index, {BOOT}, time.time_ns())


def write_on(host: Host, ino: int, data: bytes) -> None:
    """As a writer that was killed before its close."""
    host.engine.transact_now(lambda t: lifecycle.reopen(t, ino))
    fd = host.files.open(ino, host.inode(ino).version, os.O_WRONLY | os.O_APPEND)
    os.write(fd, data)
    os.close(fd)


def test_data_files_are_kept_as_their_records_say(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        held = here.put(b"held", space=site.durable)
        alone = here.put(content(5 << 20), space=site.durable)
        copied = there.put(b"copied", space=site.durable)
        await here.transfers.bring(copied)
        await site.held_by(copied, [1, 2])
        lose_placement(here, alone)
        lose_placement(here, copied)
        damaged = here.put(b"whole", space=site.durable)
        lose_placement(here, damaged)
        fd = here.files.open(damaged, 0, os.O_RDWR)
        os.pwrite(fd, b"W", 0)
        os.close(fd)
        old = here.put(b"old", space=site.durable)
        here.files.add_version(old, 0, 7)
        nobodys, reserved = old + 100, old + 101
        for ino in (nobodys, reserved):
            os.close(here.files.create(ino, 0))
        here.engine.transact_now(lambda t: t.put(keys.reserved(reserved), t.node))

        await strays_of(here).sweep(0)  # all of them are younger
        assert len(list(here.files.scan())) == 8
        here.holders.opened(nobodys)
        await sweep(here)
        assert (nobodys, 0) in here.files.scan()
        here.holders.released(nobodys)
        await sweep(here)
        assert sorted(here.files.scan()) == sorted([(held, 0), (alone, 0), (old, 0), (reserved, 0)])
        assert site.holders(alone) == [1]
        assert site.holders(copied) == [2]
        [kept] = here.files.quarantined()
        assert (kept.ino, kept.reason) == (damaged, Reason.DAMAGED)

    on_nodes(tmp_path, 2, test)


def test_what_its_journal_lost_of_the_index_comes_back(tmp_path: Path) -> None:
    """Of one file it has what the close wrote, and not what the seal did."""

    async def test(site: Site) -> None:
        here, _ = site.hosts
        index = here.peer.index
        whole, damaged, closed = (here.put(content(5 << 20), space=site.durable) for _ in range(3))
        sums = index.get(whole)
        used = index.used_bytes()
        assert sums is not None
        assert sums.chunks
        fd = here.files.open(damaged, 0, os.O_RDWR)
        os.pwrite(fd, b"W", 0)
        os.close(fd)
        index.remove([whole, damaged, closed])
        index.add(closed, 0)
        index.flush()
        await sweep(here)
        index.flush()
        for again in (index.get(whole), index.get(closed)):
            assert again is not None
            assert (again.chunks, again.blocks) == (sums.chunks, sums.blocks)
        other = index.get(damaged)
        assert other is not None
        assert other.chunks == b"", "the scrubber judges it"
        assert index.used_bytes() == used
        assert site.holders(damaged) == [1]

    on_nodes(tmp_path, 2, test)


def test_what_no_record_names_is_not_unlinked(tmp_path: Path) -> None:
    """The engine lost it, and the node had no turn when that was rebuilt."""

    async def test(site: Site) -> None:
        here, _ = site.hosts
        lost = here.put(b"the only copy", space=site.durable)
        block = here.put(b"a miss", space=site.cache)
        newer = here.put(b"newer than its record", space=site.durable)
        here.files.replace_version(newer, 0, 9)
        for ino in (lost, block):
            lose_placement(here, ino)
            here.engine.transact_now(lambda t, ino=ino: t.delete(keys.inode(ino)))
        await sweep(here)
        assert list(here.files.scan()) == []
        kept = {each.ino: each for each in here.files.quarantined()}
        assert {ino: each.reason for ino, each in kept.items()} == {
            lost: Reason.UNNAMED,
            newer: Reason.OUTDATED,
        }
        assert Path(kept[lost].path).read_bytes() == b"the only copy"

    on_nodes(tmp_path, 2, test)


def test_nothing_is_judged_by_metadata_that_are_copied_just_now(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, _ = site.hosts
        inos = [here.put(b"data", space=each) for each in (site.durable, site.cache)]
        mark = keys.copying(site.durable)
        records = here.engine.read_now(lambda t: [t.get(keys.inode(ino)) for ino in inos])

        def begin(t: Transaction) -> None:
            t.put(mark, b"")
            for ino in inos:
                t.delete(keys.inode(ino))

        def finish(t: Transaction) -> None:
            t.delete(mark)
            for ino, record in zip(inos, records, strict=True):
                assert record is not None
                t.put(keys.inode(ino), record)

        here.engine.transact_now(begin)
        with pytest.raises(Conflict, match="unfinished copy"):
            await sweep(here)
        here.engine.transact_now(finish)
        await sweep(here)
        assert [here.read(ino) for ino in inos] == [b"data", b"data"]

    on_nodes(tmp_path, 2, test)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("call", ["open", "fsync", "preadv"])
def test_what_cannot_be_judged_now_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    async def test(site: Site) -> None:
        here, _ = site.hosts
        alone = here.put(b"the only copy", space=site.durable)
        lose_placement(here, alone)

        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            await sweep(here)
        assert list(here.files.scan()) == [(alone, 0)]
        assert list(here.files.quarantined()) == []
        await sweep(here)
        assert list(here.files.scan()) == [(alone, 0)]
        assert here.read(alone) == b"the only copy"
        if (call, code) == ("fsync", errno.EIO):
            assert site.holders(alone) == [], "a disk that lost it is not believed the next time"
        else:
            assert site.holders(alone) == [1]

    on_nodes(tmp_path, 2, test)


def test_a_power_cut_on_one_node_costs_no_file_of_another(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        others = [there.put(b"x", space=space) for space in (site.cache, site.durable)]
        lost = here.put(b"lost", space=site.cache)
        copied = here.put(b"copied", space=site.cache)
        await there.transfers.bring(copied)
        await site.held_by(copied, [1, 2])
        for ino in (lost, copied):
            here.files.unlink(ino, 0)
        recovery = recovery_of(here)
        await recovery.run(orderly=False, compare_all=True)
        assert all(here.inode(ino).nlink for ino in (*others, copied))
        assert site.holders(copied) == [2]
        try:
            assert not here.inode(lost).nlink
        except Stale:
            pass
        assert recovery.found["records_without_data_dropped"] == 1
        assert recovery.found["durable_data_missing"] == 0

    on_nodes(tmp_path, 2, test)


def test_what_was_written_and_not_closed_gives_way_to_a_whole_copy(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"closed", space=site.durable)
        await there.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        write_on(here, ino, b" and more")
        await recovery_of(here).run(orderly=False, compare_all=False)
        assert site.holders(ino) == [2]
        await here.transfers.bring(ino)
        assert here.read(ino) == b"closed"

    on_nodes(tmp_path, 2, test)


def test_what_nobody_else_has_is_new_content(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"closed", space=site.durable)
        write_on(here, ino, b" and more")
        await recovery_of(here).run(orderly=False, compare_all=False)
        inode = here.inode(ino)
        assert (inode.size, site.holders(ino)) == (15, [1])
        assert inode.version > 0
        assert not inode.flags & Flag.SEALED
        await there.transfers.bring(ino)
        assert there.read(ino) == b"closed and more"
        assert list(here.files.scan()) == [(ino, inode.version)]

    on_nodes(tmp_path, 2, test)


def test_data_that_a_power_cut_may_have_torn_are_those_of_a_copy(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"copied", space=site.durable, sealed=False)
        alone = here.put(b"alone", space=site.durable, sealed=False)
        await there.transfers.bring(ino)
        await site.held_by(ino, [1, 2])

        def not_synced(t: Transaction) -> None:
            for each in (ino, alone):
                inode = tree.read_inode(t, each)
                inode.boot = BOOT - 1
                tree.write_inode(t, each, inode)

        here.engine.transact_now(not_synced)
        await recovery_of(here).run(orderly=False, compare_all=False)
        assert (site.holders(ino), here.inode(ino).boot) == ([2], 0)
        assert there.engine.read_now(lambda t: lifecycle.unsealed(t, 0, 10)) == [ino]
        assert list(here.files.scan()) == []
        await here.transfers.bring(ino)
        assert here.read(ino) == b"copied"

    on_nodes(tmp_path, 2, test)


def test_a_file_that_was_removed_meanwhile_ends_with_its_last_holder(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        here, there = site.hosts
        ino = here.put(b"data", space=site.durable)
        await there.transfers.bring(ino)
        await site.held_by(ino, [1, 2])
        root, name = namespace_root(site.durable), b"f%d" % ino
        there.engine.transact_now(lambda t: tree.unlink(t, root, name, 1, lambda _: True))
        await there.volume.drop([(ino, 0)])
        assert site.holders(ino) == [1]
        await recovery_of(there).run(orderly=True, compare_all=False)
        assert not here.inode(ino).nlink  # its last holder has not returned yet
        await recovery_of(here).run(orderly=True, compare_all=False)
        await trio.lowlevel.checkpoint()
        assert not list(here.files.scan())
        assert here.engine.read_now(lambda t: t.get(keys.inode(ino))) is None

    on_nodes(tmp_path, 2, test)
