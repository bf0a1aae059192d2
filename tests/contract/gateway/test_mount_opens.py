"""How the mount comes to an open file when the first look opens nothing: by the loop of every door,
so its answers are those of `tests/contract/vfs/test_open.py`, as the kernel gets them."""

import contextlib
import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.errno_map import errno_of
from gateway.fuse.files.kernel_inodes import InodeOpener, KernelInodes
from kvfs.base.config import Config
from kvfs.base.errors import (
    Busy,
    Conflict,
    Corrupt,
    KvfsError,
    NotFound,
    OtherVersion,
    Stale,
    Unavailable,
)
from kvfs.client.file_status import describe
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, namespace_root
from kvfs.node import Node, open_node
from kvfs.node.local_port import LocalPort
from kvfs.tree import namespaces, tree
from kvfs.tree.inodes import read_inode, write_inode
from kvfs.vfs.port import State
from tests.contract.operations import MountedNode

CALLER = Caller(7, 8, 9)
CONTENT = b"what is stored"
LOOKS = 2
"""The kernel looks a name up again after ESTALE, once."""


class Mount:
    """The mount of one node; each of its namespaces has a sealed file `a`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.operations = MountedNode(node).operations

    def root(self, kind: str) -> int:
        name = b"cache" if kind == "cache" else b"models"
        return namespace_root(self.node.local.read_now(lambda t: namespaces.by_name(t, name))[0])

    async def store(self, kind: str, name: bytes, content: bytes = CONTENT) -> int:
        operations, root = self.operations, self.root(kind)
        handle, ino, _ = await operations.create(root, name, stat.S_IFREG, os.O_WRONLY, CALLER)
        os.write(handle.file.fd, content)
        await operations.flush(handle.fh)
        await operations.release(handle.fh)
        await self.node.port.seal([ino])
        operations.open_files.let_go(ino)
        return ino

    async def read(self, kind: str, name: bytes = b"a") -> bytes:
        """What a program reads that opens the name."""
        operations = self.operations
        for look in range(LOOKS):
            ino, _ = await operations.lookup(self.root(kind), name)
            try:
                handle = await operations.open(ino, os.O_RDONLY, CALLER.uid)
            except Stale:
                if look == LOOKS - 1:
                    raise
                continue
            content = os.pread(handle.file.fd, 1 << 20, 0)
            await operations.release(handle.fh)
            return content
        raise AssertionError

    async def answer(self, kind: str) -> bytes | int:
        """What the program gets: the content, or an errno."""
        try:
            return await self.read(kind)
        except (KvfsError, OSError) as error:
            return errno_of(error)

    def data_file(self, ino: int) -> Path:
        version = self.node.local.read_now(lambda t: read_inode(t, ino)).version
        return Path(self.node.files.path(ino, version))


def on_a_mount(base: Path, fn: Callable[[Mount], Awaitable[None]]) -> None:
    async def main() -> None:
        async with open_node(Config(store=base / "store", s3="off")) as node:
            mount = Mount(node)
            await fn(mount)
            await mount.operations.close()

    trio.run(main)


def shorten(mount: Mount, ino: int) -> None:
    os.truncate(mount.data_file(ino), len(CONTENT) // 2)


def lengthen(mount: Mount, ino: int) -> None:
    with mount.data_file(ino).open("ab") as data:
        data.write(b"more")


def lose(mount: Mount, ino: int) -> None:
    mount.data_file(ino).unlink()


def put_in_tier(mount: Mount, ino: int) -> None:
    """As a node with a cold tier has left it; this one has none."""
    lose(mount, ino)

    def fn(t: Transaction) -> None:
        inode = read_inode(t, ino)
        inode.flags |= Flag.COLD
        write_inode(t, ino, inode)

    mount.node.local.transact_now(fn)


def orphan(mount: Mount, ino: int) -> None:
    """Another process removed the name a moment ago."""
    parent = mount.node.local.read_now(lambda t: read_inode(t, ino)).parent
    mount.node.local.transact_now(lambda t: tree.unlink(t, parent, b"a", 1, lambda _: True))


def test_a_new_file_s_access_time_costs_no_commit_of_its_own(tmp_path: Path) -> None:
    async def run(mount: Mount) -> None:
        operations, root = mount.operations, mount.root("cache")
        handle, ino, _ = await operations.create(root, b"a", stat.S_IFREG, os.O_RDWR, CALLER)
        os.write(handle.file.fd, CONTENT)
        accessed_ns = 1_577_836_800_000_000_000
        os.utime(handle.file.fd, ns=(accessed_ns, accessed_ns))
        await operations.flush(handle.fh)
        await operations.release(handle.fh)
        assert mount.node.volume.atimes == {}
        assert mount.node.local.read_now(lambda t: read_inode(t, ino)).atime_ns == accessed_ns
        assert await mount.read("cache") == CONTENT
        assert mount.node.volume.atimes.keys() == {ino}, "it was read since"

    on_a_mount(tmp_path, run)


def test_what_the_sealer_does_to_a_data_file_shows_in_no_time(tmp_path: Path) -> None:
    async def run(mount: Mount) -> None:
        operations, root = mount.operations, mount.root("cache")
        handle, ino, _ = await operations.create(root, b"a", stat.S_IFREG, os.O_WRONLY, CALLER)
        os.write(handle.file.fd, CONTENT)
        await operations.flush(handle.fh)
        await operations.release(handle.fh)
        before = await operations.attributes.getattr(ino)
        data, described = mount.data_file(ino), before.ctime_ns
        while described == before.ctime_ns:  # until the filesystem's clock has gone on
            os.setxattr(data, "user.test", b"x")
            described = data.stat().st_ctime_ns
        after = await operations.attributes.getattr(ino)
        record = mount.node.local.read_now(lambda t: read_inode(t, ino))
        told = describe(b"a", ino, record, data.stat())
        assert (after.ctime_ns, told.ctime_ns) == (before.ctime_ns, before.ctime_ns)
        with data.open("ab") as file:
            file.write(b"more")
        assert (await operations.attributes.getattr(ino)).ctime_ns > before.ctime_ns

    on_a_mount(tmp_path, run)


@pytest.mark.parametrize(
    ("spoil", "cache", "durable"),
    [
        (lambda *_: None, CONTENT, CONTENT),
        (lose, errno.ENOENT, errno.EIO),
        (shorten, errno.ENOENT, errno.EIO),
        (lengthen, errno.ENOENT, errno.EIO),
        (put_in_tier, errno.ENOENT, errno.EIO),
        (orphan, errno.ENOENT, errno.ENOENT),
    ],
)
@pytest.mark.parametrize("kind", ["cache", "durable"])
def test_each_state_has_its_answer(
    tmp_path: Path,
    kind: str,
    spoil: Callable[[Mount, int], None],
    cache: bytes | int,
    durable: bytes | int,
) -> None:
    async def run(mount: Mount) -> None:
        spoil(mount, await mount.store(kind, b"a"))
        meant = cache if kind == "cache" else durable
        assert [await mount.answer(kind) for _ in range(2)] == [meant, meant]

    on_a_mount(tmp_path, run)


def test_what_is_in_a_tier_that_is_not_asked_stays_recorded(tmp_path: Path) -> None:
    async def run(mount: Mount) -> None:
        ino = await mount.store("cache", b"a")
        put_in_tier(mount, ino)
        assert await mount.answer("cache") == errno.ENOENT
        assert mount.node.local.read_now(lambda t: read_inode(t, ino)).nlink == 1

    on_a_mount(tmp_path, run)


def test_a_durable_file_whose_data_are_lost_is_corrupt(tmp_path: Path) -> None:
    async def run(mount: Mount) -> None:
        lose(mount, await mount.store("durable", b"a"))
        with pytest.raises(Corrupt, match="kvfs fsck"):
            await mount.read("durable")

    on_a_mount(tmp_path, run)


def test_what_took_its_place_meanwhile_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        lose(mount, await mount.store("durable", b"a"))
        await mount.store("durable", b"b", b"newer")
        root = mount.root("durable")

        async def replaced(_port: LocalPort, _ino: int) -> State:
            mount.node.local.transact_now(
                lambda t: tree.rename(
                    t, root, b"b", root, b"a", flags=0, now=1, keep=lambda _: True
                )
            )
            return "nowhere"

        monkeypatch.setattr(LocalPort, "bring", replaced)
        assert await mount.read("durable") == b"newer"

    on_a_mount(tmp_path, run)


def test_data_that_come_and_go_are_unavailable_after_some_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        lose(mount, await mount.store("durable", b"a"))
        asked = []

        async def here(_port: LocalPort, ino: int) -> State:
            asked.append(ino)
            return "here"

        monkeypatch.setattr(LocalPort, "bring", here)
        with pytest.raises(Unavailable, match="try again"):
            await mount.read("durable")
        assert 1 < len(asked) < 20

    on_a_mount(tmp_path, run)


def test_data_that_are_coming_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        ino = await mount.store("durable", b"a")
        data, kept = mount.data_file(ino), tmp_path / "kept"
        data.rename(kept)
        states: list[State] = ["here", "coming", "coming"]

        async def coming(_port: LocalPort, _ino: int) -> State:
            state = states.pop()
            if state == "here":
                kept.rename(data)
            return state

        monkeypatch.setattr(LocalPort, "bring", coming)
        assert await mount.read("durable") == CONTENT
        assert not states

    on_a_mount(tmp_path, run)


@pytest.mark.parametrize("error", [NotFound, Stale, Conflict])
def test_what_others_let_go_or_wrote_meanwhile_is_looked_at_again(
    tmp_path: Path, error: type[KvfsError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        ino = await mount.store("durable", b"a")
        data, kept = mount.data_file(ino), tmp_path / "kept"
        data.rename(kept)

        async def came(_port: LocalPort, _ino: int) -> State:
            kept.rename(data)
            raise error("another node has other content by now")

        monkeypatch.setattr(LocalPort, "bring", came)
        assert await mount.read("durable") == CONTENT

    on_a_mount(tmp_path, run)


@pytest.mark.parametrize("error", [OtherVersion, Busy, Unavailable])
def test_the_answer_of_the_node_is_that_of_the_mount(
    tmp_path: Path, error: type[KvfsError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        lose(mount, await mount.store("cache", b"a"))

        async def refused(_port: LocalPort, _ino: int) -> State:
            raise error("it is written elsewhere")

        monkeypatch.setattr(LocalPort, "bring", refused)
        with pytest.raises(error, match="written elsewhere"):
            await mount.read("cache")

    on_a_mount(tmp_path, run)


def test_a_file_that_is_cut_to_nothing_needs_no_data_that_fit_its_record(tmp_path: Path) -> None:
    async def run(mount: Mount) -> None:
        ino = await mount.store("durable", b"a")
        shorten(mount, ino)
        handle = await mount.operations.open(ino, os.O_WRONLY | os.O_TRUNC, CALLER.uid)
        os.write(handle.file.fd, b"anew")
        await mount.operations.flush(handle.fh)
        await mount.operations.release(handle.fh)
        assert await mount.read("durable") == b"anew"

    on_a_mount(tmp_path, run)


@pytest.mark.parametrize("spoil", [lose, shorten])
def test_nobody_is_asked_for_data_of_what_has_no_name(
    tmp_path: Path, spoil: Callable[[Mount, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(mount: Mount) -> None:
        ino = await mount.store("durable", b"a")
        spoil(mount, ino)
        orphan(mount, ino)

        async def asked(_port: LocalPort, _ino: int) -> State:
            raise AssertionError("it is nobody's")

        monkeypatch.setattr(LocalPort, "bring", asked)
        with pytest.raises(Stale, match="evicted or removed"):
            await mount.operations.open(ino, os.O_RDONLY, CALLER.uid)

    on_a_mount(tmp_path, run)


def test_an_open_that_was_overtaken_once_gets_what_its_name_led_to(tmp_path: Path) -> None:
    """The kernel asks no third time: the file may have gone, record and data, until its open."""
    thread = 77

    async def fn(mount: Mount) -> None:
        operations, node = mount.operations, mount.node
        kernel = KernelInodes(lambda _file: False)

        async def opened() -> bytes:
            """What the thread reads of a file that goes between its look-up and its open."""
            ino = await mount.store("durable", b"hot")
            found, _ = await operations.lookup(mount.root("durable"), b"hot", thread)
            assert found == ino
            data = mount.data_file(ino)
            node.engine.transact_now(  # type: ignore[attr-defined]
                lambda t: tree.unlink(t, mount.root("durable"), b"hot", 1, lambda _: True)
            )
            node.engine.transact_now(lambda t: tree.reap(t, ino))  # type: ignore[attr-defined]
            data.unlink()
            opener = InodeOpener(kernel, ino, thread)
            handle = await operations.open(ino, os.O_RDONLY, CALLER.uid, thread, opener)
            content = os.pread(handle.file.fd, 1 << 20, 0)
            await operations.release(handle.fh)
            return content

        with pytest.raises(Stale):
            await opened()
        assert await opened() == CONTENT
        with pytest.raises(Stale):  # which the kernel asks again after
            await opened()

    on_a_mount(tmp_path, fn)


def descriptors_of(ino: int) -> int:
    """How many of this process's are of a file's data; others come and go."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum(f"/{ino:016x}." in path for path in found)


def test_what_is_kept_for_an_open_goes_when_nobody_opens_it(tmp_path: Path) -> None:
    thread = 77

    async def fn(mount: Mount) -> None:
        operations, ino = mount.operations, await mount.store("durable", b"a")
        before = descriptors_of(ino)
        operations.overtaken_opens.failed(thread)
        await operations.lookup(mount.root("durable"), b"a", thread)
        assert descriptors_of(ino) == before + 1
        operations.holders.looked_up(ino)
        operations.forget(ino, 1)
        assert descriptors_of(ino) == before
        await operations.lookup(mount.root("durable"), b"a", thread)
        assert descriptors_of(ino) == before + 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(operations.overtaken_opens.run)
            while descriptors_of(ino) > before:
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()

    on_a_mount(tmp_path, fn)
