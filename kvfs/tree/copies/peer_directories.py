"""Directories of a namespace that is kept by its nodes (coherence `peer`): those of a path, and
whether one here lets more users pass than another node's of the same path."""

from typing import Protocol

import msgspec

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import namespace_root, unpack_inode


class Guarded(Protocol):
    """A directory's owner and mode."""

    @property
    def mode(self) -> int: ...

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...


class DirectoryAccess(msgspec.Struct, array_like=True, frozen=True):
    """Owner and mode of a directory, as a node tells them."""

    mode: int
    uid: int
    gid: int


def find(t: Transaction, parent: int, name: bytes) -> tuple[int, bytes] | None:
    """Returns number and packed record of a directory in another one; None if there is none."""
    value = t.get(keys.directory_entry(parent, name))
    record = None if value is None else t.get(keys.INODE + value)
    return None if value is None or record is None else (keys.unpack_u64(value), record)


def along(t: Transaction, namespace_id: int, path: bytes) -> list[tuple[int, bytes]]:
    """Returns number and packed record of each directory of a directory's path, from that below the
    namespace's root down, as far as they are here."""
    found: list[tuple[int, bytes]] = []
    parent = namespace_root(namespace_id)
    for name in path.split(b"/") if path else ():
        directory = find(t, parent, name)
        if directory is None:
            break
        found.append(directory)
        parent = directory[0]
    return found


def all_along(t: Transaction, namespace_id: int, path: bytes) -> list[tuple[int, bytes]] | None:
    """Returns the same as `along`; None if one of them is not here."""
    found = along(t, namespace_id, path)
    return found if len(found) == depth(path) else None


def depth(path: bytes) -> int:
    """Returns the directories of a directory's path, without the namespace's own."""
    return path.count(b"/") + 1 if path else 0


def access(found: list[tuple[int, bytes]]) -> list[DirectoryAccess]:
    """Returns what `along` found as it is told."""
    inodes = [unpack_inode(record) for _, record in found]
    return [DirectoryAccess(each.mode, each.uid, each.gid) for each in inodes]


def lets_no_more_pass(here: Guarded, there: Guarded) -> bool:
    """Returns whether nobody can list or pass a directory here who cannot do so there. Pure."""
    others = there.mode & 0o005
    group = there.mode & 0o050 if here.gid == there.gid else others << 3
    if here.mode & 0o005 & ~others or here.mode & 0o050 & ~group:
        return False
    return here.uid in (0, there.uid) or others == 0o005
