"""The facts by which an upgrade is judged (`upgrade_plan`): of a store, of the node that runs on
it, of its cluster's engine.

Nothing is written, neither in the store nor at the engine, and no node is needed. A store's records
are read only where its file can be read as it is: one that a machine's end left is put in order by
its next start, and its schema is not known before.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.base.errors import UNDECODABLE, Corrupt, KvfsError, NotSupported, Unavailable
from kvfs.cluster import node_identity
from kvfs.cluster.node_records import NodeRecord, list_nodes, unpack_node
from kvfs.datastore.layout import Store
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb import checkpoint_seal, journal
from kvfs.meta.lmdb.checkpoints import base_path
from kvfs.meta.lmdb.disk_usage import metadata_bytes
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.redis import identity
from kvfs.meta.redis.about import check_server, read_info
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import read_entries

_ENGINE_S: Final = 3.0
_AT_ONCE: Final = 1_000
_NUMBERS: Final = 1 << 16
NO_SCHEMA: Final = ""


class MetadataVersion(NamedTuple):
    """The version of metadata, and the nodes in them."""

    schema: str
    """The key `V`; NO_SCHEMA: there is none yet, or it could not be read."""
    nodes: list[NodeRecord]
    refusal: str = ""
    """The reason why this program refuses them; empty: it reads them."""
    unread: str = ""
    """The reason why nothing is known of them."""


class StoreVersion(NamedTuple):
    """A store."""

    metadata: MetadataVersion
    metadata_bytes: int
    free_bytes: int
    """Bytes that are free on its disk."""
    cluster: str
    """The cluster that it is a node of; empty: none."""
    node: int
    """Its number there; 0: none."""


class RunningVersion(NamedTuple):
    """The node that runs on a store."""

    version: str
    protocol: int
    """0: a version before the protocol was told."""
    pid: int
    is_mounted: bool
    takeover_s: int
    """Seconds for which its mount waits for another daemon; 0: it ends with this one."""
    goes_on: bool = True
    """Whether a daemon of this program can go on with that mount."""


class EngineVersion(NamedTuple):
    """A cluster's engine."""

    shown: str
    server: str = ""
    """The server's name and version."""
    layout: str = ""
    """The version of the metadata's layout; empty: it has none yet."""
    metadata: MetadataVersion = MetadataVersion(NO_SCHEMA, [])


def of_store(store: Store) -> StoreVersion:
    """Raises Corrupt (a file of the store's identity), AccessDenied, OSError."""
    kept = node_identity.which_node(store)
    disk = os.statvfs(store.root)
    return StoreVersion(
        _local_metadata(store),
        metadata_bytes(store.meta) if store.meta.exists() else 0,
        disk.f_bavail * disk.f_frsize,
        kept.cluster if kept else "",
        kept.node if kept else 0,
    )


def of_status(status: dict[str, Any], *, goes_on: bool) -> RunningVersion:
    """Returns the facts about a node of any version, by its status. `goes_on`: see
    `RunningVersion`."""
    mount = status.get("mount")
    return RunningVersion(
        str(status.get("version", "?")),
        int(status.get("protocol") or _told_protocol(status)),
        int(status.get("pid", 0)),
        mount is not None,
        int((mount or {}).get("takeover_s", 0)),
        goes_on,
    )


async def of_engine(url: str) -> EngineVersion:
    """Returns the facts about the engine at `url`, in at most some seconds. Raises Invalid (the
    URL)."""
    location = locate(url)
    caller = RetryingClient(location, _ENGINE_S)
    try:
        return await _examined(caller)
    except Unavailable as error:
        return EngineVersion(
            location.shown, metadata=MetadataVersion(NO_SCHEMA, [], unread=str(error))
        )
    except KvfsError as error:
        return EngineVersion(
            location.shown, metadata=MetadataVersion(NO_SCHEMA, [], refusal=str(error))
        )
    finally:
        caller.close()


def _local_metadata(store: Store) -> MetadataVersion:
    if not (store.meta / "data.mdb").exists():
        return MetadataVersion(NO_SCHEMA, [])
    try:
        _refuse_later_files(store.meta)
        with contextlib.closing(EmbeddedEngine(store.meta, readonly=True)) as engine:
            return engine.read_now(_read)
    except NotSupported as error:
        return MetadataVersion(NO_SCHEMA, [], refusal=str(error))
    except (Unavailable, Corrupt) as error:
        return MetadataVersion(NO_SCHEMA, [], unread=str(error))


def _refuse_later_files(directory: Path) -> None:
    """Raises NotSupported if a journal or a base is of a later version: they are read only when the
    file has to be rebuilt of them, which is too late to be told."""
    with contextlib.suppress(FileNotFoundError):  # the node has just replaced it
        for generation in journal.generations(directory, "journal"):
            journal.read_start(journal.journal_path(directory, generation))
        for generation in journal.generations(directory, "base"):
            checkpoint_seal.check_version(base_path(directory, generation))


def _read(t: Transaction) -> MetadataVersion:
    return MetadataVersion((t.get(keys.VERSION) or b"").decode(errors="replace"), list_nodes(t))


async def _examined(caller: RetryingClient) -> EngineVersion:
    shown = caller.location.shown
    about = read_info(await caller.call(b"INFO"))
    server = _server(about)
    check_server(about, caller.location)
    found = await caller.call(b"HMGET", caller.state, b"schema", b"layout", b"cluster", b"nodes")
    if found[0] is None:
        return EngineVersion(shown, server)
    identity.checked(found[:3], None, shown)
    read_entries(await caller.call(b"XREVRANGE", caller.log, b"+", b"-", b"COUNT", 1))
    version = await caller.call(b"HGET", caller.values, keys.VERSION)
    nodes = await _nodes(caller, int(found[3] or 0))
    schema = (version or b"").decode(errors="replace")
    return EngineVersion(shown, server, found[0].decode(), MetadataVersion(schema, nodes))


async def _nodes(caller: RetryingClient, last: int) -> list[NodeRecord]:
    found: list[NodeRecord] = []
    for numbers in _parts(range(1, min(last + 1, _NUMBERS))):
        names = [keys.node(each) for each in numbers]
        values = await caller.call(b"HMGET", caller.values, *names)
        try:
            found += [unpack_node(value) for value in values if value is not None]
        except UNDECODABLE as error:
            raise NotSupported(
                f"a node's record at {caller.location.shown} cannot be read: use the version that"
                " made it"
            ) from error
    return found


def _parts(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    for begin in range(0, len(numbers), _AT_ONCE):
        yield numbers[begin : begin + _AT_ONCE]


def _server(about: dict[str, str]) -> str:
    if "valkey_version" in about:
        return f"Valkey {about['valkey_version']}"
    return f"Redis {about.get('redis_version', '?')}"


def _told_protocol(status: dict[str, Any]) -> int:
    """Returns the protocol that an earlier version tells of itself among its cluster's nodes."""
    cluster = status.get("cluster") or {}
    own = [each for each in cluster.get("nodes", ()) if each.get("number") == cluster.get("node")]
    return int(own[0].get("protocol", 0)) if own else 0
