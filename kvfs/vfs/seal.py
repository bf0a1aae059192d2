"""The steps of a seal: reading a file, recording it, writing its description.

`sealer` has their order, and the remains of a kill between them.
"""

import os
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from kvfs.datastore import file_sync
from kvfs.datastore import files as data
from kvfs.datastore.checksum import FileChecksum
from kvfs.datastore.files import DataFiles, Description
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_of
from kvfs.tree import lifecycle, namespaces, sealed_etags, tree
from kvfs.tree.inodes import xattrs_within

Failed = Callable[[int, OSError], None]
"""Told an inode number, and the reason why its data file cannot be synced."""
_DESCRIBED_BYTES: Final = 4096
"""Bytes of attributes: more do not fit into a data file's own (`files.fitting`)."""


class SealRead(NamedTuple):
    """The findings of step 1 in a data file; `fd` stays open until step 4."""

    ino: int
    version: int
    fd: int
    stat: os.stat_result
    checksum: FileChecksum
    blocks: int


def sealable(inode: Inode) -> bool:
    """Returns whether its state allows a seal, quiet or not."""
    if inode.flags & Flag.ASSEMBLY:
        return False
    return bool(inode.flags & Flag.PUBLISHED and inode.nlink)


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """Returns a value that changes whenever a data file is written."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def seal(t: Transaction, each: SealRead) -> bool:
    """Does step 3, with the MD5 as ETag if it was computed. A file that was changed through a
    mapping after its last close is published first; in a cluster, by the caller (`is_changed`)."""
    inode = tree.read_inodes(t, [each.ino])[0]
    if inode is None or not sealable(inode):
        return False
    if _differs(inode, each):
        if t.node or not _is_as_read(each):
            return False
        publish(t, each)
    if not _seal_record(t, each, synced=False):
        return False
    if each.checksum.md5:
        sealed_etags.give(t, each.ino, each.checksum.md5)
    return True


def is_there(t: Transaction, each: SealRead) -> bool:
    """Returns whether the file has a name still, and this data file."""
    inode = tree.read_inodes(t, [each.ino])[0]
    return inode is not None and inode.nlink > 0 and inode.version == each.version


def is_changed(t: Transaction, each: SealRead) -> bool:
    """Returns whether the data file was changed through a mapping after its last close."""
    inode = tree.read_inodes(t, [each.ino])[0]
    if inode is None or not sealable(inode) or inode.version != each.version:
        return False
    return _differs(inode, each) and _is_as_read(each)


def publish(t: Transaction, each: SealRead, version: int | None = None) -> None:
    """Records the data file as it was read. Raises Stale, Conflict."""
    stat = each.stat
    lifecycle.publish(
        t,
        each.ino,
        size=stat.st_size,
        blocks=stat.st_blocks,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
        boot=tree.read_inode(t, each.ino).boot,
        version=version,
    )


def _differs(inode: Inode, each: SealRead) -> bool:
    return (inode.size, inode.mtime_ns) != (each.stat.st_size, each.stat.st_mtime_ns)


def _is_as_read(each: SealRead) -> bool:
    """Returns whether the data file is as it was read: its times may have been set with the
    record's."""
    return stamp(os.fstat(each.fd)) == stamp(each.stat)


def _seal_record(t: Transaction, each: SealRead, *, synced: bool) -> bool:
    return lifecycle.seal(
        t,
        each.ino,
        version=each.version,
        size=each.stat.st_size,
        blocks=each.blocks,
        mtime_ns=each.stat.st_mtime_ns,
        ctime_ns=each.stat.st_ctime_ns,
        checksum=each.checksum.combined,
        synced=synced,
    )


def confirm(t: Transaction, each: SealRead) -> bool:
    """Does step 5, unless the file was opened for writing since step 3."""
    inode = tree.read_inodes(t, [each.ino])[0]
    if inode is None or not inode.flags & Flag.SEALED:
        return False
    if inode.checksum != each.checksum.combined:
        return False
    return _seal_record(t, each, synced=True)


def take_back(t: Transaction, lost: list[SealRead]) -> None:
    """Undoes step 3 if step 4 found that the data may not be on the disk."""
    for each in lost:
        inode = tree.read_inodes(t, [each.ino])[0]
        if inode is not None and inode.checksum == each.checksum.combined:
            lifecycle.reopen(t, each.ino)


def synced(
    files: DataFiles, wanted: list[tuple[int, int]], failed: Failed
) -> list[tuple[int, int]]:
    """Syncs data files, in a thread; returns those (inode number, version) for which that
    succeeded."""
    done = []
    for ino, version in wanted:
        try:
            fd = files.open(ino, version, os.O_RDONLY)
            try:
                file_sync.sync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            failed(ino, error)
            continue
        done.append((ino, version))
    return done


def settle(t: Transaction, synced: list[tuple[int, int]]) -> None:
    """Records that data files are on disk, if they are still their inodes' own."""
    inodes = tree.read_inodes(t, [ino for ino, _ in synced])
    for (ino, version), inode in zip(synced, inodes, strict=True):
        if inode is not None and inode.version == version:
            lifecycle.synced(t, ino)


def describe(t: Transaction, each: SealRead) -> Description | None:
    """Returns the description that the data file is to have; None when it has no name any more."""
    return described(t, each.ino, each.version, each.stat.st_size, each.checksum.combined)


def described(
    t: Transaction, ino: int, version: int, size: int, checksum: bytes
) -> Description | None:
    """Returns the description that a data file of this version, size and checksum is to have; None
    if its record has no name."""
    inode = tree.read_inodes(t, [ino])[0]
    if inode is None or not inode.nlink:
        return None
    namespace = namespaces.get(t, namespace_of(ino))
    first, *others = (
        tree.path_of(t, parent).rstrip(b"/") + b"/" + name
        for parent, name in tree.links(t, ino, inode)
    )
    return Description(
        ino=ino,
        version=version,
        size=size,
        checksum=checksum,
        path=first,
        mode=inode.mode,
        uid=inode.uid,
        gid=inode.gid,
        mtime_ns=inode.mtime_ns,
        described_ns=time.time_ns(),
        namespace=namespace.name,
        kind=namespace.kind,
        others=others,
        xattrs=xattrs_within(t, ino, _DESCRIBED_BYTES),
    )


def settle_on_disk(
    read: list[SealRead], described: list[Description | None], failed: Failed
) -> list[SealRead]:
    """Does step 4, in a thread; returns the files with their present blocks: allocation was delayed
    until here, and on ext4 a description takes one block of its own."""
    settled = []
    for each, description in zip(read, described, strict=True):
        try:
            if description is not None:
                data.describe(each.fd, description)
            file_sync.sync(each.fd)
            blocks = os.fstat(each.fd).st_blocks
        except OSError as error:
            failed(each.ino, error)
            continue
        settled.append(each._replace(blocks=blocks))
    return settled
