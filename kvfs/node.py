"""A node, put together: what is started in which order, and stopped in the reverse.

| step of the start | what a kill after it leaves |
|---|---|
| 1 store made or opened, locked | an empty store, or the old one; the lock goes with the process |
| 2 engine opened (after a power cut rebuilt), first namespaces made | no `clean` marker |
| 3 marker taken, what the last process left is mended (`recover`) | it is mended again |
| 4 keepers (dropper, sealer, evictor) and control socket in a nursery | a dead socket, replaced |

The stop runs backwards: keepers end, what they hold in memory is flushed, the engine is synced and
closed, the marker written, the lock given back. This module does not know the front doors: they use
a Node, and register with it.
"""

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import trio

from kvfs.background.accounting import Accounting, Space
from kvfs.background.evictor import Evictor
from kvfs.background.leftovers import Leftovers
from kvfs.background.sealer import Sealer
from kvfs.changes import Change
from kvfs.config import Config
from kvfs.control import ControlServer
from kvfs.holders import Holders
from kvfs.meta import boot, keys
from kvfs.meta.embedded import EmbeddedEngine
from kvfs.meta.interface import Transaction
from kvfs.namespace import spaces
from kvfs.namespace.inodes import read_inodes
from kvfs.namespace.lifecycle import Evicted
from kvfs.recover import recover
from kvfs.requests import Requests
from kvfs.store import layout
from kvfs.store.files import DataFiles
from kvfs.store.index import NAME as INDEX_NAME
from kvfs.store.index import Index
from kvfs.store.known import KnownDirectories
from kvfs.store.probe import filesystem_type
from kvfs.version import VERSION
from kvfs.volume import Volume

FIRST_NAMESPACES: Final = ((b"cache", "cache"), (b"models", "durable"))
"""Name and kind of the namespaces that a new store begins with."""
_BLOCK: Final = 4096
"""The block size of statvfs: clients choose O_DIRECT by it."""
log = logging.getLogger(__name__)


Changed = Callable[[Sequence[Change]], Awaitable[None]]
Report = Callable[[], Awaitable[dict[str, Any]]]


class Node:
    """The parts of a running node. Made by `open_node`."""

    def __init__(
        self,
        config: Config,
        store: layout.Store,
        engine: EmbeddedEngine,
        known: KnownDirectories,
    ) -> None:
        self.config = config
        self.store = store
        self.engine = engine
        self.boot = boot.boot_id()
        self.files = DataFiles(store.data)
        self.index = Index(engine.database(INDEX_NAME))
        self.holders = Holders()
        self.known = known
        self.volume = Volume(engine, self.files, self.index, self.holders)
        self.invalidators: list[Changed] = []
        """Of the mounts: each makes its kernel forget what has changed, and returns when it has."""
        self.accounting = Accounting(self.files.root, config.capacity, self.holders.writers)
        self.evictor = Evictor(
            engine, self.files, self.index, self.holders, self.accounting, self._forget_evicted
        )
        self.sealer = Sealer(engine, self.files, self.index, self.holders.writes)
        self.volume.on_published = self.sealer.published
        self.leftovers = Leftovers(engine, self.files, self.holders, self.volume.drop_later)
        self.requests = Requests(
            engine, self.index, self.sealer, self.evictor, self._capacity, self.changed, self.drop
        )
        self.control = ControlServer(
            store.socket, {"status": self._on_status, **self.requests.handlers()}
        )
        self.recovery: dict[str, int] | None = None
        """What the start had to mend, by kind; None where nothing was."""
        self.ready_after_s = 0.0
        self.reports: dict[str, Report] = {}
        """What others beside the node say of themselves in its status, by name."""
        self._mount: dict[str, Any] | None = None
        self._started = time.monotonic()

    def ready(self) -> None:
        """The node serves: the start ends here."""
        self.ready_after_s = time.monotonic() - self._started

    @contextlib.contextmanager
    def mounted(self, changed: Changed) -> Iterator[Callable[[object], None]]:
        """While it lasts, a mount hears of changes: let it begin before the mount's first reply,
        which the kernel may remember. What it yields takes what describes the mount (a msgspec
        Struct), once that is known."""
        self.invalidators.append(changed)
        try:
            yield self._describe_mount
        finally:
            self.invalidators.remove(changed)
            self._mount = None

    def _describe_mount(self, info: object) -> None:
        self._mount = msgspec.to_builtins(info)

    async def changed(self, changes: Sequence[Change]) -> None:
        """Every mount has forgotten these names when it returns, and drops what lost its last link
        by it as soon as nobody holds it. Raises Unavailable."""
        await self._tell_mounts(changes)
        if not self.invalidators:
            unlinked = [change.ino for change in changes if change.ino]
            await self.leftovers.drop(unlinked, before_ns=time.time_ns())

    async def drop(self, inos: Sequence[int]) -> None:
        """Of these, what has lost its last link goes; what somebody holds, with its last holder.
        Raises Unavailable."""
        inodes = await self.engine.read(lambda t: read_inodes(t, inos))
        held = []
        for ino, inode in zip(inos, inodes, strict=True):
            if inode is None or inode.nlink:
                continue
            if self.holders.keep(ino):
                held.append(Change(ino, b"", ino))
            else:
                self.holders.let_go(ino)
                self.volume.drop_later(ino, inode.version)
        if held:
            await self._tell_mounts(held)

    async def _tell_mounts(self, changes: Sequence[Change]) -> None:
        for invalidate in list(self.invalidators):
            await invalidate(changes)

    def _capacity(self) -> int:
        disk = os.statvfs(self.files.root)
        return self.config.capacity.of(disk.f_blocks * disk.f_frsize)

    async def _forget_evicted(self, evicted: Sequence[Evicted]) -> None:
        await self._tell_mounts(
            [Change(parent, name, each.ino) for each in evicted for parent, name in each.names]
        )

    async def space(self, namespace_id: int) -> os.statvfs_result:
        """What statvfs(2) says in a namespace (0: at the root): the truth within the limit there.

        The size is what is used and what is free: space that others on the disk took is neither.
        """
        census = await self.engine.read(self.accounting.census)
        space = census.space(namespace_id)
        within = list(census.namespaces.values())
        if namespace_id in census.namespaces:
            within = [census.namespaces[namespace_id]]
        return _as_statvfs(space, sum(each.inodes for each in within), os.statvfs(self.files.root))

    async def status(self) -> dict[str, Any]:
        """Everything that `kvfs status` shows, in JSON's types; sizes in bytes."""
        listed, census = await self.engine.read(
            lambda t: (spaces.list_all(t), self.accounting.census(t))
        )
        disk = os.statvfs(self.files.root)
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "start_s": self.ready_after_s,
            "uptime_s": time.monotonic() - self._started,
            "rss_bytes": _resident_bytes(),
            "mount": self._mount,
            "store": {
                "path": str(self.store.root),
                "filesystem": filesystem_type(self.store.root),
                "id": self.store.identity.store,
                "used_bytes": census.store.used,
                "free_bytes": census.store.free,
                "capacity_bytes": census.store.capacity,
                "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            },
            "engine": {
                "name": "LMDB",
                "journal_failure": self.engine.failure,
                "durability": _durability(self.engine),
            },
            "recovery": self.recovery,
            "namespaces": [
                _describe(each, census.namespaces[each.id].space.used) for each in listed
            ],
            "counters": {**self.evictor.counters, **self.sealer.counters},
            **{name: await report() for name, report in self.reports.items()},
        }

    async def finish(self) -> None:
        """Write what is held in memory and leave the store in order. Call after the keepers
        ended."""
        await self.volume.flush_atimes()
        self.index.flush()
        await self.engine.sync()

    async def _on_status(self, params: dict[str, Any]) -> dict[str, Any]:
        return await self.status()


@contextlib.asynccontextmanager
async def open_node(config: Config) -> AsyncIterator[Node]:
    """A running node: it answers requests on its control socket while the block lasts.

    Raises Invalid (somebody else's directory), Busy (another node has the store), ReadOnly,
    NoSpace, Corrupt, NotSupported. Cancelled: the node stops in order, as at the end of the block.
    """
    store = layout.create_store(config.store)
    store.lock()
    with contextlib.ExitStack() as closing:
        closing.callback(store.unlock)
        engine = EmbeddedEngine(store.meta)
        closing.callback(engine.close)
        known = layout.guarded(store.root, lambda: KnownDirectories(store.known))
        closing.callback(known.close)
        engine.transact_now(_first_start)
        node = Node(config, store, engine, known)
        closing.callback(node.files.close)
        node.files.keep_spares()
        node.recovery = await recover(
            store,
            engine,
            node.files,
            node.index,
            boot=node.boot,
            now=time.time_ns(),
            clean=store.take_clean(),
            restored=engine.restored,
        )
        if node.recovery:
            log.info("mended what the last process left: %s", node.recovery)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.volume.run)
            nursery.start_soon(node.index.run)
            nursery.start_soon(node.sealer.run)
            nursery.start_soon(node.evictor.run)
            nursery.start_soon(node.requests.run)
            nursery.start_soon(node.leftovers.run)
            await nursery.start(node.control.serve)
            yield node
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await node.finish()
            engine.close()
            store.mark_clean()


def _first_start(t: Transaction) -> None:
    """Make what a new store begins with; nothing in an old one."""
    if t.get(keys.VERSION) is not None:
        spaces.check_format(t)
        return
    now, uid, gid = time.time_ns(), os.geteuid(), os.getegid()
    spaces.format(t, now, uid, gid)
    for name, kind in FIRST_NAMESPACES:
        spaces.create(t, name, kind=kind, uid=uid, gid=gid, now=now)


def _describe(listed: spaces.Listed, used_bytes: int) -> dict[str, Any]:
    return {
        "name": listed.namespace.name.decode(errors="backslashreplace"),
        "kind": listed.namespace.kind,
        "capacity_bytes": listed.namespace.capacity,
        "eviction": listed.namespace.eviction,
        "used_bytes": used_bytes,
        "inodes": listed.usage.inodes,
    }


def _as_statvfs(space: Space, inodes: int, disk: os.statvfs_result) -> os.statvfs_result:
    used, free = -(-space.used // _BLOCK), space.free // _BLOCK
    sizes = (_BLOCK, _BLOCK, used + free, free, free)
    return os.statvfs_result(
        (*sizes, inodes + disk.f_favail, disk.f_favail, disk.f_favail, 0, spaces.MAX_NAME)
    )


def _durability(engine: EmbeddedEngine) -> str:
    if engine.failure:
        return f"a power cut may lose what is written from now on: {engine.failure}"
    return "a kill loses nothing; its journal makes what was synced safe against a power cut"


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
