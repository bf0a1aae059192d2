"""Namespaces: the top-level directories, their policies and their contents.

Invariants
- A namespace's id is never used again, nor is an inode number, even when the namespace is gone.
- `Usage` counts every inode of the namespace, orphans included, except its own top directory.
"""

import stat
from typing import Final, NamedTuple, Unpack

import msgspec

from kvfs.base.errors import (
    Conflict,
    Corrupt,
    Exists,
    Invalid,
    NameTooLong,
    NoSpace,
    NotEmpty,
    NotFound,
    NotSupported,
)
from kvfs.meta import inode_ranges, keys, schema
from kvfs.meta.engine import Transaction
from kvfs.meta.records import (
    NAMESPACE_SHIFT,
    ROOT_INODE,
    Flag,
    Inode,
    Namespace,
    Usage,
    namespace_of,
    namespace_root,
    pack,
    unpack_namespace,
    unpack_usage,
)
from kvfs.tree import coherence_change, namespace_policies
from kvfs.tree.copies import node_usage, peer_end
from kvfs.tree.inodes import (
    add_usage,
    drop_inode,
    read_inode,
    write_inode,
)

__all__ = [
    "MAX_NAME",
    "ListedNamespace",
    "add_usage",
    "adopt",
    "allocate_inodes",
    "by_name",
    "check_format",
    "check_name",
    "create",
    "forget",
    "format",
    "get",
    "is_durable",
    "is_peer",
    "list_all",
    "listed",
    "records",
    "remove",
    "rename",
    "set_policy",
    "settings",
    "usage",
]

MAX_NAME: Final = 255
_MAX_ID: Final = (1 << 64 - NAMESPACE_SHIFT) - 1
_FIRST_INODE: Final = ROOT_INODE + 1
_TOP: Final = 0
"""The 'namespace' that holds the root and, as its counter, the next namespace id."""


class ListedNamespace(NamedTuple):
    """A namespace as `list_all` gives it."""

    id: int
    namespace: Namespace
    usage: Usage
    elsewhere: Usage
    """The usage of other nodes in one that is kept by its nodes, as they told last."""
    limit: int
    """Bytes that may be in it, as far as this node counts them; where it has no capacity of its own
    it means nothing."""


def format(t: Transaction, now: int, uid: int, gid: int) -> None:  # noqa: A001
    """Makes the root directory in an empty engine; does nothing if that is done already."""
    if t.get(keys.VERSION) is not None:
        check_format(t)
        return
    t.put(keys.VERSION, b"%d" % keys.SCHEMA)
    t.put(keys.counter(_TOP), keys.pack_u64(1))
    write_inode(t, ROOT_INODE, _directory(0o755, uid, gid, now, b""))


def check_format(t: Transaction) -> None:
    """Raises Corrupt if no schema was written, NotSupported if it is another than ours."""
    if t.get(keys.VERSION) is None:
        raise Corrupt(
            "the metadata hold no schema version: the store was never finished, make it anew"
        )
    schema.check(t)


def check_name(name: bytes) -> None:
    """Raises NameTooLong over 255 bytes, Invalid if it is empty, '.', '..' or holds '/' or NUL."""
    if len(name) > MAX_NAME:
        raise NameTooLong(f"a name has at most {MAX_NAME} bytes, not {len(name)}")
    if not name or name == b"." or name == b".." or b"/" in name or b"\0" in name:
        raise Invalid(f"'{_shown(name)}' cannot be a name")


def create(
    t: Transaction,
    name: bytes,
    *,
    mode: int = 0o755,
    uid: int,
    gid: int,
    now: int,
    **policy: Unpack[namespace_policies.PolicyChanges],
) -> int:
    """Makes a namespace and its top directory; returns its id.

    `capacity` in bytes, 0 for no limit of its own. Raises Exists, Invalid, NotSupported,
    NameTooLong, NoSpace (no id is left: 65,535 were used).
    """
    check_name(name)
    record = Namespace(name=name, created_ns=now)
    _change(t, record, policy)
    entry = keys.directory_entry(ROOT_INODE, name)
    if t.get(entry) is not None:
        raise Exists(f"there is a namespace '{_shown(name)}' already")
    namespace_id = _next_id(t)
    _enter(t, namespace_id, record, _directory(mode, uid, gid, now, name))
    _touch_root(t, now, 1)
    return namespace_id


def is_peer(t: Transaction, namespace_id: int) -> bool:
    """Returns whether a namespace's names are each node's own, on a node of a cluster."""
    value = t.get(keys.namespace(namespace_id)) if t.node else None
    return value is not None and unpack_namespace(value).is_peer


def is_apart(t: Transaction, namespace_id: int) -> bool:
    """Returns whether a namespace has a shard of its own, or is moved just now."""
    return t.get(keys.place(namespace_id)) is not None


def is_durable(t: Transaction, ino: int) -> bool:
    """Returns whether an inode's namespace promises to drop nothing; True for one that is gone."""
    value = t.get(keys.NAMESPACE + keys.pack_u16(ino >> NAMESPACE_SHIFT))
    return value is None or unpack_namespace(value).kind != "cache"


def set_policy(
    t: Transaction,
    namespace_id: int,
    *,
    now: int,
    **policy: Unpack[namespace_policies.PolicyChanges],
) -> None:
    """Changes the settings that are not None; where its coherence ends being peer, closes the
    namespace until all nodes have told what they have of it: one may have files of which nobody
    heard yet. Raises NotFound, Invalid, NotSupported, Busy (an earlier change of its coherence is
    not finished), Conflict (it becomes peer, and has a shard of its own)."""
    record = get(t, namespace_id)
    was_peer = record.is_peer
    if record.ends_peer:
        _ask_back(t, namespace_id, record, policy)
        return
    before = msgspec.structs.replace(record)
    _change(t, record, policy)
    if t.node and record.is_peer != was_peer:
        coherence_change.check_settled(record)
        if is_apart(t, namespace_id):
            raise Conflict(
                f"the namespace {_shown(record.name)} has a shard of its own, which it leaves"
                " before its coherence becomes peer: run `kvfs namespace set` again"
            )
        if not was_peer:
            coherence_change.begin(t, namespace_id, record)
        else:
            if msgspec.structs.replace(before, coherence=record.coherence) != record:
                raise NotSupported(
                    "a namespace ends being peer by itself: change its other settings before, or"
                    " afterwards"
                )
            peer_end.begin(t, namespace_id, record, now)
    t.put(keys.namespace(namespace_id), pack(record))


def get(t: Transaction, namespace_id: int) -> Namespace:
    """Raises NotFound."""
    value = t.get(keys.namespace(namespace_id))
    if value is None:
        raise _missing(namespace_id)
    return unpack_namespace(value)


def usage(t: Transaction, namespace_id: int) -> Usage:
    """Returns the present usage of the namespace. Raises NotFound."""
    value = t.get(keys.usage(namespace_id))
    if value is None:
        raise _missing(namespace_id)
    return unpack_usage(value)


def by_name(t: Transaction, name: bytes) -> tuple[int, Namespace]:
    """Returns the id and policy. Raises NotFound, NameTooLong."""
    if len(name) > MAX_NAME:
        raise NameTooLong(f"a name has at most {MAX_NAME} bytes, not {len(name)}")
    value = t.get(keys.directory_entry(ROOT_INODE, name))
    if value is None:
        raise NotFound(f"there is no namespace {_shown(name)}")
    namespace_id = namespace_of(keys.unpack_u64(value))
    return namespace_id, get(t, namespace_id)


def list_all(t: Transaction) -> list[ListedNamespace]:
    """Returns every namespace, in the order of their names."""
    prefix = keys.entries(ROOT_INODE)
    ids = [namespace_of(keys.unpack_u64(ino)) for _, ino in t.scan(prefix, keys.after(prefix))]
    return [listed(t, number) for number in ids]


def records(t: Transaction) -> dict[int, Namespace]:
    """Returns the policy of every namespace by its id; unlike `list_all` it reads nothing of what
    nodes have in them."""
    found = t.scan(keys.NAMESPACE, keys.after(keys.NAMESPACE))
    return {keys.unpack_node(key[1:]): unpack_namespace(value) for key, value in found}


def listed(t: Transaction, namespace_id: int) -> ListedNamespace:
    """Returns one namespace. Raises NotFound."""
    record = get(t, namespace_id)
    elsewhere, limit = Usage(), record.capacity
    if t.node and record.is_peer:
        elsewhere = node_usage.elsewhere(t, namespace_id)
        limit = node_usage.limit(t, namespace_id, record.capacity)
    return ListedNamespace(namespace_id, record, usage(t, namespace_id), elsewhere, limit)


def remove(t: Transaction, name: bytes, now: int) -> int:
    """Removes an empty namespace with its top directory; returns its id. Raises NotFound,
    NotEmpty."""
    namespace_id, _ = by_name(t, name)
    ino = namespace_root(namespace_id)
    prefix = keys.entries(ino)
    if next(t.scan(prefix, keys.after(prefix)), None) is not None:
        raise NotEmpty(f"the namespace {_shown(name)} is not empty")
    forget(t, namespace_id, name, now)
    drop_inode(t, ino, read_inode(t, ino))
    return namespace_id


def forget(t: Transaction, namespace_id: int, name: bytes, now: int) -> None:
    """Removes an empty namespace except its top directory's record. Its counter stays: inode
    numbers that orphans or kernels still hold are not given out again. Raises NotEmpty (other nodes
    say that they have files of it), Busy (a change of its coherence is not finished)."""
    record = get(t, namespace_id)
    coherence_change.check_settled(record)
    if t.node and record.is_peer:
        node_usage.check_empty(t, namespace_id, name)
        node_usage.forget(t, namespace_id)
    t.delete(keys.directory_entry(ROOT_INODE, name))
    t.delete(keys.namespace(namespace_id))
    t.delete(keys.usage(namespace_id))
    for key in settings(t, namespace_id):
        t.delete(keys.setting(namespace_id, key))
    if t.node:
        t.delete(keys.delegation(namespace_id, t.node))
        t.delete(keys.exclusive(namespace_id))
    _touch_root(t, now, -1)


def adopt(t: Transaction, namespace_id: int, record: Namespace, now: int) -> None:
    """Gives a namespace whose other records exist already its place below the root."""
    t.put(keys.namespace(namespace_id), pack(record))
    entry = keys.directory_entry(ROOT_INODE, record.name)
    t.put(entry, keys.pack_u64(namespace_root(namespace_id)))
    following = keys.unpack_u64(t.get(keys.counter(_TOP)) or keys.pack_u64(1))
    t.put(keys.counter(_TOP), keys.pack_u64(max(following, namespace_id + 1)))
    _touch_root(t, now, 1)


def rename(t: Transaction, namespace_id: int, name: bytes) -> None:
    """Records the new name of a namespace; the caller changes entry and directory."""
    record = get(t, namespace_id)
    record.name = name
    t.put(keys.namespace(namespace_id), pack(record))


def allocate_inodes(t: Transaction, namespace_id: int, count: int) -> int:
    """Takes `count` inode numbers, the first of which is returned; none is ever given out again.

    Raises NotFound (no such namespace), NoSpace (2^48 were used); `inode_ranges.UsedUp`.
    """
    if get(t, namespace_id).is_peer and t.node:
        return inode_ranges.take(t, namespace_id, count)
    return inode_ranges.advance(t, namespace_id, count)


def settings(t: Transaction, namespace_id: int) -> dict[bytes, bytes]:
    """Returns the settings of the namespace as a bucket, by name."""
    prefix = keys.setting(namespace_id, b"")
    return {key[len(prefix) :]: value for key, value in t.scan(prefix, keys.after(prefix))}


def _change(t: Transaction, record: Namespace, policy: namespace_policies.PolicyChanges) -> None:
    """Changes a record that is to be written. Raises Invalid, NotSupported."""
    namespace_policies.change(record, policy, in_cluster=bool(t.node))
    if t.node and record.is_peer and not schema.has_tags(t):
        raise NotSupported(
            "nodes of the version before may be in the cluster, which take names with --coherence"
            " peer for everybody's: start all nodes with this version, then run `kvfs node"
            " finish-upgrade`"
        )
    if t.node and policy.get("without_engine") and not schema.has_tags(t):
        raise NotSupported(
            "nodes of the version before may be in the cluster, which drop --without-engine: start"
            " all nodes with this version, then run `kvfs node finish-upgrade`"
        )


def _ask_back(
    t: Transaction, namespace_id: int, record: Namespace, policy: namespace_policies.PolicyChanges
) -> None:
    """Has a namespace that is closed to end being peer stay so, if `policy` says no more than that.
    Raises Busy."""
    wanted = {name: value for name, value in policy.items() if value is not None}
    if not wanted:
        return
    if wanted != {"coherence": "peer"} or not peer_end.ask_back_closed(t, namespace_id):
        coherence_change.check_settled(record)


def _enter(t: Transaction, namespace_id: int, record: Namespace, top: Inode) -> None:
    """Writes the records of a new namespace."""
    ino = namespace_root(namespace_id)
    if t.node and not record.is_peer and t.get(keys.place(_TOP)) == b"":
        t.put(keys.place(namespace_id), b"")
    t.put(keys.namespace(namespace_id), pack(record))
    t.put(keys.usage(namespace_id), pack(Usage()))
    t.put(keys.counter(namespace_id), keys.pack_u64(ino + 1))
    t.put(keys.directory_entry(ROOT_INODE, record.name), keys.pack_u64(ino))
    write_inode(t, ino, top)


def _missing(namespace_id: int) -> NotFound:
    if namespace_id == _TOP:
        return NotFound("the top level is no namespace: it holds namespaces only")
    return NotFound(f"there is no namespace with the id {namespace_id}")


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def _next_id(t: Transaction) -> int:
    value = t.get(keys.counter(_TOP))
    if value is None:
        raise Corrupt("the metadata hold no counter of namespaces: the store was never finished")
    number = keys.unpack_u64(value)
    if number > _MAX_ID:
        raise NoSpace(f"all {_MAX_ID} namespace ids were used; make a new store")
    t.put(keys.counter(_TOP), keys.pack_u64(number + 1))
    return number


def _directory(mode: int, uid: int, gid: int, now: int, name: bytes) -> Inode:
    return Inode(
        mode=stat.S_IFDIR | stat.S_IMODE(mode),
        uid=uid,
        gid=gid,
        nlink=2,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        btime_ns=now,
        parent=ROOT_INODE,
        name=name,
        flags=Flag.PUBLISHED,
    )


def _touch_root(t: Transaction, now: int, directories: int) -> None:
    root = read_inode(t, ROOT_INODE)
    root.mtime_ns = root.ctime_ns = now
    root.nlink += directories
    write_inode(t, ROOT_INODE, root)
