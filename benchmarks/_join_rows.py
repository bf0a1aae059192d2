"""What a node's join takes where another namespace of a spread cluster has many files: before it
uses that namespace, and when it begins to."""

import os
import stat
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import trio

from benchmarks import _several
from benchmarks._guard import Guard
from benchmarks._systems import Kvfs, Unavailable, processor_s
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, Holding, Inode, namespace_root, pack
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.tree import namespaces, tree
from tests.contract.redis_servers import RedisCluster

_NAMESPACE: Final = "far"
_WRITER: Final = 60_000
"""The number of a node that no store has."""
_BATCH: Final = 500
_LOOKS: Final = 10
"""Fewer than begin to follow."""
_FOLLOWED_S: Final = 300.0
Figures = dict[str, float]


def measure(base: Path, guard: Guard, files: int, say: Callable[[str], None]) -> Figures:
    """Returns the figures by name. Raises Unavailable."""
    base.mkdir()
    cluster = RedisCluster(base / "servers", settings=("--appendonly", "yes"))
    for server in cluster.servers:
        guard.process(server.pid)
    first, joined = (_several.member(base, name, cluster.url) for name in ("first", "joined"))
    try:
        first.start(guard)
        first.command("engine", "spread")
        first.command("namespace", "create", _NAMESPACE)
        first.stop()
        say(f"{files:,} files are made")
        thread = threading.Thread(
            target=trio.run, args=(_fill, base / "writer", cluster.url, files)
        )
        thread.start()
        thread.join()
        say("a node joins")
        return _measured(joined, cluster, guard, files)
    finally:
        joined.stop()
        first.stop()
        cluster.kill()


async def _fill(path: Path, url: str, files: int) -> None:
    """Makes files as sealed ones are, each held by one node."""
    local = EmbeddedEngine(path)
    engine = ReplicaEngine(local, url, node=_WRITER, incarnation=1)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        number = engine.read_now(lambda t: namespaces.by_name(t, _NAMESPACE.encode())[0])
        for start in range(0, files, _BATCH):
            await engine.transact(partial(_make, number, range(start, min(files, start + _BATCH))))
        nursery.cancel_scope.cancel()
    local.close()


def _make(namespace_id: int, some: range, t: Transaction) -> None:
    first = namespaces.allocate_inodes(t, namespace_id, len(some))
    now, node = time.time_ns(), keys.pack_node(_WRITER)
    for at, number in enumerate(some):
        inode = Inode(
            mode=stat.S_IFREG | 0o644,
            uid=0,
            gid=0,
            nlink=0,
            size=4096,
            blocks=8,
            atime_ns=now,
            mtime_ns=now,
            ctime_ns=now,
            parent=0,
            name=b"",
            flags=Flag.PUBLISHED,
        )
        ino = tree.add(t, namespace_root(namespace_id), b"%064x" % number, first + at, inode)
        t.put(keys.placement(ino, node), pack(Holding(version=1)))
        t.put(keys.held(node, ino), b"")


def _measured(joined: Kvfs, cluster: RedisCluster, guard: Guard, files: int) -> Figures:
    folder, sent = joined.mountpoint / _NAMESPACE, _sent(cluster)
    began = time.monotonic()
    joined.start(guard)
    figures = {"kvfs up, not followed: s": time.monotonic() - began}
    figures["kvfs up, not followed: sent by the servers, MB"] = (_sent(cluster) - sent) / 1e6
    figures["kvfs up, not followed: memory of the daemon, MB"] = _anonymous(joined) / 1e6
    figures["kvfs up, not followed: metadata of the store, MB"] = _stored(joined) / 1e6
    sent = _sent(cluster)
    took = [_looked_up(str(folder / f"{number:064x}")) for number in range(_LOOKS)]
    figures["look-up, not followed: the first, ms"] = 1e3 * took[0]
    figures["look-up, not followed: p50 of the next, ms"] = 1e3 * statistics.median(took[1:])
    figures["look-up, not followed: sent by the servers, kB"] = (_sent(cluster) - sent) / 1e3
    sent, used = _sent(cluster), processor_s(joined.processes())
    figures["until it is followed: s"] = _followed(folder)
    figures["until it is followed: CPU of the node, s"] = processor_s(joined.processes()) - used
    figures["until it is followed: sent by the servers, MB"] = (_sent(cluster) - sent) / 1e6
    figures["followed: memory of the daemon, MB"] = _anonymous(joined) / 1e6
    figures["followed: metadata of the store, MB"] = _stored(joined) / 1e6
    took = [_looked_up(str(folder / f"{files - 1 - number:064x}")) for number in range(_LOOKS)]
    figures["look-up, followed: p50, ms"] = 1e3 * statistics.median(took)
    joined.stop()
    began = time.monotonic()
    joined.up()
    figures["kvfs up, followed before: s"] = time.monotonic() - began
    return figures


def _looked_up(name: str) -> float:
    began = time.monotonic()
    os.stat(name)
    return time.monotonic() - began


def _followed(folder: Path) -> float:
    """Returns the seconds after which a change of the namespace is done, which waits for it, as
    long as more of it comes."""
    began = time.monotonic()
    while True:
        try:
            (folder / "change").mkdir()
            return time.monotonic() - began
        except OSError:
            if time.monotonic() - began > _FOLLOWED_S:
                raise Unavailable("the namespace is not followed") from None


def _sent(cluster: RedisCluster) -> int:
    """Returns the bytes that all servers have sent so far."""
    return sum(int(each.info("total_net_output_bytes")) for each in cluster.servers)


def _stored(node: Kvfs) -> int:
    return sum(each.stat().st_blocks * 512 for each in (node.store / "meta").rglob("*"))


def _anonymous(node: Kvfs) -> int:
    """Returns the daemon's own memory, without pages of mapped files."""
    lines = Path(f"/proc/{node.daemon()}/status").read_text().splitlines()
    found = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(words[1]) for words in found) << 10
