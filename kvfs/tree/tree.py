"""The tree of names: look up, add, link, remove, list. The public face of changes of names.

Every function is one step of a transaction; errors leave nothing written once the transaction is
aborted. `now` is nanoseconds since the epoch; names are bytes. The parents' mtime and ctime, the
inodes' ctime, link counts and the namespaces' usage follow in the same transaction.
"""

import stat
from collections.abc import Sequence
from typing import NamedTuple

from kvfs.base.errors import (
    CrossNamespace,
    Exists,
    IsADirectory,
    NameTooLong,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Stale,
)
from kvfs.meta import delegations, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    NAMESPACE_SHIFT,
    ROOT_INODE,
    Flag,
    Inode,
    namespace_of,
    namespace_root,
    pack,
    unpack_inode,
)
from kvfs.tree import name_escaping, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.entries import (
    Keep,
    Removed,
    absence,
    find_entry,
    find_shown,
    is_empty,
    links,
    live_directory,
    lose_link,
    touch,
)
from kvfs.tree.inodes import (
    BLOCK,
    add_usage,
    drop_inode,
    is_directory,
    read_inode,
    read_inodes,
    stamp,
    with_times,
    write_inode,
)
from kvfs.tree.private_files import check_unseen
from kvfs.tree.rename import RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, rename

__all__ = [
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "RENAME_WHITEOUT",
    "Child",
    "Keep",
    "Removed",
    "add",
    "add_unlinked",
    "exist",
    "find",
    "is_empty",
    "link",
    "links",
    "list_children",
    "lookup",
    "path_of",
    "read_inode",
    "read_inodes",
    "reap",
    "reap_all",
    "rename",
    "rename_with_whiteout",
    "replace",
    "resolve",
    "rmdir",
    "unlink",
    "write_inode",
]


class Child(NamedTuple):
    """A name in a directory."""

    key: bytes
    """The point to go on from after it: `after_key` of the next `list_children`."""
    name: bytes
    ino: int


def find(t: Transaction, parent: int, name: bytes) -> tuple[int, Inode] | None:
    """Like `lookup`, but returns None for a missing name. Two reads, whether it exists or not."""
    if name == b"." or name == b"..":
        return _find_dots(t, parent, name)
    if len(name) > namespaces.MAX_NAME:
        raise NameTooLong(f"a name has at most {namespaces.MAX_NAME} bytes, not {len(name)}")
    key = keys.ENTRY + keys.pack_u64(parent) + name
    packed = t.get(key) or t.get(key + b"/")
    if packed is None:
        packed = _find_odd(t, parent, name) if b"%" in name else None
        if packed is None:
            return None
    value = t.get(keys.INODE + packed)
    if value is None:
        raise Stale(f"the name '{_shown(name)}' leads to nothing: run `kvfs fsck`")
    ino = keys.unpack_u64(packed)
    return ino, with_times(t, ino, unpack_inode(value))


def lookup(t: Transaction, parent: int, name: bytes) -> tuple[int, Inode]:
    """Returns the inode under a name; `.` and `..` too. Raises NotFound, NameTooLong."""
    found = find(t, parent, name)
    if found is None:
        raise absence(t, parent)
    return found


def exist(t: Transaction, parent: int, names: Sequence[bytes]) -> list[bool]:
    """Returns whether each name exists; two round trips for all. A name over 255 bytes does not."""
    prefix = keys.entries(parent)
    wanted = [prefix + name[: namespaces.MAX_NAME + 1] for name in names]
    found = [value is not None for value in t.get_many(wanted)]
    missing = [at for at, there in enumerate(found) if not there]
    if missing:
        directories = t.get_many([wanted[at] + b"/" for at in missing])
        for at, value in zip(missing, directories, strict=True):
            found[at] = value is not None
    return found


def add(t: Transaction, parent: int, name: bytes, ino: int, inode: Inode) -> int:
    """Puts a new inode under a free name; returns its number.

    `inode` is completed: parent, name, nlink, and in a set-group-id directory the group (a new
    directory inherits the bit too). Its ctime becomes the parent's. A directory at the top level
    becomes a durable namespace, whose number is not `ino` but the one returned. Raises Exists,
    NotFound (the parent was removed), NotADirectory, NotPermitted (anything but a directory at the
    top level), NameTooLong, Invalid; `delegations.Delegated`.
    """
    namespaces.check_name(name)
    if parent == ROOT_INODE:
        return _add_namespace(t, name, inode)
    assert ino >> NAMESPACE_SHIFT == parent >> NAMESPACE_SHIFT, (ino, parent)
    directory = live_directory(t, parent)
    _check_free(t, parent, name)
    inode.parent, inode.name = parent, name
    if directory.mode & stat.S_ISGID:
        _inherit_group(inode, directory)
    entry = keys.ENTRY + keys.pack_u64(parent) + name
    if stat.S_ISDIR(inode.mode):
        check_unseen(t, parent)
        inode.nlink = 2
        t.put(entry + b"/", keys.pack_u64(ino))
        touch(t, parent, directory, inode.ctime_ns, 1)
        _put_new(t, ino, inode)
    else:
        inode.nlink = 1
        stamp(t, parent, directory, inode.ctime_ns)
        _put_new(t, ino, inode, (entry, keys.pack_u64(ino)))
    return ino


def add_unlinked(t: Transaction, parent: int, ino: int, inode: Inode) -> None:
    """Puts a new inode that has no name yet (O_TMPFILE in `parent`): an orphan until `link` names
    it.

    Raises NotFound (the parent was removed), NotPermitted (at the top level).
    """
    if parent == ROOT_INODE:
        raise NotPermitted("only namespaces stand at the top level")
    directory = live_directory(t, parent)
    if directory.mode & stat.S_ISGID:
        _inherit_group(inode, directory)
    inode.parent, inode.name, inode.nlink = 0, b"", 0
    t.put(keys.orphan(ino), b"")
    _put_new(t, ino, inode)


def link(t: Transaction, ino: int, parent: int, name: bytes, now: int) -> Inode:
    """Gives an inode one more name (an orphan: its first). Returns its record.

    Raises Exists, Stale, NotFound (the parent was removed), NotPermitted (directories; the top
    level), CrossNamespace, NameTooLong, Invalid.
    """
    namespaces.check_name(name)
    inode = read_inode(t, ino)
    if is_directory(inode):
        raise NotPermitted("a directory has one name only")
    if parent == ROOT_INODE:
        raise NotPermitted("only namespaces stand at the top level")
    if namespace_of(parent) != namespace_of(ino):
        raise CrossNamespace("a link cannot lead from one namespace into another: copy the file")
    directory = live_directory(t, parent)
    _check_free(t, parent, name)
    if inode.nlink == 0:
        t.delete(keys.orphan(ino))
        inode.parent, inode.name = parent, name
        inode.flags &= ~Flag.LOST
    else:
        if namespaces.is_peer(t, namespace_of(ino)):
            raise NotPermitted("a file of a namespace with --coherence peer has one name: copy it")
        if inode.nlink == 1:
            t.put(keys.backlink(ino, inode.parent, inode.name), b"")
        t.put(keys.backlink(ino, parent, name), b"")
    inode.nlink += 1
    inode.ctime_ns = now
    t.put(keys.file_entry(parent, name), keys.pack_u64(ino))
    write_inode(t, ino, inode)
    touch(t, parent, directory, now)
    return inode


def unlink(t: Transaction, parent: int, name: bytes, now: int, keep: Keep) -> Removed:
    """Removes the name of anything but a directory. Raises NotFound, IsADirectory."""
    entry = find_shown(t, parent, name)
    if entry is None:
        raise absence(t, parent)
    if entry.directory:
        raise IsADirectory("a directory is removed with rmdir")
    t.delete(entry.key)
    touch(t, parent, read_inode(t, parent), now)
    return lose_link(t, entry.ino, read_inode(t, entry.ino), (parent, entry.name), now, keep)


def rmdir(t: Transaction, parent: int, name: bytes, now: int, keep: Keep) -> Removed:
    """Removes an empty directory; at the top level, a namespace. An object's empty marker in it
    (see `name_escaping`) goes too: `Removed.marker`.

    Raises NotFound, NotADirectory, NotEmpty, Invalid (`.`); `delegations.Delegated`.
    """
    if name == b"..":
        raise NotEmpty("the parent directory holds this one")
    namespaces.check_name(name)
    entry = find_shown(t, parent, name)
    if entry is None:
        raise absence(t, parent)
    if not entry.directory:
        raise NotADirectory("it is not a directory; unlink it")
    ino = entry.ino
    marker = _remove_marker(t, ino, now, keep)
    if not is_empty(t, ino):
        raise NotEmpty("the directory is not empty")
    delegations.check_none(t, namespace_of(ino))
    if parent == ROOT_INODE:
        namespaces.forget(t, namespace_of(ino), name, now)
    else:
        t.delete(entry.key)
        touch(t, parent, read_inode(t, parent), now, -1)
    removed = lose_link(t, ino, read_inode(t, ino), (parent, entry.name), now, keep)
    return removed._replace(marker=marker)


def _remove_marker(t: Transaction, directory: int, now: int, keep: Keep) -> Removed | None:
    """Removes the file '' of a directory if it is empty and stands there alone."""
    prefix = keys.entries(directory)
    found = t.scan(prefix, keys.after(prefix))
    first, second = next(found, None), next(found, None)
    if first is None or first[0] != prefix or second is not None:
        return None
    ino = keys.unpack_u64(first[1])
    inode = read_inode(t, ino)
    if inode.size or not inode.flags & Flag.PUBLISHED:
        return None
    t.delete(prefix)
    return lose_link(t, ino, inode, (directory, b""), now, keep)


def replace(
    t: Transaction, parent: int, name: bytes, ino: int, inode: Inode, now: int, keep: Keep
) -> Removed | None:
    """Puts a new file under a name, atomically over a file that has it; returns what was replaced.

    Raises IsADirectory, and what `add` raises.
    """
    entry = find_entry(t, parent, name)
    if entry is None:
        add(t, parent, name, ino, inode)
        return None
    if entry.directory:
        raise IsADirectory("the name is a directory's")
    t.delete(entry.key)
    removed = lose_link(t, entry.ino, read_inode(t, entry.ino), (parent, name), now, keep)
    add(t, parent, name, ino, inode)
    return removed


def rename_with_whiteout(
    t: Transaction,
    old: tuple[int, bytes],
    new: tuple[int, bytes],
    whiteout: tuple[int, Inode],
    *,
    flags: int,
    now: int,
    keep: Keep,
) -> Removed | None:
    """Like `rename` of `old` to `new` (each parent, name), and the mark that tells overlayfs that
    the old name is removed replaces it: a new inode and its number. Raises what `rename` raises."""
    removed = rename(t, *old, *new, flags=flags & ~RENAME_WHITEOUT, now=now, keep=keep)
    if find_shown(t, *old) is None:  # else both were one file
        add(t, *old, *whiteout)
    return removed


def reap(t: Transaction, ino: int) -> None:
    """Drops an orphan that nobody holds any more; does nothing if it is gone, or has a link again.

    In a cluster: this node has unlinked its data file, and the last one to do so drops it; where
    records are each node's own, none waits for another."""
    if t.get(keys.orphan(ino)) is None:
        return
    if t.node:
        placements.let_go(t, ino, t.node)
        if placements.is_held(t, ino) and not namespaces.is_peer(t, namespace_of(ino)):
            return
    value = t.get(keys.inode(ino))
    if value is None:
        t.delete(keys.orphan(ino))
    else:
        drop_inode(t, ino, unpack_inode(value))


def reap_all(t: Transaction, inos: Sequence[int]) -> list[int]:
    """Does `reap` for each; returns them."""
    for ino in inos:
        reap(t, ino)
    return list(inos)


def list_children(t: Transaction, parent: int, after_key: bytes, limit: int) -> list[Child]:
    """Returns up to `limit` names after `after_key` (b"": from the start), in the order of their
    keys, as the mount shows them."""
    prefix = keys.entries(parent)
    start = prefix + after_key + b"\0" if after_key else prefix
    children: list[Child] = []
    for key, packed in t.scan(start, keys.after(prefix)):
        suffix = key[9:]
        if suffix[-1:] != b"/" and not name_escaping.is_odd(suffix):
            children.append(Child(suffix, suffix, keys.unpack_u64(packed)))
        elif (name := name_escaping.shown(t, parent, suffix)) is not None:
            children.append(Child(suffix or name_escaping.NUL, name, keys.unpack_u64(packed)))
        if len(children) >= limit:
            break
    return children


def resolve(t: Transaction, path: bytes) -> tuple[int, Inode]:
    """Walks a path from the root of the mount; `/`, `.` and empty parts are skipped, links not
    followed.

    Raises NotFound, NotADirectory, NameTooLong, each naming the path.
    """
    ino, inode = ROOT_INODE, read_inode(t, ROOT_INODE)
    for part in path.split(b"/"):
        if not part or part == b".":
            continue
        if not is_directory(inode):
            raise NotADirectory(f"{_shown(path)}: a part of the path is not a directory")
        found = find(t, ino, part)
        if found is None:
            raise NotFound(f"{_shown(path)}: no such file or directory")
        ino, inode = found
    return ino, inode


def path_of(t: Transaction, ino: int) -> bytes:
    """Returns a path that leads to the inode, from the root of the mount. Raises Stale for an
    orphan."""
    parts: list[bytes] = []
    while ino != ROOT_INODE:
        inode = read_inode(t, ino)
        if not inode.nlink:
            raise Stale("the file or directory has no name any more")
        parts.append(inode.name)
        ino = inode.parent
    return b"/" + b"/".join(reversed(parts))


def _shown(path: bytes) -> str:
    return path.decode(errors="backslashreplace")


def _find_dots(t: Transaction, parent: int, name: bytes) -> tuple[int, Inode] | None:
    if name == b".":
        return parent, read_inode(t, parent)
    if name == b"..":
        above = read_inode(t, parent).parent
        if not above:
            raise Stale("the directory was removed")
        return above, read_inode(t, above)
    return None


def _find_odd(t: Transaction, parent: int, name: bytes) -> bytes | None:
    entry = find_shown(t, parent, name)
    return None if entry is None else keys.pack_u64(entry.ino)


def _check_free(t: Transaction, parent: int, name: bytes) -> None:
    if find_shown(t, parent, name) is not None:
        raise Exists("the name is taken")


def _inherit_group(inode: Inode, directory: Inode) -> None:
    """Gives the inode the group of a set-group-id directory."""
    inode.gid = directory.gid
    if is_directory(inode):
        inode.mode |= stat.S_ISGID


def _put_new(t: Transaction, ino: int, inode: Inode, *named: tuple[bytes, bytes]) -> None:
    """Puts a new inode, and the entry that leads to it, in one call for all keys."""
    inode.btime_ns = inode.ctime_ns
    packed, pairs = keys.pack_u64(ino), list(named)
    if not stat.S_ISREG(inode.mode):
        inode.flags |= Flag.PUBLISHED
    else:
        if not inode.flags & Flag.PUBLISHED:
            pairs.append((keys.UNPUBLISHED + packed, t.node))
        if not inode.flags & Flag.SEALED or inode.boot:
            pairs.append((keys.UNSEALED + packed, t.node))
        if t.node:
            pairs += placements.of_holder(ino, inode.version, t.node)
    pairs.append((keys.INODE + packed, pack(inode)))
    t.put_all(pairs)
    add_usage(t, ino >> NAMESPACE_SHIFT, BLOCK * inode.blocks, 1)


def _add_namespace(t: Transaction, name: bytes, inode: Inode) -> int:
    if not is_directory(inode):
        raise NotPermitted("only directories (namespaces) stand at the top level: make one first")
    namespace_id = namespaces.create(
        t, name, mode=inode.mode, uid=inode.uid, gid=inode.gid, now=inode.ctime_ns
    )
    return namespace_root(namespace_id)
