"""The part of the metadata that a backup has. Pure: functions of a transaction.

| keys | in a backup |
|---|---|
| namespaces, their settings and counters; users and access keys | yes |
| all of durable namespaces: names, inodes, links, attributes | yes |
| files that are written, never closed, or have no name | yes: a restore drops those without data |
| of caches all but the top directory and the namespace's record | no |
| which node has what, leases, delegations, locks, jobs, members, removals on their way | no |
| the key of the users' secrets, encrypted by a cluster's secret | no |
| notes of garbage in the cold tier | no: the store that made them collects it |
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from kvfs.base.errors import Busy, KvfsError
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.gathered_writes import MAX_KEY
from kvfs.meta.local_keys import everybodys
from kvfs.meta.records import (
    Flag,
    Inode,
    namespace_of,
    namespace_root,
    pack,
    unpack_inode,
    unpack_namespace,
)
from kvfs.tree.inodes import later_times
from kvfs.tree.tree import path_of

_KEPT: Final = tuple(bytes([kind]) for kind in b"abcegiknosuwx")
_SHARED_KEY: Final = keys.setting(0, b"key")
_COUNTER_SIZE: Final = len(keys.counter(0))
_OF_NODES: Final = (keys.UNSEALED, keys.UNPUBLISHED)
_FORMAT: Final = 0o170000
_REGULAR: Final = 0o100000
_DIRECTORY: Final = 0o040000


class WantedContent(NamedTuple):
    """The content of a file that is to be in the backup."""

    ino: int
    version: int
    checksum: bytes
    size: int
    is_cold: bool


def caches(t: Transaction) -> frozenset[bytes]:
    """Returns the ids, as keys have them, of the namespaces whose files are in no backup. Raises
    Busy while a namespace changes between everybody's and each node's own."""
    found = set()
    for key, value in t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE)):
        record = unpack_namespace(value)
        if record.switches_to:
            shown = record.name.decode(errors="backslashreplace")
            raise Busy(f"the namespace {shown} is changing its coherence: wait for its end")
        if record.kind == "cache" or record.is_peer:
            found.add(key[1:])
    return frozenset(found)


def selected(t: Transaction) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a backup, in order. Raises Busy."""
    spaces = caches(t)
    for kind in _KEPT:
        for key, value in everybodys(t.scan(kind, keys.after(kind)), spaces):
            if key == _SHARED_KEY or (kind == keys.COUNTER and len(key) != _COUNTER_SIZE):
                continue
            if kind == keys.INODE:
                yield key, _without_nodes(t, key, value, spaces)
            elif kind in _OF_NODES:
                yield key, b""
            else:
                yield key, value


def belongs(key: bytes) -> bool:
    """Returns whether `selected` may yield such a key: a restore takes no other one."""
    return key[:1] in _KEPT and key != _SHARED_KEY and len(key) <= MAX_KEY


def content_of(key: bytes, value: bytes) -> WantedContent | None:
    """Returns the content that belongs to a record of `selected`; None: it has none, or none that
    is sealed."""
    if key[:1] != keys.INODE:
        return None
    inode = unpack_inode(value)
    if not is_file(inode) or not inode.nlink or not inode.flags & Flag.SEALED:
        return None
    ino, is_cold = keys.unpack_u64(key, 1), bool(inode.flags & Flag.COLD)
    return WantedContent(ino, inode.version, inode.checksum, inode.size, is_cold)


def shown_path(t: Transaction, ino: int) -> str:
    """Returns the path of a file, for people."""
    try:
        return path_of(t, ino).decode(errors="backslashreplace")
    except KvfsError:
        return f"inode {ino}, which has no name any more"


def is_file(inode: Inode) -> bool:
    """Returns whether it is a regular file."""
    return inode.mode & _FORMAT == _REGULAR


def _without_nodes(t: Transaction, key: bytes, value: bytes, spaces: frozenset[bytes]) -> bytes:
    """Returns the record of an inode with what a cluster notes beside it, and without what is gone
    from a backup."""
    inode = unpack_inode(value)
    if inode.mode & _FORMAT != _DIRECTORY:
        return value
    ino = keys.unpack_u64(key, 1)
    if keys.pack_u16(namespace_of(ino)) in spaces and ino == namespace_root(namespace_of(ino)):
        return pack(msgspec.structs.replace(inode, nlink=2))
    later_times(inode, t.get(keys.times(ino)))
    return pack(inode)
