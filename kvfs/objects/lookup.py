"""Look-ups of objects and their records: reads only.

An object is a regular file that was published (see `tree.published_view`). The current version
stands under its own name, older ones and delete markers under names of their own beside it
(`versions`).
"""

import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_root, unpack_inode
from kvfs.objects import object_attributes, versions
from kvfs.objects.object_errors import NoSuchBucket, NoSuchKey, NoSuchVersion
from kvfs.objects.object_info import Facts
from kvfs.objects.object_keys import KeyPlace, check_key, place_of
from kvfs.tree import etags, namespaces, published_view
from kvfs.tree.inodes import read_inode
from kvfs.tree.name_escaping import NUL, is_odd, spelled
from kvfs.vfs.stage_records import NewFile

MARKER_MODE: Final = stat.S_IFCHR
"""The mode of a delete marker: a device without a number, as other file systems mark whiteouts."""


class Bucket(NamedTuple):
    """A namespace as objects see it."""

    id: int
    root: int
    """Its directory's inode number."""
    durable: bool
    etag: str = "md5"
    """The same as `meta.records.Namespace.etag`."""

    def new_file(self, size: int) -> NewFile:
        """Returns a file of so many bytes that is to be made in it. Until it has a key it is its
        node's alone; then the bucket's directory decides the permissions."""
        return NewFile(self.root, size, self.durable)


def find_bucket(t: Transaction, name: bytes) -> Bucket:
    """Raises NoSuchBucket."""
    value = t.get(keys.directory_entry(1, name)) if 0 < len(name) <= namespaces.MAX_NAME else None
    if value is None:
        shown = name.decode(errors="backslashreplace")
        raise NoSuchBucket(f"there is no bucket {shown}", shown)
    root = keys.unpack_u64(value)
    number = root >> 48
    return _bucket(t, number, root)


def bucket_of(t: Transaction, number: int) -> Bucket:
    """Returns the bucket with this namespace id. Raises NotFound."""
    return _bucket(t, number, namespace_root(number))


def _bucket(t: Transaction, number: int, root: int) -> Bucket:
    record = namespaces.get(t, number)
    return Bucket(number, root, record.kind != "cache", record.etag)


def descend(t: Transaction, root: int, directories: Sequence[bytes]) -> int | None:
    """Returns the directory at the end of this way; None if a part is missing."""
    ino = root
    for name in directories:
        value = t.get(keys.directory_entry(ino, name))
        if value is None:
            return None
        ino = keys.unpack_u64(value)
    return ino


def find(t: Transaction, bucket: Bucket, key: bytes, version: str, boot: int) -> Facts:
    """Returns one version; if `version` is empty the current one, which may be a delete marker.

    Raises NoSuchKey and NoSuchVersion (with their `at`), Invalid (no possible key).
    """
    check_key(key)
    place = place_of(key)
    parent = descend(t, bucket.root, place.directories)
    found = None
    if parent is not None:
        if version:
            found = find_version(t, parent, place.name, key, version, boot)
        else:
            found = find_current(t, parent, place.name, key, boot)
    if found is None:
        raise _missing(t, bucket, key, place, version)
    return found


def version_entry(bucket: Bucket, key: bytes, version: str) -> bytes:
    """Returns the entry by which a version that went is known (`NotFound.at`)."""
    return keys.file_entry(bucket.root, key + NUL + version.encode(errors="replace"))


def current_entry(facts: Facts) -> bytes:
    """Returns the entry of the current version that a delete marker stands for."""
    return keys.file_entry(facts.inode.parent, _shown(place_of(facts.key).name))


def _missing(
    t: Transaction, bucket: Bucket, key: bytes, place: KeyPlace, version: str
) -> NoSuchKey | NoSuchVersion:
    shown = key.decode(errors="backslashreplace")
    if version:
        other = NoSuchVersion(f"{shown}: there is no version {version}")
        other.at = version_entry(bucket, key, version)
        return other
    missing = NoSuchKey(f"there is no object {shown}")
    missing.at = _first_missing(t, bucket.root, place)
    return missing


def _first_missing(t: Transaction, root: int, place: KeyPlace) -> bytes:
    """Returns the first missing name that a mount would be asked for: the object's own, or a
    directory's."""
    ino = root
    for name in place.directories:
        value = t.get(keys.directory_entry(ino, name))
        if value is None:
            return keys.file_entry(ino, _shown(name))
        ino = keys.unpack_u64(value)
    return keys.file_entry(ino, _shown(place.name))


def _shown(name: bytes) -> bytes:
    """Returns the name as the mount shows it if nothing else stands beside it."""
    return spelled(name) if is_odd(name) else name


def find_many(
    t: Transaction, bucket: Bucket, wanted: Sequence[bytes], boot: int
) -> list[Facts | None]:
    """Returns the current version of each key; None if there is none, or a delete marker."""
    directories: dict[tuple[bytes, ...], int | None] = {}
    found: list[Facts | None] = []
    for key in wanted:
        check_key(key)
        place = place_of(key)
        if place.directories not in directories:
            directories[place.directories] = descend(t, bucket.root, place.directories)
        parent = directories[place.directories]
        found.append(None if parent is None else find_file(t, parent, place.name, key, boot))
    return found


def missing_entries(
    t: Transaction, bucket: Bucket, wanted: Sequence[bytes], boot: int
) -> list[bytes]:
    """Returns the entries of the first missing names of those keys that lead to no object
    (`NotFound.at`). Raises Invalid."""
    found = find_many(t, bucket, wanted, boot)
    return [
        _first_missing(t, bucket.root, place_of(key))
        for key, facts in zip(wanted, found, strict=True)
        if facts is None
    ]


def find_current(t: Transaction, parent: int, name: bytes, key: bytes, boot: int) -> Facts | None:
    """Returns the object, or the delete marker that stands for it; None: neither."""
    found = find_file(t, parent, name, key, boot)
    if found is not None or t.get(keys.file_entry(parent, name)) is not None:
        return found
    for version, ino in noncurrent(t, parent, name):
        inode = read_inode(t, ino)
        return facts(t, key, ino, inode, version, latest=True) if is_marker(inode) else None
    return None


def find_file(t: Transaction, parent: int, name: bytes, key: bytes, boot: int) -> Facts | None:
    """Returns the object under its own name."""
    found = object_at(t, parent, name, boot)
    return None if found is None else facts(t, key, *found, None, latest=True)


def object_at(t: Transaction, parent: int, name: bytes, boot: int) -> tuple[int, Inode] | None:
    """Returns number and record of the object under its own name."""
    value = t.get(keys.ENTRY + keys.pack_u64(parent) + name)
    record = None if value is None else t.get(keys.INODE + value)
    if value is None or record is None:
        return None
    ino, inode = int.from_bytes(value), unpack_inode(record)
    return (ino, inode) if is_object(t, ino, inode, boot) else None


def is_being_made(t: Transaction, parent: int, name: bytes) -> bool:
    """Returns whether a mount has a file of this name that was never closed: S3 cannot see it, but
    a process that made it with O_EXCL is to be the only one."""
    value = t.get(keys.file_entry(parent, name))
    record = None if value is None else t.get(keys.INODE + value)
    if record is None:
        return False
    inode = unpack_inode(record)
    return stat.S_ISREG(inode.mode) and not inode.flags & Flag.PUBLISHED


def find_version(
    t: Transaction, parent: int, name: bytes, key: bytes, version: str, boot: int
) -> Facts | None:
    """Returns the version with this id, whether or not it is the current one."""
    current = find_file(t, parent, name, key, boot)
    if current is not None and current.version == version:
        return current
    for found, ino in _matching(t, parent, name, version):
        inode = read_inode(t, ino)
        if is_marker(inode) or is_object(t, ino, inode, boot):
            first = next(noncurrent(t, parent, name))[0]
            latest = is_marker(inode) and found == first and current is None
            return facts(t, key, ino, inode, found, latest=latest)
    return None


def noncurrent(t: Transaction, parent: int, name: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields (id, inode number) of the versions and delete markers beside a name, newest first."""
    prefix = keys.file_entry(parent, name + NUL)
    for key, value in t.scan(prefix, prefix + b"\xff"):
        yield key[len(prefix) :], keys.unpack_u64(value)


def facts(
    t: Transaction, key: bytes, ino: int, inode: Inode, version: bytes | None, *, latest: bool
) -> Facts:
    """Returns the facts from a record that was read in this transaction; `version` is None for the
    current one, whose own attribute tells it."""
    raw = object_attributes.read_raw(t, ino)
    marker = is_marker(inode)
    version = raw.get(object_attributes.VERSION) if version is None else version
    etag, metadata = raw.get(etags.ETAG), object_attributes.split(raw)
    if etag is not None and not marker and not etags.is_content_as_given(etag, inode):
        metadata = object_attributes.of_other_content(metadata)
    return Facts(
        key,
        ino,
        inode,
        "" if marker else etags.etag_of(etag, ino, inode),
        metadata,
        versions.NULL if version is None else versions.outside(version),
        latest,
        marker,
    )


def is_object(t: Transaction, ino: int, inode: Inode, boot: int) -> bool:
    if not stat.S_ISREG(inode.mode):
        return False
    if inode.boot in (0, boot):
        return bool(inode.flags & Flag.PUBLISHED)
    return published_view.is_visible(t, ino, inode, boot)


def is_awaited(t: Transaction, facts: Facts) -> bool:
    """Returns whether the seal of a version is to give it another ETag, in a bucket of
    `MD5_ALL`."""
    if facts.delete_marker or facts.inode.flags & Flag.SEALED:
        return False
    return etags.is_awaited(t.get(keys.xattr(facts.ino, etags.ETAG)), facts.inode)


def is_marker(inode: Inode) -> bool:
    return stat.S_ISCHR(inode.mode)


def place_in(t: Transaction, bucket: Bucket, key: bytes) -> tuple[int | None, KeyPlace]:
    """Returns the directory of a key, and where it is in its bucket. Raises Invalid."""
    check_key(key)
    place = place_of(key)
    return descend(t, bucket.root, place.directories), place


def _matching(
    t: Transaction, parent: int, name: bytes, version: str
) -> Iterator[tuple[bytes, int]]:
    if version == versions.NULL:
        yield from (each for each in noncurrent(t, parent, name) if versions.is_null(each[0]))
        return
    raw = version.encode(errors="replace")
    if versions.is_valid(raw):
        value = t.get(keys.file_entry(parent, versions.entry_name(name, raw)))
        if value is not None:
            yield raw, keys.unpack_u64(value)
