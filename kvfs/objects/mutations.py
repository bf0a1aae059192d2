"""The transactions that put and delete objects, with their versions. No I/O here.

| the bucket | put over a current version | delete without an id |
|---|---|---|
| keeps no versions (`""`) | it goes | it goes |
| `Enabled` | it stays, under its id | it stays; a delete marker |
| `Suspended` | a null version goes, any other stays | the same; a delete marker with the id null |

A writer that takes a bucket for one without versions, and finds a kept one (versioning was begun
meanwhile), writes as to a suspended one: a version with an id goes by its id alone.

Invariants
- The newest of all versions and delete markers is the current one, unless the current file was
  removed through the mount: then there is no object until the next put.
- A version is no older than the one before it, by its mtime.
- An entry that is no file is neither replaced nor moved: S3 cannot see it.
- A directory that was made for a key (IMPLIED) goes with the last name in it.
- A removed file becomes an orphan first, and is reported in `Changed`: programs that have it open
  read on.
"""

import stat
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import NAMESPACE_SHIFT, Flag, Inode, pack
from kvfs.objects import attribute_validation, lookup, object_attributes, versions
from kvfs.objects.lookup import Bucket
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_errors import Locked, NoSuchBucket, NotAnObject, PreconditionFailed
from kvfs.objects.object_info import Facts
from kvfs.objects.object_keys import KeyPlace, check_key, place_of
from kvfs.tree import entries, etags, name_escaping, namespaces
from kvfs.tree.copies import placements
from kvfs.tree.entries import Removed, lose_link, relocate, touch
from kvfs.tree.inodes import BLOCK, add_usage, read_inode, set_blocks, stamp, write_inode
from kvfs.tree.private_files import check_unseen
from kvfs.vfs.post_commit import Changed
from kvfs.vfs.stage_records import Dropped, WrittenData

ENABLED: Final = "Enabled"
SUSPENDED: Final = "Suspended"
FILE_MODE: Final = stat.S_IFREG | 0o600
"""The mode of an assembly until it has a key; then its bucket's directory decides the
permissions."""

Check = Callable[[Facts | None], None]
"""Raises unless the change may be made; it is given the present object, None for nothing or a
delete marker, in the transaction that makes the change."""


def anything(_: Facts | None) -> None:
    """The `Check` of a caller without conditions."""


class Moment(msgspec.Struct, frozen=True):
    """The time of a change."""

    now: int
    """Nanoseconds since the epoch."""
    boot: int
    """The running boot, as the store's disks see it."""


class New(msgspec.Struct, frozen=True):
    """An object that is to be put."""

    body: WrittenData
    etag: str
    metadata: Metadata


class TooOld(Exception):
    """The body's mtime is before that of the version which it would follow. Nothing was changed."""

    def __init__(self, mtime_ns: int) -> None:
        super().__init__(mtime_ns)
        self.mtime_ns = mtime_ns
        """The earliest mtime that it may have."""


class Deleted(msgspec.Struct, frozen=True):
    """The result of a delete."""

    found: bool
    """Whether it existed; in a bucket with versions a delete marker is made anyway."""
    delete_marker: bool
    """Whether it made one, or removed one."""
    version: str
    """The version of the delete marker, or of the removed one; empty if the bucket keeps no
    versions."""


def put(
    t: Transaction,
    bucket: Bucket,
    key: bytes,
    new: New,
    versioning: str,
    check: Check,
    moment: Moment,
    changed: Changed,
) -> Facts:
    """Puts an object under its key, which was checked before the body came (`check_key`). Raises
    what `check` raises, PreconditionFailed (it passed for an absent object, and a mount is making a
    file of that name), TooLarge, NoSuchBucket, NotAnObject, TooOld, and `stage_records.Dropped` (a
    node that started took the body for a dead process's)."""
    if new.body.ino >> NAMESPACE_SHIFT != bucket.id:
        raise NoSuchBucket("the bucket is another one than when the put began")
    if t.get(keys.NAMESPACE + keys.pack_u16(bucket.id)) is None:
        raise NoSuchBucket("the bucket was deleted since the put began")
    place = place_of(key)
    name, parent = place.name, bucket.root
    if versioning:
        _check_order(t, bucket, place, new.body)
    if place.directories:
        parent = _make_directories(t, bucket, place.directories, moment, changed)
    if check is not anything:
        there = lookup.find_file(t, parent, name, key, moment.boot)
        check(there)
        if there is None and lookup.is_being_made(t, parent, name):
            raise PreconditionFailed("a file of this name is being made through a mount")
    removed, version = None, None
    if versioning or t.get(keys.ENTRY + keys.pack_u64(parent) + name) is not None:
        removed, version = _make_way(t, parent, name, versioning, moment, changed)
    inode = _add_file(t, bucket, parent, name, new, moment, version)
    tell(t, changed, parent, name, removed)
    changed.publish(new.body.ino, new.body.size)
    outside = versions.NULL if version is None else versions.outside(version)
    return Facts(key, new.body.ino, inode, new.etag, dict(new.metadata), outside, True, False)


def put_file(
    t: Transaction,
    bucket: Bucket,
    directory: int,
    name: bytes,
    new: New,
    moment: Moment,
    changed: Changed,
) -> Inode:
    """Puts a file into a directory of the system's, over one of that name. Raises Dropped."""
    remove_file(t, directory, name, moment, changed)
    inode = _add_file(t, bucket, directory, name, new, moment)
    tell(t, changed, directory, name)
    changed.publish(new.body.ino, new.body.size)
    return inode


def remove_file(
    t: Transaction, directory: int, name: bytes, moment: Moment, changed: Changed
) -> None:
    """Removes the entry of this name in a directory of the system's, if there is one."""
    packed = t.get(keys.file_entry(directory, name))
    if packed is not None:
        tell(t, changed, directory, name, _unlink(t, directory, name, packed, moment))


def delete(
    t: Transaction,
    bucket: Bucket,
    key: bytes,
    versioning: str,
    check: Check,
    moment: Moment,
    changed: Changed,
) -> Deleted:
    """Deletes the current version. With a condition, nothing is done if there is neither an object
    nor a delete marker; `check` is shown either. Raises what `check` raises, Invalid; NotAnObject
    if a delete marker would be made over something else."""
    check_key(key)
    place = place_of(key)
    name, parent = place.name, lookup.descend(t, bucket.root, place.directories)
    found = None if parent is None else lookup.object_at(t, parent, name, moment.boot)
    if check is not anything:
        there = None
        if parent is not None:
            there = lookup.find_current(t, parent, name, key, moment.boot)
        check(there)
        if there is None:
            return Deleted(False, False, "")
    if not versioning:
        if parent is None or found is None:
            return Deleted(False, False, "")
        packed = keys.pack_u64(found[0])
        if t.get(keys.XATTR + packed + object_attributes.VERSION) is None:
            _drop_current(t, parent, name, found, moment, changed)
            if parent != bucket.root:
                prune(t, parent, moment, changed)
            return Deleted(True, False, "")
        versioning = SUSPENDED  # versions were kept meanwhile
    parent = _make_directories(t, bucket, place.directories, moment, changed)
    removed, version = _make_way(t, parent, name, versioning, moment, changed)
    if version is None:
        version = versions.make(_next_time(t, parent, name, None, moment.now), null=True)
    _put_marker(t, bucket, parent, versions.entry_name(name, version), moment)
    tell(t, changed, parent, name, removed)
    return Deleted(found is not None, True, versions.outside(version))


def delete_version(
    t: Transaction,
    bucket: Bucket,
    key: bytes,
    version: str,
    check: Check,
    moment: Moment,
    changed: Changed,
    *,
    bypass: bool,
) -> Deleted:
    """Removes one version for good; if it is the current one, the newest of the others replaces it.

    `bypass`: a retention of mode GOVERNANCE does not hold. Raises Locked, what `check` raises.
    """
    parent, place = lookup.place_in(t, bucket, key)
    found = None
    if parent is not None:
        found = lookup.find_version(t, parent, place.name, key, version, moment.boot)
    check(found)
    if parent is None or found is None:
        return Deleted(False, False, version)
    _check_locks(found, bypass, moment.now)
    name = _entry_of(t, parent, place.name, found)
    entry = keys.file_entry(parent, name)
    t.delete(entry)
    removed = lose_link(t, found.ino, found.inode, (parent, name), moment.now, _keep)
    tell(t, changed, parent, name, removed)
    if found.latest:
        _promote(t, parent, place.name, moment, changed)
    touch(t, parent, read_inode(t, parent), moment.now)
    prune(t, parent, moment, changed)
    return Deleted(True, found.delete_marker, version)


def update(
    t: Transaction,
    found: Facts,
    metadata: Metadata,
    remove: Sequence[str],
    moment: Moment,
    changed: Changed,
) -> None:
    """Changes the metadata of a version that was found in this transaction. Raises TooLarge."""
    object_attributes.remove(t, found.ino, remove)
    object_attributes.add(t, found.ino, metadata)
    found.inode.ctime_ns = moment.now
    write_inode(t, found.ino, found.inode)
    changed.file(found.ino, found.inode)


def restate(
    t: Transaction, found: Facts, metadata: Metadata, moment: Moment, changed: Changed
) -> Facts:
    """Changes metadata and mtime as if the object were put anew with the same bytes."""
    object_attributes.remove(t, found.ino, found.metadata)
    found.inode.mtime_ns = moment.now
    update(t, found, metadata, (), moment, changed)
    packed = etags.packed(found.etag, found.inode)
    t.put(keys.xattr(found.ino, etags.ETAG), packed)
    if found.inode.parent:
        tell(t, changed, found.inode.parent, found.inode.name)
    return msgspec.structs.replace(found, metadata=dict(metadata))


def prune(t: Transaction, directory: int, moment: Moment, changed: Changed) -> None:
    """Removes the directory if it was made for keys and is empty, and likewise those above it.
    Raises `delegations.Delegated`."""
    for each in entries.prune(t, directory, moment.now, _keep):
        tell(t, changed, each.parent, each.name + b"/", each.removed)


def tell(
    t: Transaction, changed: Changed, parent: int, suffix: bytes, removed: Removed | None = None
) -> None:
    """Gathers the names of the mount that an added or removed entry may have changed."""
    for name in name_escaping.all_shown(t, parent, suffix):
        changed.name(parent, name, removed)
        removed = None
    if removed is not None:
        changed.name(parent, b"", removed)


def add_directory(
    t: Transaction, bucket: Bucket, parent: int, name: bytes, flags: int, moment: Moment
) -> int:
    """Makes a directory of any name, which must be free; returns its inode number. Raises
    `delegations.Delegated`."""
    check_unseen(t, parent)
    top = read_inode(t, bucket.root)
    ino = namespaces.allocate_inodes(t, bucket.id, 1)
    inode = _blank(stat.S_IFDIR | (top.mode & 0o777), top, parent, name, moment.now)
    inode.nlink, inode.flags = 2, Flag.PUBLISHED | flags
    t.put(keys.directory_entry(parent, name), keys.pack_u64(ino))
    touch(t, parent, read_inode(t, parent), moment.now, 1)
    write_inode(t, ino, inode)
    add_usage(t, bucket.id, 0, 1)
    return ino


def add_note(t: Transaction, bucket: Bucket, parent: int, name: bytes, moment: Moment) -> int:
    """Makes a file without data, to hold attributes; returns its inode number."""
    top = read_inode(t, bucket.root)
    ino = namespaces.allocate_inodes(t, bucket.id, 1)
    inode = _blank(lookup.MARKER_MODE, top, parent, name, moment.now)
    inode.flags = Flag.PUBLISHED
    t.put(keys.file_entry(parent, name), keys.pack_u64(ino))
    write_inode(t, ino, inode)
    add_usage(t, bucket.id, 0, 1)
    return ino


def _add_file(
    t: Transaction,
    bucket: Bucket,
    parent: int,
    name: bytes,
    new: New,
    moment: Moment,
    version: bytes | None = None,
) -> Inode:
    """Publishes a body under a name that is free; returns the record."""
    ino, packed = new.body.ino, keys.pack_u64(new.body.ino)
    top = read_inode(t, bucket.root)
    inode = _publish(t, bucket, top, new.body, parent, name, moment)
    xattrs = keys.XATTR + packed
    records = [
        (keys.ENTRY + keys.pack_u64(parent) + name, packed),
        (keys.UNSEALED + packed, t.node),
        (keys.INODE + packed, pack(inode)),
        (xattrs + etags.ETAG, etags.packed(new.etag, inode)),
    ]
    for attribute, value in object_attributes.packed(new.metadata).items():
        records.append((xattrs + attribute, value))
    if version is not None:
        records.append((xattrs + object_attributes.VERSION, version))
    t.put_all(records)
    if t.node:
        placements.hold(t, ino, inode.version)
    stamp(t, parent, top if parent == bucket.root else read_inode(t, parent), moment.now)
    return inode


def _make_directories(
    t: Transaction, bucket: Bucket, names: Sequence[bytes], moment: Moment, changed: Changed
) -> int:
    ino = bucket.root
    for name in names:
        value = t.get(keys.directory_entry(ino, name))
        if value is not None:
            ino = keys.unpack_u64(value)
            continue
        above, ino = ino, add_directory(t, bucket, ino, name, Flag.IMPLIED, moment)
        tell(t, changed, above, name + b"/")
    return ino


def _check_order(t: Transaction, bucket: Bucket, place: KeyPlace, body: WrittenData) -> None:
    """Checks the order: bodies are committed in another order than they were written in. Raises
    TooOld."""
    parent = lookup.descend(t, bucket.root, place.directories)
    if parent is None:
        return
    packed = t.get(keys.file_entry(parent, place.name))
    if packed is None:
        newest = next(lookup.noncurrent(t, parent, place.name), None)
        packed = None if newest is None else keys.pack_u64(newest[1])
    if packed is None:
        return
    before = read_inode(t, keys.unpack_u64(packed)).mtime_ns
    if body.mtime_ns < before:
        raise TooOld(before)


def _make_way(
    t: Transaction, parent: int, name: bytes, versioning: str, moment: Moment, changed: Changed
) -> tuple[Removed | None, bytes | None]:
    """Takes the current version away from its name; returns the removed one, and the id of the
    version that is to come (None: null)."""
    packed = t.get(keys.file_entry(parent, name))
    inode = None if packed is None else read_inode(t, keys.unpack_u64(packed))
    if inode is not None and not stat.S_ISREG(inode.mode):
        raise NotAnObject(f"{name.decode(errors='backslashreplace')} is no file")
    version = None if packed is None else t.get(keys.XATTR + packed + object_attributes.VERSION)
    if not versioning and version is None:
        return (None if packed is None else _unlink(t, parent, name, packed, moment)), None
    keeps = packed is not None and (version is not None or versioning == ENABLED)
    if (version is None and packed is not None) or versioning != ENABLED:
        _drop_null(t, parent, name, moment, changed)
    time_ns = _next_time(t, parent, name, version, moment.now)
    removed = None
    if packed is not None and keeps:
        aside = version or versions.make(time_ns - 1, null=True)
        _move(t, parent, name, versions.entry_name(name, aside), moment)
    elif packed is not None:
        removed = _unlink(t, parent, name, packed, moment)
    return removed, versions.make(time_ns, null=False) if versioning == ENABLED else None


def _unlink(t: Transaction, parent: int, name: bytes, packed: bytes, moment: Moment) -> Removed:
    ino = keys.unpack_u64(packed)
    t.delete(keys.file_entry(parent, name))
    return lose_link(t, ino, read_inode(t, ino), (parent, name), moment.now, _keep)


def _drop_current(
    t: Transaction,
    parent: int,
    name: bytes,
    found: tuple[int, Inode],
    moment: Moment,
    changed: Changed,
) -> None:
    t.delete(keys.ENTRY + keys.pack_u64(parent) + name)
    removed = lose_link(t, *found, (parent, name), moment.now, _keep)
    stamp(t, parent, read_inode(t, parent), moment.now)
    tell(t, changed, parent, name, removed)


def _drop_null(t: Transaction, parent: int, name: bytes, moment: Moment, changed: Changed) -> None:
    """Removes the version with the id null, if it is not the current one."""
    nulls = [each for each in lookup.noncurrent(t, parent, name) if versions.is_null(each[0])]
    for version, ino in nulls:
        aside = versions.entry_name(name, version)
        tell(t, changed, parent, aside, _unlink(t, parent, aside, keys.pack_u64(ino), moment))


def _next_time(t: Transaction, parent: int, name: bytes, version: bytes | None, now: int) -> int:
    """Returns the time in the id of a new version: later than those of all others."""
    newest = next(lookup.noncurrent(t, parent, name), None)
    times = [versions.time_of(each) for each in (version, newest and newest[0]) if each]
    return max([now, *(time_ns + 2 for time_ns in times)])


def _move(t: Transaction, parent: int, old: bytes, new: bytes, moment: Moment) -> None:
    packed = t.get(keys.file_entry(parent, old)) or b""
    t.delete(keys.file_entry(parent, old))
    t.put(keys.file_entry(parent, new), packed)
    ino = keys.unpack_u64(packed)
    relocate(t, ino, read_inode(t, ino), (parent, old), (parent, new), moment.now)


def _promote(t: Transaction, parent: int, name: bytes, moment: Moment, changed: Changed) -> None:
    """Makes the newest version the current one, if it is no delete marker, and the mount has
    nothing else there."""
    if t.get(keys.file_entry(parent, name)) is not None:
        return
    for version, ino in lookup.noncurrent(t, parent, name):
        if not lookup.is_marker(read_inode(t, ino)):
            _move(t, parent, versions.entry_name(name, version), name, moment)
            tell(t, changed, parent, name)
        return


def _put_marker(t: Transaction, bucket: Bucket, parent: int, name: bytes, moment: Moment) -> None:
    add_note(t, bucket, parent, name, moment)
    touch(t, parent, read_inode(t, parent), moment.now)


def _publish(
    t: Transaction,
    bucket: Bucket,
    top: Inode,
    body: WrittenData,
    parent: int,
    name: bytes,
    moment: Moment,
) -> Inode:
    """Returns the record of a new file, for the caller to write under its name; `top` is the
    bucket's directory. Users who may enter that may read or write the file, by its mode."""
    ino = body.ino
    mode = stat.S_IFREG | (top.mode & 0o666)
    if t.delete(keys.RESERVED + keys.pack_u64(ino)):
        inode = _blank(mode, top, parent, name, moment.now)
        inode.blocks = body.blocks
        add_usage(t, bucket.id, BLOCK * body.blocks, 1)
    elif t.delete(keys.orphan(ino)):
        inode = read_inode(t, ino)
        inode.parent, inode.name, inode.nlink = parent, name, 1
        inode.mode, inode.uid, inode.gid = mode, top.uid, top.gid
        set_blocks(t, ino, inode, body.blocks)
        t.delete(keys.unpublished(ino))
    else:
        raise Dropped
    inode.size, inode.mtime_ns = body.size, body.mtime_ns
    inode.ctime_ns = max(inode.ctime_ns, body.ctime_ns)
    inode.flags, inode.boot = Flag.PUBLISHED, 0 if body.synced else moment.boot
    return inode


def _blank(mode: int, top: Inode, parent: int, name: bytes, now: int) -> Inode:
    """Returns a record with one link, owned by the bucket's owner."""
    return Inode(
        mode=mode,
        uid=top.uid,
        gid=top.gid,
        nlink=1,
        atime_ns=now,
        mtime_ns=now,
        ctime_ns=now,
        btime_ns=now,
        parent=parent,
        name=name,
    )


def _entry_of(t: Transaction, parent: int, name: bytes, found: Facts) -> bytes:
    """Returns the name of the entry that a version was found under."""
    packed = t.get(keys.file_entry(parent, name))
    if packed is not None and found.latest and not found.delete_marker:
        return name
    for version, ino in lookup.noncurrent(t, parent, name):
        if ino == found.ino and versions.outside(version) == found.version:
            return versions.entry_name(name, version)
    return name


def _check_locks(found: Facts, bypass: bool, now: int) -> None:
    if found.metadata.get(attribute_validation.LEGAL_HOLD) == attribute_validation.HELD:
        raise Locked("a legal hold is on this version")
    retention = found.metadata.get(attribute_validation.RETENTION)
    if attribute_validation.is_retained(retention, now / 1_000_000_000, bypass=bypass):
        raise Locked(f"this version is retained: {retention} seconds since the epoch")


def _keep(_: int) -> bool:
    # An orphan first: a kill between the record's end and the data file's must not leak the latter.
    return True
