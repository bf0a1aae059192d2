"""Sealing on real files: what is quiet gets its checksums, what is not stays as it is."""

import errno
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.admin.fsck import Fsck
from kvfs.base.errors import Unavailable
from kvfs.datastore import file_sync
from kvfs.datastore import files as data
from kvfs.datastore.checksum import FileChecksum, checksum
from kvfs.datastore.files import Description, description
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, namespace_root
from kvfs.node.tasks import sealer
from kvfs.node.tasks.seal_queue import SealQueue
from kvfs.tree import etags, lifecycle, namespaces, sealed_etags, tree
from kvfs.vfs.volume import Volume
from tests.contract.small_node import SmallNode, small_node
from tests.jumping import jumping_clock, run_jumping


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as made:
        yield made


@pytest.fixture
def space(node: SmallNode) -> int:
    return node.namespace("cache")


def listed(node: SmallNode) -> list[int]:
    return node.engine.read_now(lambda t: lifecycle.unsealed(t, 0, 100))


def is_sealed(node: SmallNode, ino: int) -> bool:
    inode = node.record(ino)
    assert inode is not None
    return bool(inode.flags & Flag.SEALED)


def test_a_published_file_is_sealed_synced_and_described(node: SmallNode, space: int) -> None:
    content = os.urandom(5 << 20)
    ino = node.write(space, "block", content)
    trio.run(node.sealer.settle)
    inode = node.record(ino)
    assert inode is not None
    fd = node.files.open(ino, 0, os.O_RDONLY)
    expected = checksum(fd, len(content))
    said = description(fd)
    os.close(fd)
    assert expected is not None
    assert inode.flags & Flag.SEALED
    assert inode.checksum == expected.combined
    assert inode.boot == 0, "its data are on disk"
    assert listed(node) == []
    entry = node.index.get(ino)
    assert entry is not None
    assert entry.chunks == expected.chunks
    if said is not None:
        assert (said.ino, said.size, said.checksum) == (ino, len(content), expected.combined)
        assert said.path == b"/cache/block"


def test_sealing_does_not_show_in_the_file_s_times(node: SmallNode, space: int) -> None:
    ino = node.write(space, "block", b"x")
    before = node.record(ino)
    trio.run(node.sealer.settle)
    after = node.record(ino)
    assert before is not None
    assert after is not None
    assert (after.mtime_ns, after.ctime_ns) == (before.mtime_ns, before.ctime_ns)


def test_sealing_is_no_access(node: SmallNode, space: int) -> None:
    ino = node.write(space, "block", b"x" * 100_000)
    long_ago = 1_577_836_800_000_000_000
    os.utime(node.files.path(ino, 0), ns=(long_ago, node.files.stat(ino, 0).st_mtime_ns))
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)
    assert node.files.stat(ino, 0).st_atime_ns == long_ago


def test_a_file_open_for_writing_is_not_sealed(node: SmallNode, space: int) -> None:
    ino, fd = node.make(space, "block")
    os.write(fd, b"x")
    node.publish(ino, fd)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, ino)
    assert listed(node) == [ino]
    node.close(ino, fd)
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)


def test_a_writer_this_process_does_not_know_of_counts(node: SmallNode, space: int) -> None:
    ino = node.write(space, "block", b"x" * mmap.PAGESIZE)
    with open(node.files.path(ino, 0), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, ino)
    mapping[:6] = b"stored"
    mapping.close()
    trio.run(node.sealer.settle)
    inode = node.record(ino)
    fd = node.files.open(ino, 0, os.O_RDONLY)
    found = checksum(fd, mmap.PAGESIZE)
    os.close(fd)
    assert inode is not None
    assert found is not None
    assert inode.flags & Flag.SEALED
    assert inode.checksum == found.combined


def test_a_seal_that_only_the_engine_keeps_back_reads_and_syncs_once(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def counted(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            steps.append(name)
            return step(*arguments, **options)

        return run

    async def away(_fn: Callable[[Transaction], Any], **_options: Any) -> None:
        raise Unavailable("the engine does not answer")

    monkeypatch.setattr(sealer, "checksum", counted("read", checksum))
    monkeypatch.setattr(data, "describe", counted("described", data.describe))
    monkeypatch.setattr(file_sync, "sync_many", counted("synced", file_sync.sync_many))
    same, changed = node.write(space, "same", b"x"), node.write(space, "changed", b"x")
    before = node.record(same)
    with monkeypatch.context() as patch:
        patch.setattr(node.engine, "transact", away)
        for _ in range(3):
            with pytest.raises(Unavailable):
                trio.run(node.sealer.settle)
    assert sorted(steps) == ["described", "described", "read", "read", "synced"]
    steps.clear()
    Path(node.files.path(changed, 0)).write_bytes(b"y")
    trio.run(node.sealer.settle)
    assert steps == ["read", "described", "synced"], "of what was written since"
    assert is_sealed(node, same)
    after = node.record(same)
    assert before is not None
    assert after is not None
    assert (after.mtime_ns, after.ctime_ns) == (before.mtime_ns, before.ctime_ns)
    assert is_sealed(node, changed)


def test_a_change_between_reading_and_sealing_is_noticed(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = node.write(space, "block", b"first")
    record = node.sealer._record

    async def change_first(read: list) -> None:  # type: ignore[type-arg]
        Path(node.files.path(ino, 0)).write_bytes(b"other")
        await record(read)

    monkeypatch.setattr(node.sealer, "_record", change_first)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, ino)
    monkeypatch.undo()
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)


@pytest.mark.parametrize("is_back", [False, True])
def test_a_change_while_it_is_described_is_noticed(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch, is_back: bool
) -> None:
    """Also where its writer set the time back, and the description hides what the kernel noted."""
    ino = node.write(space, "block", b"first")
    path, describe = Path(node.files.path(ino, 0)), data.describe

    def change(fd: int, said: Description) -> bool:
        before = os.fstat(fd)
        path.write_bytes(b"other")
        if is_back:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            trio.from_thread.run_sync(node.sealer.published, ino, 0, 0)
        return describe(fd, said)

    monkeypatch.setattr(data, "describe", change)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, ino)
    monkeypatch.undo()
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)
    assert list(Fsck(node.engine, node.files, node.index, checksums=True).check()) == []


def test_a_seal_is_one_commit(node: SmallNode, space: int) -> None:
    for number in range(100):
        node.write(space, f"block{number}", b"x")
    commits = []
    transact = node.engine.transact

    async def counted(fn: Callable[[Transaction], object]) -> object:
        commits.append(fn)
        return await transact(fn)

    node.engine.transact = counted  # type: ignore[method-assign,assignment]
    trio.run(node.sealer.settle)
    assert listed(node) == []
    assert len(commits) == 1


def test_an_unlinked_or_unpublished_file_is_left_alone(node: SmallNode, space: int) -> None:
    gone = node.write(space, "gone", b"x")
    node.engine.transact_now(lambda t: lifecycle.evict(t, gone, 1))
    young, fd = node.make(space, "young")
    node.holders.not_writing(young)
    os.close(fd)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, gone)
    assert not is_sealed(node, young)


def test_a_missing_data_file_stops_nothing(node: SmallNode, space: int) -> None:
    lost = node.write(space, "lost", b"x")
    whole = node.write(space, "whole", b"x")
    node.files.unlink(lost, 0)
    trio.run(node.sealer.settle)
    assert not is_sealed(node, lost)
    assert is_sealed(node, whole)


def test_the_keeper_seals_what_it_is_told_of_and_what_the_engine_lists(
    node: SmallNode, space: int
) -> None:
    async def main() -> None:
        told = node.write(space, "told", b"x")
        listed_only = node.write(space, "listed", b"y")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            node.sealer.published(told, 0, 0)
            with trio.fail_after(60):
                while not (is_sealed(node, told) and is_sealed(node, listed_only)):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    with jumping_clock() as clock:
        trio.run(main, clock=clock)
    assert node.sealer.counters["sealed_files"] == 2


def test_what_is_listed_and_has_no_name_gets_no_place_in_the_index(
    node: SmallNode, space: int
) -> None:
    """Its drop has removed it from the index: nobody would remove it again."""
    removed = node.write(space, "removed", b"x")
    kept = node.write(space, "kept", b"y")
    node.index.remove([removed, kept])
    node.engine.transact_now(lambda t: lifecycle.evict(t, removed, 1))
    queue = SealQueue(node.engine, node.index)
    assert listed(node) == [removed, kept]
    trio.run(queue.scan, 1.0)
    assert [node.index.has(ino, 0) for ino in (removed, kept)] == [False, True]
    assert [ino in queue for ino in (removed, kept)] == [False, True]


def test_a_busy_file_is_tried_ever_more_rarely(node: SmallNode, space: int) -> None:
    attempts = []
    read_one = node.sealer._read_one

    def counted(ino: int, version: int, *, md5: bool) -> object:
        attempts.append(ino)
        return read_one(ino, version, md5=md5)

    async def main() -> None:
        ino = node.write(space, "busy", b"x")
        with open(node.files.path(ino, 0), "r+b"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.sealer.run)
                node.sealer.published(ino, 0, 0)
                await trio.sleep(200)
                nursery.cancel_scope.cancel()

    node.sealer._read_one = counted  # type: ignore[method-assign,assignment]
    with jumping_clock() as clock:
        trio.run(main, clock=clock)
    assert 4 <= len(attempts) <= 60


@pytest.mark.parametrize("step", ["file_lease.is_quiet", "seal.settle_on_disk", "seal.stamp"])
def test_an_error_of_the_disk_does_not_end_the_keeper(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    module, name = step.split(".")
    works = getattr(getattr(sealer, module), name)
    failures = [OSError(errno.EIO, "Input/output error")] * 2

    def failing(*arguments: object) -> object:
        if failures:
            raise failures.pop()
        return works(*arguments)

    async def main() -> None:
        ino = node.write(space, "block", b"x")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            node.sealer.published(ino, 0, 0)
            with trio.fail_after(600):
                while listed(node):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        assert is_sealed(node, ino)

    monkeypatch.setattr(f"kvfs.node.tasks.sealer.{step}", failing)
    with jumping_clock() as clock:
        trio.run(main, clock=clock)
    assert not failures


def test_a_full_disk_is_one_line_in_the_log_however_many_files_it_is_met_with(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            with monkeypatch.context() as patched, trio.fail_after(600):
                patched.setattr("kvfs.vfs.seal.data.describe", full)
                for number in range(20):
                    node.sealer.published(node.write(space, f"block-{number}", b"x"), 0, 0)
                while node.sealer.counters["seals_failed"] < 60:
                    await trio.sleep(0.1)
            with trio.fail_after(600):
                while listed(node):
                    await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    with jumping_clock() as clock:
        trio.run(main, clock=clock)
    lines = [each.getMessage() for each in caplog.records]
    assert len(lines) == 2
    assert "cannot be sealed" in lines[0]
    assert os.strerror(errno.ENOSPC) in lines[0]
    assert f"after {node.sealer.counters['seals_failed']} failures" in lines[1]


@pytest.mark.parametrize(("publishes_for_s", "rounds"), [(10.4, 6), (60, 1)])
def test_who_writes_is_left_the_disk_while_he_writes(
    node: SmallNode, space: int, publishes_for_s: float, rounds: int
) -> None:
    ino = node.write(space, "block", b"x")
    begun = []

    async def slow() -> None:
        begun.append(trio.current_time())
        await trio.sleep(10)

    async def publish() -> None:
        with trio.move_on_after(publishes_for_s):
            while True:
                node.sealer.published(ino, 0, 0)
                await trio.sleep(0.1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            nursery.start_soon(publish)
            await trio.sleep(60)
            nursery.cancel_scope.cancel()

    node.sealer._seal_due = slow  # type: ignore[method-assign]
    run_jumping(main)
    assert len(begun) == rounds


def test_what_was_removed_holds_nobody_up(node: SmallNode, space: int) -> None:
    last = node.write(space, "last", b"x")

    async def main() -> float:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for number in range(1, 5_000):
                node.sealer.published(last + number, 0, 0)  # there are no such files any more
            node.sealer.published(last, 0, 0)
            nursery.start_soon(node.sealer.run)
            while not is_sealed(node, last):
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
        return trio.current_time() - began

    with jumping_clock() as clock:
        took_s = trio.run(main, clock=clock)
    assert took_s < 10, "in its place behind the others it takes 40"


def test_what_is_removed_while_it_is_read_does_not_come_back_into_the_index(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, stays = node.write(space, "gone", b"x"), node.write(space, "stays", b"x")
    volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)

    async def remove() -> None:
        root = namespace_root(space)
        node.engine.transact_now(lambda t: tree.unlink(t, root, b"gone", 1, lambda _: True))
        await volume.drop([(gone, 0)])

    def read_then_remove(fd: int, size: int, **options: Any) -> FileChecksum | None:
        found = checksum(fd, size, **options)
        if node.record(gone) is not None:
            trio.from_thread.run(remove)
        return found

    monkeypatch.setattr(sealer, "checksum", read_then_remove)
    trio.run(node.sealer.settle)
    assert is_sealed(node, stays)
    assert [ino for ino, _ in node.index.entries()] == [stays]
    assert list(Fsck(node.engine, node.files, node.index, checksums=True).check()) == []


def with_md5(node: SmallNode, space: int) -> None:
    node.engine.transact_now(lambda t: namespaces.set_policy(t, space, now=0, etag="md5-all"))


def etag(node: SmallNode, ino: int) -> str:
    inode = node.record(ino)
    assert inode is not None
    kept = node.engine.read_now(lambda t: t.get(keys.xattr(ino, etags.ETAG)))
    return etags.etag_of(kept, ino, inode)


def test_a_seal_gives_the_md5_where_the_namespace_says_so(node: SmallNode, space: int) -> None:
    other = node.write(node.namespace("other"), "other", b"x")
    with_md5(node, space)
    content = os.urandom((9 << 20) + 7)
    ino = node.write(space, "block", content)
    trio.run(node.sealer.settle)
    assert etag(node, ino) == hashlib.md5(content).hexdigest()
    assert etag(node, other).endswith("-1")


def test_an_etag_that_was_told_before_the_seal_stays(node: SmallNode, space: int) -> None:
    """For as long as its content: the next one gets its MD5."""
    with_md5(node, space)
    ino = node.write(space, "block", b"first")
    told = etag(node, ino)
    assert told.endswith("-1")
    assert not node.engine.transact_now(lambda t: sealed_etags.keep(t, ino, "another"))
    assert node.engine.transact_now(lambda t: sealed_etags.keep(t, ino, told))
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)
    assert etag(node, ino) == told
    fd = os.open(node.files.path(ino, 0), os.O_RDWR)
    os.write(fd, b"second")
    node.publish(ino, fd)
    os.close(fd)
    trio.run(node.sealer.settle)
    assert etag(node, ino) == hashlib.md5(b"second").hexdigest()


def test_what_somebody_waits_for_is_sealed_first(node: SmallNode, space: int) -> None:
    """At once, though it was published just now and others rest; what is in use is tried."""

    async def main() -> None:
        inos = [node.write(space, f"block{number}", b"x") for number in range(100)]
        used, fd = node.make(space, "in use")
        node.publish(used, fd)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            for ino in (*inos, used):
                node.sealer.published(ino, 0, 0)
            began = trio.current_time()
            await node.sealer.seal_first(inos)
            assert trio.current_time() == began
            assert all(is_sealed(node, ino) for ino in inos)
            await node.sealer.seal_first([used])
            assert not is_sealed(node, used)
            assert trio.current_time() < began + 1
            nursery.cancel_scope.cancel()
        node.close(used, fd)

    with jumping_clock() as clock:
        trio.run(main, clock=clock)


def test_what_is_about_to_be_closed_is_waited_for(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a last close a moment after it was published."""
    looks = []

    def writing(ino: int) -> bool:
        looks.append(ino)
        if len(looks) == 1:
            return True
        if len(looks) == 2:
            node.close(ino, fd)
        return False

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.sealer.run)
            node.sealer.published(ino, 0, 0)
            await node.sealer.seal_first([ino])
            assert is_sealed(node, ino)
            nursery.cancel_scope.cancel()

    ino, fd = node.make(space, "block")
    node.publish(ino, fd)
    monkeypatch.setattr(node.sealer, "_writing", writing)
    with jumping_clock() as clock:
        trio.run(main, clock=clock)


def test_a_stop_does_not_wait_for_a_long_file(
    node: SmallNode, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ino = node.write(space, "long", b"x" * (9 << 20))
    chunks = []

    def read(fd: int, size: int, *, md5: bool, step: Callable[[], None]) -> FileChecksum | None:
        def stopping() -> None:
            chunks.append(fd)
            if len(chunks) == 2:
                trio.from_thread.run_sync(stop.cancel)
            step()

        return checksum(fd, size, md5=md5, step=stopping)

    async def main() -> None:
        with stop:
            await node.sealer.settle()

    monkeypatch.setattr(sealer, "checksum", read)
    stop = trio.CancelScope()
    trio.run(main)
    assert stop.cancelled_caught
    assert len(chunks) == 2
    assert not is_sealed(node, ino)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(chunks[0])
    monkeypatch.undo()
    trio.run(node.sealer.settle)
    assert is_sealed(node, ino)
