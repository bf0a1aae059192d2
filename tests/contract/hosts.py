"""Nodes that share an engine, as far as their metadata go: what a mount does, without one."""

import contextlib
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from kvfs.base.clock import now
from kvfs.base.errors import NotFound
from kvfs.meta import delegations, keys
from kvfs.meta.engine import MOVED, Transaction
from kvfs.meta.records import Flag, Inode, namespace_of, namespace_root
from kvfs.meta.replica.async_publisher import AsyncPublisher
from kvfs.meta.replica.local_namespaces import OnLocal, tells_nobody
from kvfs.tree import inodes, lifecycle, namespaces, tree
from kvfs.tree.private_files import NameState, is_late, settle
from tests.cluster.waiting import wait_until
from tests.contract.mirrors import Mirror, everything, in_redis
from tests.contract.redis_servers import RedisServer

if TYPE_CHECKING:
    import pytest  # programs that tests run and kill do without it

NOW = 1_000
TOP = namespace_root(1)


class Host:
    """A node with its mirror, as the mount uses it."""

    def __init__(
        self,
        path: Path,
        url: str,
        node: int,
        must_follow: Callable[[int], bool] = lambda _namespace_id: True,
        deadline_s: float = 10.0,
    ) -> None:
        self.clock = now
        """Seconds since its boot."""
        self.dead = set[int]()
        """Nodes whose lease has ended."""
        self.on_local: OnLocal = tells_nobody
        self._new: Callable[[], Mirror] = lambda: Mirror(
            *(path, url),
            node=node,
            settle=self._settle,
            is_alive=lambda other: other not in self.dead,
            on_local=self.on_local,
            must_follow=must_follow,
            deadline_s=deadline_s,
        )
        self.mirror = self._new()
        self._numbers: dict[int, Iterator[int]] = {}
        """Of each namespace."""

    def _settle(self, t: Transaction, ino: int, closed_at: float) -> bool:
        state = settle(t, ino, NOW, yields=is_late(closed_at, self.clock()))
        return state is NameState.OWN

    def restart(self) -> None:
        self.mirror.close()
        self.start()

    def start(self) -> None:
        self.mirror = self._new()

    @property
    def trips(self) -> int:
        return self.mirror.engine.round_trips

    def write(self, fn: Callable[[Transaction], Any], **options: Any) -> Any:
        return self.mirror.call(lambda: self.mirror.engine.transact(fn, **options))

    def number(self, namespace: int) -> int:
        found: int | None = next(self._numbers.get(namespace, iter(())), None)
        if found is None:
            first = self.write(lambda t: namespaces.allocate_inodes(t, namespace, 64))
            self._numbers[namespace] = iter(range(first + 1, first + 64))
            return int(first)
        return found

    def create(self, parent: int, name: bytes, *, exclusive: bool = False) -> int:
        ino = self.number(namespace_of(parent))
        inode = Inode(
            mode=stat.S_IFREG | 0o644,
            uid=0,
            gid=0,
            nlink=0,
            atime_ns=NOW,
            mtime_ns=NOW,
            ctime_ns=NOW + ino % 1000,
            parent=0,
            name=b"",
            boot=7,
            flags=Flag.RESERVED if exclusive else 0,
        )
        private = 0 if exclusive else ino
        return int(self.write(lambda t: tree.add(t, parent, name, ino, inode), private=private))

    def mkdir(self, parent: int, name: bytes) -> int:
        ino = self.number(namespace_of(parent)) if namespace_of(parent) else 0
        inode = Inode(
            mode=stat.S_IFDIR | 0o755,
            uid=0,
            gid=0,
            nlink=0,
            atime_ns=NOW,
            mtime_ns=NOW,
            ctime_ns=NOW,
            parent=0,
            name=b"",
        )
        return int(self.write(lambda t: tree.add(t, parent, name, ino, inode)))

    def close_file(self, ino: int, *, behind: bool = False) -> None:
        def fn(t: Transaction) -> None:
            is_first = t.get(keys.unpublished(ino)) is not None
            lifecycle.publish(t, ino, size=10, blocks=8, mtime_ns=NOW, ctime_ns=NOW, boot=7)
            if is_first:
                settle(t, ino, NOW)

        self.write(fn, private=ino if behind else 0, behind=behind)

    def rename(
        self, parent: int, name: bytes, target: int, new: bytes, *, behind: bool = True
    ) -> tree.Removed | None:
        """`behind`: others may hear of it later, as in a cache."""

        def fn(t: Transaction) -> tree.Removed | None:
            return tree.rename(t, parent, name, target, new, now=NOW, keep=lambda _: False)

        is_local = self.mirror.is_local(namespace_of(target))
        private = target if is_local else MOVED if behind else 0
        removed: tree.Removed | None = self.write(fn, private=private)
        return removed

    def rmdir(self, parent: int, name: bytes) -> None:
        self.write(lambda t: tree.rmdir(t, parent, name, NOW, lambda _: False))

    def unlink(self, parent: int, name: bytes) -> tree.Removed:
        removed: tree.Removed = self.write(
            lambda t: tree.unlink(t, parent, name, NOW, lambda _: False)
        )
        return removed

    def find(self, parent: int, name: bytes) -> int | None:
        def fn(t: Transaction) -> int | None:
            try:
                return tree.lookup(t, parent, name)[0]
            except NotFound:
                return None

        return self.mirror.read_now(fn)

    def inode(self, ino: int) -> Inode:
        return self.mirror.read_now(lambda t: inodes.read_inode(t, ino))

    def drop_unclosed(self) -> None:
        """Removes files that a run which was killed had made and not closed, as a start does."""
        for ino in self.mirror.read_now(lambda t: lifecycle.unpublished(t, 0, 10_000)):
            self.write(lambda t, ino=ino: lifecycle.evict(t, ino, NOW))
            self.write(lambda t, ino=ino: tree.reap(t, ino))

    def settle(self) -> None:
        """Everything that is to be known is."""
        self.mirror.call(self.mirror.engine.sync)
        self.mirror.catch_up()


@contextlib.contextmanager
def two_hosts(directory: Path, url: str) -> Iterator[tuple[Host, Host]]:
    """Two nodes of a new cluster with a cache namespace, each with a delegation of it."""
    one = Host(directory / "one", url, 1)
    one.write(lambda t: namespaces.format(t, NOW, 0, 0))
    one.write(lambda t: namespaces.create(t, b"ns", kind="cache", uid=0, gid=0, now=NOW))
    other = Host(directory / "other", url, 2)
    for host in (one, other):
        host.write(lambda t: delegations.take(t, 1))
    one.mirror.catch_up()
    yield one, other
    one.mirror.close()
    other.mirror.close()


@contextlib.contextmanager
def telling_nobody(host: Host, monkeypatch: "pytest.MonkeyPatch") -> Iterator[None]:
    """A run of a stopped node that ends before anybody else hears of what is told behind."""
    with monkeypatch.context() as patch:
        patch.setattr(AsyncPublisher, "run", lambda _: trio.sleep_forever())
        host.start()
        yield
        host.mirror.close()


@contextlib.contextmanager
def renamed_untold(
    host: Host, ino: int, monkeypatch: "pytest.MonkeyPatch", *, is_told: bool
) -> Iterator[tree.Removed | None]:
    """The moment after `host` renamed a file from `a.tmp` to `a` and told nobody; it is stopped
    then. `is_told`: others have heard of the file's close before. Gives what was replaced."""
    host.mirror.close()
    with telling_nobody(host, monkeypatch):
        if not is_told:
            host.close_file(ino, behind=True)
        asked = host.trips
        removed = host.rename(TOP, b"a.tmp", TOP, b"a")
        assert host.trips == asked
        assert (host.find(TOP, b"a.tmp"), host.find(TOP, b"a")) == (None, ino)
        yield removed


def agree(one: Host, other: Host, url: str) -> None:
    """Once everything is told, the nodes and the engine have the same."""
    one.settle()
    other.settle()
    one.mirror.catch_up()
    assert everything(one.mirror) == everything(other.mirror) == in_redis(url)


def all_the_same(one: Host, other: Host, url: str) -> None:
    agree(one, other, url)
    found = everything(one.mirror)
    files = [key for key, _ in found if key[:1] == b"i"]
    assert usage(one)[1] == len(files) - 2  # the top and the root


@contextlib.contextmanager
def being_told(server: RedisServer, host: Host, change: Callable[[], object]) -> Iterator[None]:
    """While the server, which stands, is told of a change that the host made behind."""
    asked = host.trips
    server.signal(signal.SIGSTOP)
    try:
        change()
        wait_until(lambda: host.trips > asked, "it to be told")
        yield
    finally:
        server.signal(signal.SIGCONT)


def is_orphan(host: Host, ino: int) -> bool:
    orphan = keys.orphan(ino)
    return host.inode(ino).nlink == 0 and host.mirror.read_now(lambda t: t.get(orphan)) is not None


def usage(host: Host) -> tuple[int, int]:
    found = host.mirror.read_now(lambda t: namespaces.usage(t, 1))
    return found.bytes, found.inodes
