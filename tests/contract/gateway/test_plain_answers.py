"""The plain functions of a mount answer as the general handlers do, and leave the same state:
random requests to two nodes, of which only one has them; lone ones, and each in a cluster."""

import errno
import os
import random
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio

from gateway.fuse.channel.cluster_answers import ClusterAnswers
from gateway.fuse.channel.handlers import Handlers, KernelRequest
from gateway.fuse.channel.plain_answers import PlainAnswers
from gateway.fuse.channel.plain_changes import PlainChanges
from gateway.fuse.codec import protocol
from gateway.fuse.codec.caller import Caller
from gateway.fuse.codec.errno_map import errno_of
from gateway.fuse.codec.protocol import ATTR, ATTR_OUT, ENTRY_OUT, Op
from kvfs.base import detach
from kvfs.base.config import Address, Config
from kvfs.base.errors import KvfsError, Stale
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode, namespace_of, namespace_root, unpack_inode
from kvfs.node import Node
from kvfs.node.startup import open_node
from kvfs.tree import namespaces, tree
from tests.contract.operations import MountedNode
from tests.contract.peers import open_files
from tests.contract.redis_servers import RedisServer, killed

REQUESTS: Final = int(os.environ.get("KVFS_TEST_OPERATIONS", "1500"))
_OF_CLUSTER: Final = REQUESTS // 3
"""In a cluster many of them wait for the server."""
_BELIEVED_S: Final = 3600.0
"""Longer than the test: no answer hangs on when the server was heard."""
NAMES: Final = (b"a", b"b", b"c", b"d%", b"e" * 255, b"f" * 256, b"..")
MISSING: Final = 1 << 48 | 1 << 40
"""In the namespace `cache`."""
ATTRIBUTES_AT: Final[dict[int, int]] = {
    Op.LOOKUP: ENTRY_OUT.size,
    Op.CREATE: ENTRY_OUT.size,
    Op.MKDIR: ENTRY_OUT.size,
    Op.LINK: ENTRY_OUT.size,
    Op.GETATTR: ATTR_OUT.size,
    Op.SETATTR: ATTR_OUT.size,
}
TIMES: Final = slice(24, 60)
STATE: Final = b"behiopsuwx"
"""Kinds of keys: entries, inodes, placements, lists of inodes, usage."""
Answered = bytes | int


class Mount:
    """The requests of one node, without a kernel."""

    def __init__(self, node: Node, *, is_plain: bool, namespace: bytes = b"cache") -> None:
        self.node = node
        self.number = 0
        """Counts requests: what is made gets its number by that, however often it was tried."""
        node.volume.allocate_now = self._allocate  # type: ignore[method-assign,assignment]
        # Nothing is waited for, so that no keeper of a node comes in between.
        for each in ("pressed", "must_wait"):
            setattr(node.evictor, each, lambda _namespace_id: False)
        mounted = MountedNode(node)
        self.operations, backing = mounted.operations, mounted.backing
        self.handlers = Handlers(self.operations, backing)
        changes = PlainChanges(self.operations, backing, self.handlers)
        answers: PlainAnswers | ClusterAnswers
        if node.coherence is None:
            answers = PlainAnswers(self.operations, node.local, backing)
        else:
            answers = ClusterAnswers(self.operations, node.local, node.coherence)
        self.plain = answers.table() | changes.table() if is_plain else {}
        self.release = changes.release if is_plain else None
        self.plainly = 0
        self.top = namespace_root(
            node.local.read_now(lambda t: namespaces.by_name(t, namespace))[0]
        )

    def _allocate(self, _namespace_id: int) -> int:
        return self.top + self.number

    def ask(self, opcode: int, ino: int, body: bytes) -> Answered:
        """A reply's body; an errno. Of what waits for nothing."""
        done = self._begin(opcode, ino, body)
        assert not isinstance(done, detach.Unfinished), "nothing waits here"
        return done

    async def ask_and_wait(self, opcode: int, ino: int, body: bytes) -> Answered:
        """A reply's body; an errno."""
        done = self._begin(opcode, ino, body)
        if not isinstance(done, detach.Unfinished):
            return done
        try:
            return await done
        except (KvfsError, OSError) as error:
            return errno_of(error)

    def _begin(self, opcode: int, ino: int, body: bytes) -> Answered | detach.Unfinished[bytes]:
        self.number += 1
        try:
            answer = self._plainly(opcode, ino, memoryview(body))
            if answer is not None:
                self.plainly += 1
                return answer
            request = KernelRequest(opcode, 1, ino, 7, 8, 9, memoryview(body))
            return detach.begin(self.handlers.inline[opcode](request))
        except (KvfsError, OSError) as error:
            return errno_of(error)

    def _plainly(
        self, opcode: int, ino: int, body: memoryview
    ) -> Answered | detach.Unfinished[bytes] | None:
        if opcode == Op.RELEASE:
            return b"" if self.release is not None and self.release(ino, body) else None
        plain = self.plain.get(opcode)
        answer = None if plain is None else plain(ino, body, 7, 8)
        if answer is None or isinstance(answer, bytes | int):
            return answer
        return detach.begin(answer)

    def state(self) -> dict[bytes, object]:
        """All records, but for times."""

        def fn(t: Transaction) -> dict[bytes, object]:
            found = ((key, value) for key, value in t.scan(b"a", b"z") if key[0] in STATE)
            return {key: _timeless(key, value) for key, value in found}

        return self.node.local.read_now(fn)

    def names(self) -> list[bytes]:
        """All entries."""
        return [key for key in self.state() if key[:1] == keys.ENTRY]


def _timeless(key: bytes, value: bytes) -> object:
    if key[:1] != b"i":
        return value
    inode = unpack_inode(value)
    inode.atime_ns = inode.mtime_ns = inode.ctime_ns = inode.btime_ns = 0
    return inode


def shown(opcode: int, answer: Answered) -> Answered:
    """But for times."""
    at = ATTRIBUTES_AT.get(opcode)
    if at is None or isinstance(answer, int) or answer == protocol.NO_ENTRY:
        return answer
    answer = _without_validity(answer, at)
    attributes = bytearray(answer[at : at + ATTR.size])
    attributes[TIMES] = bytes(len(attributes[TIMES]))
    return answer[:at] + bytes(attributes) + answer[at + ATTR.size :]


def _without_validity(answer: bytes, at: int) -> bytes:
    """With 1 for times for which the kernel may believe it, where a cluster bounds them."""
    layout = ENTRY_OUT if at == ENTRY_OUT.size else ATTR_OUT
    fields = list(layout.unpack_from(answer))
    for seconds, nanoseconds in ((2, 4), (3, 5)) if layout is ENTRY_OUT else ((0, 1),):
        if fields[seconds] <= _BELIEVED_S:
            is_believed = bool(fields[seconds] or fields[nanoseconds])
            fields[seconds], fields[nanoseconds] = int(is_believed), 0
    return bytes(layout.pack(*fields)) + answer[at:]


class Requests:
    """Random requests, of what earlier ones made."""

    def __init__(self, seed: int, top: int) -> None:
        self.random = random.Random(seed)
        missing = top & ~1 | MISSING & (1 << 48) - 1
        self.inos = [top, top, missing]
        self.handles: list[tuple[int, int]] = [(missing, 999)]

    def next(self) -> tuple[int, int, bytes]:
        kinds = (self.create, self.create, self.lookup, self.getattr, self.flush, self.release)
        more = (self.rename, self.unlink, self.open, self.link, self.mkdir, self.chmod, self.xattr)
        return self.random.choice(kinds + more)()

    def learn(self, opcode: int, answer: Answered) -> None:
        if isinstance(answer, int) or answer == protocol.NO_ENTRY:
            return
        if opcode in (Op.CREATE, Op.LOOKUP, Op.MKDIR):
            ino: int = ENTRY_OUT.unpack_from(answer)[0]
            if ino not in self.inos and namespace_of(ino):  # not the root of the mount, nor absent
                self.inos.append(ino)
            if opcode == Op.CREATE:
                fh = protocol.OPEN_OUT.unpack_from(answer, ENTRY_OUT.size + ATTR.size)[0]
                self.handles.append((ino, fh))

    def ino(self) -> int:
        return self.random.choice(self.inos)

    def name(self) -> bytes:
        return self.random.choice(NAMES)

    def create(self) -> tuple[int, int, bytes]:
        access = self.random.choice((os.O_WRONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY))
        flags = os.O_CREAT | access | self.random.choice((0, os.O_EXCL, os.O_TRUNC))
        mode = self.random.choice((0o644, 0o6755)) | stat.S_IFREG
        return (
            Op.CREATE,
            self.ino(),
            protocol.CREATE_IN.pack(flags, mode, 0, 0) + self.name() + b"\0",
        )

    def lookup(self) -> tuple[int, int, bytes]:
        return Op.LOOKUP, self.ino(), self.name() + b"\0"

    def getattr(self) -> tuple[int, int, bytes]:
        return Op.GETATTR, self.ino(), bytes(16)

    def open(self) -> tuple[int, int, bytes]:
        flags = self.random.choice((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_TRUNC))
        return Op.OPEN, self.ino(), protocol.OPEN_IN.pack(flags, 0)

    def flush(self) -> tuple[int, int, bytes]:
        ino, fh = self.random.choice(self.handles)
        return Op.FLUSH, ino, protocol.FLUSH_IN.pack(fh, 0, 0, 0)

    def release(self) -> tuple[int, int, bytes]:
        at = self.random.randrange(len(self.handles))
        ino, fh = self.handles.pop(at) if at else self.handles[0]
        return Op.RELEASE, ino, protocol.RELEASE_IN.pack(fh, 0, 0, 0)

    def rename(self) -> tuple[int, int, bytes]:
        names = self.name() + b"\0" + self.name() + b"\0"
        return Op.RENAME, self.ino(), protocol.RENAME_IN.pack(self.ino()) + names

    def unlink(self) -> tuple[int, int, bytes]:
        return Op.UNLINK, self.ino(), self.name() + b"\0"

    def link(self) -> tuple[int, int, bytes]:
        return Op.LINK, self.ino(), protocol.LINK_IN.pack(self.ino()) + self.name() + b"\0"

    def mkdir(self) -> tuple[int, int, bytes]:
        return Op.MKDIR, self.ino(), protocol.MKDIR_IN.pack(0o755, 0) + self.name() + b"\0"

    def chmod(self) -> tuple[int, int, bytes]:
        mode = self.random.choice((0o600, 0o6755))
        fields = (protocol.Fattr.MODE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, mode, 0, 0, 0, 0)
        return Op.SETATTR, self.ino(), protocol.SETATTR_IN.pack(*fields)

    def xattr(self) -> tuple[int, int, bytes]:
        name = self.random.choice((b"security.capability", b"user.k"))
        return Op.GETXATTR, self.ino(), bytes(8) + name + b"\0"


def test_plain_functions_and_handlers_answer_alike(tmp_path: Path, seed: int) -> None:
    trio.run(_answer_alike, tmp_path, seed)


@pytest.mark.parametrize("coherence", ["cache", "peer"])
def test_they_answer_alike_in_a_cluster(
    tmp_path: Path, seed: int, coherence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfs.cluster.coherence.CACHE_S", _BELIEVED_S)
    with killed(RedisServer(tmp_path / "redis")) as server:
        trio.run(_answer_alike_in_clusters, tmp_path, seed, coherence, server.url)


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_open_that_fails_keeps_no_descriptor(tmp_path: Path, *, is_plain: bool) -> None:
    trio.run(partial(_open_fails, tmp_path, is_plain=is_plain))


async def _open_fails(base: Path, *, is_plain: bool) -> None:
    async with open_node(Config(store=base / "store", s3="off")) as node:
        mount = Mount(node, is_plain=is_plain)
        ino = _store(mount, mount.top, b"a")
        # Of this file alone: the node makes data files ahead, which are open too.
        path = os.path.realpath(node.files.path(ino, 0))
        before = open_files(base).count(path)

        def refuse(_ino: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        node.index.touch = refuse  # type: ignore[method-assign,assignment]
        assert mount.ask(Op.OPEN, ino, protocol.OPEN_IN.pack(os.O_RDONLY, 0)) == errno.EIO
        assert open_files(base).count(path) == before
        del node.index.touch
        assert isinstance(mount.ask(Op.OPEN, ino, protocol.OPEN_IN.pack(os.O_RDONLY, 0)), bytes)
        assert open_files(base).count(path) == before + 1
        await mount.operations.close()


def _store(mount: Mount, parent: int, name: bytes) -> int:
    """A closed file; its inode."""
    made = mount.ask(
        Op.CREATE, parent, protocol.CREATE_IN.pack(os.O_WRONLY, 0o644, 0, 0) + name + b"\0"
    )
    assert isinstance(made, bytes)
    ino: int = ENTRY_OUT.unpack_from(made)[0]
    fh = protocol.OPEN_OUT.unpack_from(made, ENTRY_OUT.size + ATTR.size)[0]
    assert mount.ask(Op.FLUSH, ino, protocol.FLUSH_IN.pack(fh, 0, 0, 0)) == b""
    assert mount.ask(Op.RELEASE, ino, protocol.RELEASE_IN.pack(fh, 0, 0, 0)) == b""
    return ino


def test_a_rename_that_waited_moves_what_it_waited_for(tmp_path: Path) -> None:
    trio.run(_rename_waited, tmp_path)


async def _rename_waited(base: Path) -> None:
    """Another file has the name when the one that was to be moved is on disk."""
    async with open_node(Config(store=base / "store", s3="off")) as node:
        mount = Mount(node, is_plain=True)
        top = namespace_root(node.local.read_now(lambda t: namespaces.by_name(t, b"models"))[0])
        node.volume.allocate_now = lambda _: top + mount.number  # type: ignore[method-assign,assignment]
        mount = Mount(node, is_plain=True)
        mount.top = top
        moved, other, target = (_store(mount, top, name) for name in (b"new", b"other", b"old"))
        operations = mount.operations
        settle = operations._settle

        async def settle_late(ino: int, inode: Inode) -> None:
            await settle(ino, inode)
            node.local.transact_now(
                lambda t: tree.rename(
                    t, top, b"other", top, b"new", flags=0, now=1, keep=lambda _: True
                )
            )

        operations._settle = settle_late  # type: ignore[method-assign]
        caller = Caller(7, 8, 9)
        with pytest.raises(Stale):
            await operations.rename(top, b"new", top, b"old", 0, caller)
        found = node.local.read_now(
            lambda t: {name: tree.lookup(t, top, name)[0] for name in (b"new", b"old")}
        )
        assert found == {b"new": other, b"old": target}
        operations._settle = settle  # type: ignore[method-assign]
        assert await operations.rename(top, b"new", top, b"old", 0, caller) == target
        assert node.local.read_now(lambda t: tree.lookup(t, top, b"old"))[0] == other
        assert moved not in (other, target)
        await operations.close()


async def _answer_alike(base: Path, seed: int) -> None:
    async with AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(open_node(Config(store=base / name, s3="off")))
            for name in ("plain", "general")
        ]
        mounts = [Mount(node, is_plain=at == 0) for at, node in enumerate(nodes)]
        await _compare(mounts, Requests(seed, mounts[0].top), REQUESTS)


@asynccontextmanager
async def _in_cluster(
    base: Path, name: str, coherence: str, url: str, *, is_plain: bool
) -> AsyncIterator[Mount]:
    """A node of a cluster of its own, and a namespace of this coherence."""
    config = Config(
        store=base / name,
        engine=f"{url}?prefix={name}",
        peer=Address("127.0.0.1", 0),
        s3="off",
    )
    async with open_node(config) as node:
        await node.engine.transact(
            lambda t: namespaces.create(
                t, b"blocks", kind="cache", coherence=coherence, uid=0, gid=0, now=1
            )
        )
        _rest(node)
        yield Mount(node, is_plain=is_plain, namespace=b"blocks")


@pytest.mark.parametrize("coherence", ["cache", "peer"])
def test_a_file_whose_data_file_cannot_be_made_has_no_name(tmp_path: Path, coherence: str) -> None:
    with killed(RedisServer(tmp_path / "redis")) as server:
        trio.run(_create_fails, tmp_path, coherence, server.url)


async def _create_fails(base: Path, coherence: str, url: str) -> None:
    def refuse(_ino: int, _version: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    create = protocol.CREATE_IN.pack(os.O_WRONLY, 0o644, 0, 0)
    async with _in_cluster(base, "one", coherence, url, is_plain=True) as mount:
        # With a delegation of the namespace, which the first create takes.
        for name in (b"a", b"b"):
            assert isinstance(
                await mount.ask_and_wait(Op.CREATE, mount.top, create + name + b"\0"), bytes
            )
        before = mount.names()
        del mount.handlers.inline[Op.CREATE]  # only the plain function is left
        mount.node.files.create = refuse  # type: ignore[method-assign,assignment]
        made = await mount.ask_and_wait(Op.CREATE, mount.top, create + b"c\0")
        assert made == errno.ENOSPC
        del mount.node.files.create
        assert mount.names() == before
        made = await mount.ask_and_wait(Op.CREATE, mount.top, create + b"c\0")
        assert isinstance(made, bytes)
        await mount.operations.close()


async def _answer_alike_in_clusters(base: Path, seed: int, coherence: str, url: str) -> None:
    async with AsyncExitStack() as stack:
        mounts = [
            await stack.enter_async_context(
                _in_cluster(base, name, coherence, url, is_plain=name == "plain")
            )
            for name in ("plain", "general")
        ]
        await _compare(mounts, Requests(seed, mounts[0].top), _OF_CLUSTER)


def _rest(node: Node) -> None:
    """Has the node's keepers leave its files alone: they run while a request waits."""

    async def nothing() -> None:
        pass

    node.sealer._seal_due = nothing  # type: ignore[method-assign]
    node.volume.drop_later = lambda _ino, _version: None  # type: ignore[method-assign,assignment]


async def _compare(mounts: Sequence[Mount], requests: Requests, count: int) -> None:
    """Asks both for the same, and compares answers and records."""
    for number in range(count):
        opcode, ino, body = request = requests.next()
        answers = [shown(opcode, await each.ask_and_wait(opcode, ino, body)) for each in mounts]
        assert answers[0] == answers[1], (number, request, answers)
        requests.learn(opcode, answers[0])
        if opcode == Op.OPEN and isinstance(answers[0], bytes):
            requests.handles.append((ino, protocol.OPEN_OUT.unpack(answers[0])[0]))
        written = requests.random.randbytes(requests.random.randrange(1, 99))
        for mount in mounts:
            for _, fh in requests.handles[1:][-1:]:
                if mount.operations.open_files.handle(fh).writable:
                    os.write(mount.operations.file(fh).fd, written)
        if not number % 50:
            assert mounts[0].state() == mounts[1].state(), number
    assert mounts[0].state() == mounts[1].state()
    assert mounts[0].plainly > count // 10, "the plain functions were not asked"
    for mount in mounts:
        await mount.operations.close()
