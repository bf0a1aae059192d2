"""A node's status: everything that `kvfs status` shows."""

import os
import time
from collections.abc import Mapping
from typing import Any, Final

import trio

from kvfs.base import priority
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.datastore import file_sync
from kvfs.datastore.kernel.filesystem_probe import filesystem_type
from kvfs.meta import schema
from kvfs.meta.lmdb.disk_usage import metadata_bytes
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.reconstruction import damaged_metadata
from kvfs.node.composition import Node
from kvfs.tree import lifecycle, namespaces
from kvfs.tree.inodes import BLOCK, read_inodes
from kvfs.vfs.miss_counters import Counts
from kvfs.vfs.space_accounting import Census

_BATCH: Final = 256


async def status_of(node: Node) -> dict[str, Any]:
    """Returns the status in JSON's types; sizes in bytes. Raises Unavailable."""
    await node.quarantine.look()
    reports = {name: await report() for name, report in node.reports.items()}
    listed, census = await node.engine.read(
        lambda t: (namespaces.list_all(t), node.accounting.census(t))
    )
    return {
        "version": VERSION,
        "protocol": PROTOCOL,
        "pid": os.getpid(),
        "start_s": node.ready_after_s,
        "uptime_s": time.monotonic() - node.started,
        "rss_bytes": _resident_bytes(),
        "mount": node.mounts.description,
        "store": _store(node, census),
        "engine": {
            "name": "LMDB",
            "journal_failure": node.local.failure,
            "long_reader": node.local.long_reader,
            "damaged_metadata": damaged_metadata(node.store.meta),
            "bytes": metadata_bytes(node.store.meta),
            "reserve_left": node.local.reserve_left,
            "durability": _durability(node.local),
            "is_upgraded": node.local.read_now(schema.has_tags),
            **(node.cluster.describe() if node.cluster else {}),
        },
        "recovery": node.recovery,
        "held": await _held(node),
        "former_writers": node.former_writers.describe(),
        "namespaces": [_namespace(each, census.namespaces[each.id].space.used) for each in listed],
        "scrub": node.scrubber.report(),
        "quarantine": {
            "files": node.quarantine.used.files,
            "used_bytes": node.quarantine.used.bytes,
        },
        "replicas": node.replicas.report() if node.replicas else None,
        "cold": _cold(node),
        "tiers": node.tiering.describe() if node.tiering else [],
        "nice": priority.current(),
        "descriptors": node.open_file_shares.describe(),
        "counters": _counters(node),
        **reports,
        "misses": _misses(node, reports),
    }


def _store(node: Node, census: Census) -> dict[str, Any]:
    disk = os.statvfs(node.files.root)
    return {
        "path": str(node.store.root),
        "filesystem": filesystem_type(node.store.root),
        "id": node.store.identity.store,
        "used_bytes": census.store.used,
        "free_bytes": census.store.free,
        "capacity_bytes": census.store.capacity,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
    }


def _durability(engine: EmbeddedEngine) -> str:
    if engine.failure:
        return f"a power cut may lose what is written from now on: {engine.failure}"
    return "a kill loses nothing; its journal makes what was synced safe against a power cut"


def _namespace(listed: namespaces.ListedNamespace, used_bytes: int) -> dict[str, Any]:
    return {
        "name": listed.namespace.name.decode(errors="backslashreplace"),
        "kind": listed.namespace.kind,
        "capacity_bytes": listed.namespace.capacity,
        "eviction": listed.namespace.eviction,
        "used_bytes": used_bytes + listed.elsewhere.bytes,
        "inodes": listed.usage.inodes + listed.elsewhere.inodes,
        "here_bytes": used_bytes,
        "here_limit_bytes": listed.limit,
    }


async def _held(node: Node) -> dict[str, int]:
    """Counts files that were removed, and stay on the disk until the programs that have them open
    on a mount close them."""
    files = blocks = after = 0
    while inos := await node.engine.read(
        lambda t, after=after: lifecycle.orphans(t, after, _BATCH)  # type: ignore[misc]
    ):
        after = inos[-1]
        held = [ino for ino in inos if node.holders.busy(ino)]
        for inode in await node.engine.read(lambda t, held=held: read_inodes(t, held)):  # type: ignore[misc]
            if inode is not None and not inode.nlink:
                files, blocks = files + 1, blocks + inode.blocks
        await trio.lowlevel.checkpoint()
    return {"files": files, "bytes": blocks * BLOCK}


def _cold(node: Node) -> dict[str, Any] | None:
    if node.cold is None:
        return None
    return {"place": node.config.cold, "answers": not node.cold.is_away}


def _misses(node: Node, reports: Mapping[str, dict[str, Any]]) -> dict[str, Counts]:
    """Counts misses by door and reason; services beside the node report their own."""
    beside = {name: each.pop("misses") for name, each in reports.items() if "misses" in each}
    return {"mount": node.mounts.misses.counts, "client": node.port.misses, **beside}


def _counters(node: Node) -> dict[str, int]:
    counting = (
        node.evictor,
        node.open_file_shares,
        node.sealer,
        node.scrubber,
        node.transfers,
        node.damage,
        node.cluster,
        node.replicas,
        node.locks,
        node.cold,
        node.tiering,
    )
    counts = {name: count for each in counting if each for name, count in each.counters.items()}
    return counts | file_sync.counters


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
