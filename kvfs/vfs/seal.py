"""The steps of a seal: reading a file, recording it, writing its description.

`sealer` has their order, and the remains of a kill between them.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvfs.datastore import file_sync
from kvfs.datastore import files as data
from kvfs.datastore.checksum import FileChecksum
from kvfs.datastore.files import DataFiles, Description
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, Namespace, namespace_of
from kvfs.tree import lifecycle, namespaces, sealed_etags, tree
from kvfs.tree.copies import placements
from kvfs.tree.inodes import xattrs_within

Failed = Callable[[int, OSError], None]
"""Told an inode number, and the reason why its data file cannot be synced."""
_DESCRIBED_BYTES: Final = 4096
"""Bytes of attributes: more do not fit into a data file's own (`files.fitting`)."""


class SealRead(NamedTuple):
    """The findings of step 1 in a data file; `fd` stays open until its record is sealed."""

    ino: int
    version: int
    fd: int
    stat: os.stat_result
    checksum: FileChecksum
    blocks: int
    stamp: tuple[int, int, int]
    """The data file's `stamp` while nobody but the sealer has changed it."""


def sealable(inode: Inode) -> bool:
    """Returns whether its state allows a seal, quiet or not."""
    if inode.flags & Flag.ASSEMBLY:
        return False
    return bool(inode.flags & Flag.PUBLISHED and inode.nlink)


def stamp(stat: os.stat_result) -> tuple[int, int, int]:
    """Returns a value that changes whenever a data file is written."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def seal_all(t: Transaction, read: Sequence[SealRead]) -> list[bool]:
    """Does step 4, with the MD5 as ETag where it was computed; returns whether each is sealed. A
    file that was changed through a mapping after its last close is published first; in a cluster,
    by the caller (`changed`)."""
    inodes = tree.read_inodes(t, [each.ino for each in read])
    return [_seal(t, each, inode) for each, inode in zip(read, inodes, strict=True)]


def _seal(t: Transaction, each: SealRead, inode: Inode | None) -> bool:
    ino = each.ino
    if inode is None or not sealable(inode):
        return False
    if _differs(inode, each):
        if t.node or not _is_as_read(each):
            return False
        publish(t, each)
        inode = tree.read_inode(t, ino)
    is_sealed = lifecycle.seal(
        t,
        ino,
        inode,
        version=each.version,
        size=each.stat.st_size,
        blocks=each.blocks,
        mtime_ns=each.stat.st_mtime_ns,
        ctime_ns=each.stat.st_ctime_ns,
        checksum=each.checksum.combined,
    )
    if is_sealed and each.checksum.md5:
        sealed_etags.give(t, ino, each.checksum.md5)
    return is_sealed


def there(t: Transaction, read: Sequence[SealRead]) -> list[SealRead]:
    """Returns those that have a name still, and this data file on this node."""
    inodes = placements.read_here(t, [each.ino for each in read])
    return [
        each
        for each, inode in zip(read, inodes, strict=True)
        if inode is not None and inode.version == each.version
    ]


def changed(t: Transaction, read: Sequence[SealRead]) -> list[SealRead]:
    """Returns those whose data files were changed through a mapping after their last close."""
    inodes = tree.read_inodes(t, [each.ino for each in read])
    return [
        each
        for each, inode in zip(read, inodes, strict=True)
        if inode is not None
        and _differs(inode, each)
        and (sealable(inode) and inode.version == each.version and _is_as_read(each))
    ]


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
    return stamp(os.fstat(each.fd)) == each.stamp


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


def describe_all(t: Transaction, read: Sequence[SealRead]) -> list[Description | None]:
    """Returns the description that each data file is to have; None where it has no name any
    more."""
    inodes, describing = tree.read_inodes(t, [each.ino for each in read]), _Describing(t)
    return [
        describing.of(each.ino, inode, each.version, each.stat.st_size, each.checksum.combined)
        for each, inode in zip(read, inodes, strict=True)
    ]


def described(
    t: Transaction, ino: int, version: int, size: int, checksum: bytes
) -> Description | None:
    """Returns the description that a data file of this version, size and checksum is to have; None
    if its record has no name."""
    return _Describing(t).of(ino, tree.read_inodes(t, [ino])[0], version, size, checksum)


class _Describing:
    """Descriptions of files by one transaction, which reads each directory once."""

    def __init__(self, t: Transaction) -> None:
        self._t = t
        self._namespaces: dict[int, Namespace] = {}
        self._directories: dict[int, bytes] = {}

    def of(
        self, ino: int, inode: Inode | None, version: int, size: int, checksum: bytes
    ) -> Description | None:
        """Does what `described` describes."""
        if inode is None or not inode.nlink:
            return None
        t, space = self._t, namespace_of(ino)
        namespace = self._namespaces.get(space)
        if namespace is None:
            namespace = self._namespaces[space] = namespaces.get(t, space)
        first, *others = [
            self._directory(parent) + b"/" + name for parent, name in tree.links(t, ino, inode)
        ]
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

    def _directory(self, ino: int) -> bytes:
        path = self._directories.get(ino)
        if path is None:
            path = self._directories[ino] = tree.path_of(self._t, ino).rstrip(b"/")
        return path


def settle_on_disk(
    read: list[SealRead], described: list[Description | None], failed: Failed
) -> list[SealRead]:
    """Does step 2, in a thread, of files that have a description; returns those on disk and
    unchanged, with their present blocks: allocation was delayed until here, and on ext4 a
    description takes one block of its own."""
    begun: list[tuple[SealRead, tuple[int, int, int]]] = []
    for each, description in zip(read, described, strict=True):
        try:
            if description is None or not _is_as_read(each):
                continue
            data.describe(each.fd, description)
            begun.append((each, stamp(os.fstat(each.fd))))
        except OSError as error:
            failed(each.ino, error)
    refused = file_sync.sync_many([each.fd for each, _ in begun])
    settled = []
    for each, now in begun:
        if each.fd in refused:
            failed(each.ino, refused[each.fd])
        elif now[:2] == each.stamp[:2]:
            blocks = os.fstat(each.fd).st_blocks
            settled.append(each._replace(blocks=blocks, stamp=now))
    return settled
