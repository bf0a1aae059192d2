"""New content of a file that was published before, on a node of a cluster.

Other nodes have data files of the old content, and some are away: so new content has a new version,
and with it another name, and nobody takes the one for the other. On a lone node content changes
under one version.

| step | on disk | record | after a kill here |
|---|---|---|---|
| 1 second name | both names, one data file | old version | the new name: `stale_data_gc` finds it |
| 1 on disk, if the record will count as that | the same | old version | the same |
| 2 recorded | both names | new version | the old name is one |
| 3 old name unlinked | new name | new version | nothing to do |

If it is not known whether step 2 was done (its answer was lost), both names stay, as after a kill,
until the next attempt. A name under which nothing is recorded, since others published or removed
the file, goes.

Invariants
- Only one node uses a version: its lower bits are that node's number. So a data file that a node
  left at step 1 is never taken for what another node published.
"""

from collections.abc import Callable
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.errors import Conflict, KvfsError, Stale
from kvfs.datastore.files import DataFiles
from kvfs.datastore.quarantine_directory import Reason
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.keys import unpack_node
from kvfs.meta.records import Flag, Inode
from kvfs.tree import namespaces
from kvfs.tree.inodes import read_inode, read_inodes
from kvfs.vfs.quarantine import kinds_of, put_away

_ATTEMPTS: Final = 16
_NODE_BITS: Final = 16
_NODE_MASK: Final = (1 << _NODE_BITS) - 1


class Overtaken(KvfsError):
    """Others have published since the version that content builds on."""


def check_follows(t: Transaction, ino: int, version: int) -> None:
    """Raises Overtaken if another node than this one has published since that version."""
    last = read_inode(t, ino).version
    if last != version and not is_version_of(last, unpack_node(t.node)):
        raise Overtaken("another node has published newer content of the file")


def is_version_of(version: int, node: int) -> bool:
    """Returns whether a version is one that this node gave."""
    return version & _NODE_MASK == node


def next_version(version: int, node: bytes) -> int:
    """Returns the first version above it that is a node's own."""
    return ((version >> _NODE_BITS) + 1) << _NODE_BITS | unpack_node(node)


async def name_draft(engine: Engine, files: DataFiles, ino: int, version: int) -> int:
    """Makes a data file of the draft that is to replace this version; returns its version, which
    nobody has recorded."""
    node = await engine.read(lambda t: t.node)
    while True:
        following = next_version(version, node)
        try:
            files.name_draft(ino, version, following)
        except FileExistsError:
            await _clear(engine, files, ino, version, following)
        else:
            return following


async def publish_anew(
    engine: Engine,
    files: DataFiles,
    ino: int,
    version: int,
    record: Callable[[Transaction, int], object],
    names: set[int],
    *,
    synced: bool = False,
) -> int:
    """Gives the data file of a version the next one, by `record(t, version)`, which raises Conflict
    if the record has that or a later one: the last publisher has the last one. Returns it.

    `names`: the versions under which earlier attempts of the caller gave the data file a name that
    may be recorded nowhere; empty when this one succeeds, or nothing is recorded. `synced`: the
    record will count as on disk, so the name is on disk before it, which may be another one. Raises
    Overtaken (by `record`, see `check_follows`), Stale, Conflict (others publish all the time),
    Unavailable, OSError. If it is not known whether the engine took it, the data file keeps both
    names.
    """
    try:
        new = await _publish_anew(engine, files, ino, version, record, names, synced=synced)
    except (Stale, Overtaken):
        _unlink_all(files, ino, names)
        raise
    names.discard(new)
    _unlink_all(files, ino, names)
    return new


async def _publish_anew(
    engine: Engine,
    files: DataFiles,
    ino: int,
    version: int,
    record: Callable[[Transaction, int], object],
    names: set[int],
    *,
    synced: bool,
) -> int:
    for _ in range(_ATTEMPTS):
        inode, node, lasts = await engine.read(
            lambda t: (read_inode(t, ino), t.node, namespaces.is_durable(t, ino))
        )
        new = next_version(max(inode.version, version), node)
        try:
            files.add_version(ino, version, new)
        except FileExistsError:
            await _clear(engine, files, ino, version, new)
            files.add_version(ino, version, new)
        names.add(new)
        if lasts and (synced or _counts_as_synced(inode)):
            await detach.aside()
            await trio.to_thread.run_sync(files.sync_name, ino, new)
        try:
            await engine.transact(lambda t, new=new: record(t, new))  # type: ignore[misc]
        except (Conflict, Overtaken) as error:
            was_recorded = await engine.read(lambda t, new=new: _is_at(t, ino, new))  # type: ignore[misc]
            if was_recorded:  # by an earlier attempt, whose answer was lost
                files.unlink(ino, version)
                version = new
            elif isinstance(error, Overtaken):
                raise
            else:
                files.unlink(ino, new)
            names.discard(new)
            continue
        files.unlink(ino, version)
        return new
    raise Conflict("others publish the file all the time: its last content is not recorded")


def _unlink_all(files: DataFiles, ino: int, names: set[int]) -> None:
    while names:
        files.unlink(ino, names.pop())


async def _clear(engine: Engine, files: DataFiles, ino: int, version: int, new: int) -> None:
    """Takes a name that a kill left behind. Usually it is another one of the data file itself; else
    its content may have been acknowledged by an engine that lost it."""
    kinds = await engine.read(kinds_of)
    put_away(files, kinds, ino, new, Reason.UNNAMED, version)


def _counts_as_synced(inode: Inode) -> bool:
    return bool(inode.flags & Flag.PUBLISHED) and not inode.boot


def _is_at(t: Transaction, ino: int, version: int) -> bool:
    (inode,) = read_inodes(t, [ino])
    return inode is not None and inode.version == version
