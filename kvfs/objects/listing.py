"""Lists keys in the order of their bytes: a depth-first scan that seeks.

A directory's scan yields names in the order of the keys below them (see `object_keys`), so one scan
for each directory on the way to the present key, and no sorting. A new scan from there reaches the
start, and the key after a common prefix, so that the keys for which that stands are not read.

Invariant: a scan's directory has its prefix, the start of all its keys.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import unpack_inode
from kvfs.objects import lookup, object_attributes, versions
from kvfs.objects.lookup import Bucket
from kvfs.objects.object_info import Facts
from kvfs.objects.object_keys import MAX_KEY, joined, place_of
from kvfs.tree import etags
from kvfs.tree.inodes import read_inode
from kvfs.tree.name_escaping import NUL, is_continuation
from kvfs.tree.namespace_policies import MD5_ALL

_BATCH: Final = 256
NOTHING: Final[Mapping[int, str]] = MappingProxyType({})
_END: Final = b"\xff"
"""A byte string after every byte of an id."""


class ListedObject(NamedTuple):
    """An object in a list."""

    key: bytes
    ino: int
    size: int
    mtime_ns: int
    etag: str


class ListingPage(NamedTuple):
    """A part of a list. Objects and common prefixes are each in order; `following` is the point to
    go on after (`start_after`), empty at the end. `awaited` are those whose ETags are not final
    (inode numbers, and the present ETags: `seals`)."""

    objects: list[ListedObject]
    prefixes: list[bytes]
    following: bytes
    awaited: Mapping[int, str] = NOTHING

    @property
    def truncated(self) -> bool:
        return bool(self.following)


class VersionPage(NamedTuple):
    """Like `ListingPage`; the point to go on after is a key and, if not empty, the id of one of its
    versions."""

    versions: list[Facts]
    prefixes: list[bytes]
    following: bytes
    following_version: str
    truncated: bool
    awaited: Mapping[int, str] = NOTHING


class _Frame(NamedTuple):
    """A directory that is being scanned."""

    ino: int
    prefix: bytes
    scan: Iterator[tuple[bytes, bytes]]


class Walk:
    """Entries of a bucket that are not directories, as (directory, start of its keys, name, inode
    number packed), in order."""

    def __init__(self, t: Transaction, bucket: Bucket) -> None:
        self._t = t
        self._root = bucket.root
        self._frames: list[_Frame] = []

    def start(self, key: bytes, extra: bytes = b"") -> None:
        """Goes on with the first entry that is not before this one; `extra` follows the name of the
        key's file."""
        self._frames = []
        place = place_of(key)
        ino, prefix = self._root, b""
        for name in place.directories:
            suffix = name + b"/"
            self._push(ino, prefix, suffix + NUL)
            value = self._t.get(keys.entries(ino) + suffix)
            if value is None:
                return
            ino, prefix = keys.unpack_u64(value), joined(prefix, suffix)
        self._push(ino, prefix, place.name + extra)

    def skip(self, prefix: bytes) -> None:
        """Goes on after all keys that start so; the present one must."""
        while self._frames and self._frames[-1].prefix.startswith(prefix):
            self._frames.pop()
        if not self._frames:
            return
        frame = self._frames.pop()
        self._push(frame.ino, frame.prefix, keys.after(prefix[len(frame.prefix) :]))

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes, bytes]]:
        while self._frames:
            ino, prefix, scan = self._frames[-1]
            pair = next(scan, None)
            if pair is None:
                self._frames.pop()
                continue
            suffix = pair[0][9:]
            if suffix[-1:] != b"/":
                yield ino, prefix, suffix, pair[1]
            elif NUL not in suffix or is_continuation(suffix):
                self._push(keys.unpack_u64(pair[1]), joined(prefix, suffix), b"")

    def _push(self, ino: int, prefix: bytes, start: bytes) -> None:
        above = keys.entries(ino)
        self._frames.append(_Frame(ino, prefix, self._t.scan(above + start, keys.after(above))))


def list_objects(
    t: Transaction,
    bucket: Bucket,
    *,
    prefix: bytes = b"",
    delimiter: bytes = b"",
    start_after: bytes = b"",
    max_keys: int = 1000,
    boot: int,
) -> ListingPage:
    """Returns keys that start with `prefix`, and the common prefixes that end with the first
    `delimiter` after it, all greater than `start_after`, up to `max_keys` together."""
    found = _Gathered(t, prefix, delimiter, start_after, max_keys, boot)
    found.seals_give_md5 = bucket.etag == MD5_ALL
    if max_keys > 0:
        found.gather(bucket)
    return found.page()


class _Gathered:
    """Gathers one more than the page holds, to know whether there is more."""

    def __init__(
        self,
        t: Transaction,
        prefix: bytes,
        delimiter: bytes,
        start_after: bytes,
        limit: int,
        boot: int,
    ) -> None:
        self._t = t
        self._prefix = prefix
        self._delimiter = delimiter
        self._start_after = start_after
        self._limit = limit
        self._boot = boot
        self._found: list[ListedObject | bytes] = []
        self._pending: list[tuple[bytes, bytes]] = []
        self.seals_give_md5 = False
        self._awaited: set[int] = set()

    def gather(self, bucket: Bucket) -> None:
        walk = Walk(self._t, bucket)
        if self._start_after < self._prefix:
            walk.start(self._prefix)
        else:
            walk.start(self._start_after, NUL)
        prefix, delimiter = self._prefix, self._delimiter
        room = min(self._limit + 1, _BATCH)
        pending = self._pending
        for _, above, name, packed in walk:
            key = above + name
            if not key.startswith(prefix):
                break
            if NUL in name or not is_listable(key):
                continue
            at = key.find(delimiter, len(prefix)) if delimiter else -1
            if at < 0:
                pending.append((key, packed))
                if len(pending) < room:
                    continue
            elif self._flush():
                self._add_prefix(walk, key[: at + len(delimiter)], packed)
            if not self._flush():
                return
            room = min(self._limit + 1 - len(self._found), _BATCH)
        self._flush()

    def page(self) -> ListingPage:
        found = self._found[: self._limit] if self._limit > 0 else []
        following = b""
        if found and len(self._found) > self._limit:
            last = found[-1]
            following = last if isinstance(last, bytes) else last.key
        objects = [each for each in found if not isinstance(each, bytes)]
        return ListingPage(
            objects,
            [each for each in found if isinstance(each, bytes)],
            following,
            {each.ino: each.etag for each in objects if each.ino in self._awaited}
            if self._awaited
            else NOTHING,
        )

    def _add_prefix(self, walk: Walk, common: bytes, packed: bytes) -> None:
        """Adds a common prefix if any object is below it, which this one may show."""
        if common <= self._start_after:
            walk.skip(common)
            return
        record = self._t.get(keys.INODE + packed)
        ino = keys.unpack_u64(packed)
        if record is not None and lookup.is_object(self._t, ino, unpack_inode(record), self._boot):
            self._found.append(common)
            walk.skip(common)

    def _flush(self) -> bool:
        """Takes over pending entries; returns whether more is wanted."""
        pending = self._pending
        if pending:
            records = self._t.get_many([keys.INODE + packed for _, packed in pending])
            kept = self._t.get_many([keys.XATTR + packed + etags.ETAG for _, packed in pending])
            for (key, packed), record, etag in zip(pending, records, kept, strict=True):
                if record is None:
                    continue
                inode = unpack_inode(record)
                ino = keys.unpack_u64(packed)
                if lookup.is_object(self._t, ino, inode, self._boot):
                    tag = etags.etag_of(etag, ino, inode)
                    if self.seals_give_md5 and etags.is_awaited(etag, inode):
                        self._awaited.add(ino)
                    self._found.append(ListedObject(key, ino, inode.size, inode.mtime_ns, tag))
            pending.clear()
        return len(self._found) <= self._limit


def list_versions(
    t: Transaction,
    bucket: Bucket,
    *,
    prefix: bytes = b"",
    delimiter: bytes = b"",
    start_after: bytes = b"",
    start_version: str = "",
    max_keys: int = 1000,
    boot: int,
) -> VersionPage:
    """Like `list_objects`, for all versions and delete markers, those of a key newest first. The
    entries after `start_version` are listed even if that has been deleted meanwhile."""
    found: list[Facts | bytes] = []
    walk = Walk(t, bucket)
    last = b""
    if start_after < prefix or not start_after:
        walk.start(prefix)
    else:
        extra, has_newer = _after_version(t, bucket, start_after, start_version, boot)
        walk.start(start_after, extra)
        last = start_after if has_newer else b""
    for _, above, name, packed in walk if max_keys > 0 else ():
        stem, _, version = name.partition(NUL)
        key = above + stem
        if not key.startswith(prefix):
            break
        ino = keys.unpack_u64(packed)
        inode = read_inode(t, ino)
        if not is_listable(key) or not (
            lookup.is_object(t, ino, inode, boot) or (version and lookup.is_marker(inode))
        ):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        if at >= 0:
            common = key[: at + len(delimiter)]
            if common > start_after:
                found.append(common)
            walk.skip(common)
        else:
            ino = keys.unpack_u64(packed)
            latest = not version or (lookup.is_marker(inode) and key != last)
            found.append(lookup.facts(t, key, ino, inode, version or None, latest=latest))
            last = key
        if len(found) > max_keys:
            break
    page = _version_page(found, max_keys)
    if bucket.etag != MD5_ALL:
        return page
    return page._replace(
        awaited={each.ino: each.etag for each in page.versions if lookup.is_awaited(t, each)}
    )


def is_listable(key: bytes) -> bool:
    """Returns whether it can be a key: a mount may make names that are not UTF-8, or longer
    paths."""
    if len(key) > MAX_KEY:
        return False
    if key.isascii():
        return True
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def _after_version(
    t: Transaction, bucket: Bucket, key: bytes, version: str, boot: int
) -> tuple[bytes, bool]:
    """Returns the rest of a key's name in the first entry after one of its versions, or after all;
    and whether the key has newer ones, which stand before."""
    parent, place = lookup.place_in(t, bucket, key)
    if parent is None or not version:
        return NUL + _END, False
    current = lookup.find_file(t, parent, place.name, key, boot)
    if current is not None and current.version == version:
        return NUL, True
    raw = version.encode(errors="replace")
    if version == versions.NULL:
        beside = lookup.noncurrent(t, parent, place.name)
        raw = next((each for each, _ in beside if versions.is_null(each)), b"")
        if not raw:  # where it stood nobody knows: rather some again than one left out
            return b"", False
    if current is not None:
        older = _is_older(t, current, raw)  # it is the current one since others were deleted
        return b"" if older else NUL + raw + NUL, not older
    newest = next(lookup.noncurrent(t, parent, place.name), None)
    return NUL + raw + NUL, newest is not None and newest[0] <= raw


def _is_older(t: Transaction, current: Facts, version: bytes) -> bool:
    """Returns whether the current version of a key is older than the one with this id."""
    own = t.get(keys.xattr(current.ino, object_attributes.VERSION))
    if own is not None:
        return own > version
    return versions.is_valid(version) and current.mtime_ns < versions.time_of(version)


def _version_page(found: list[Facts | bytes], limit: int) -> VersionPage:
    kept = found[:limit] if limit > 0 else []
    truncated = bool(kept) and len(found) > limit
    following, version = b"", ""
    if truncated:
        last = kept[-1]
        following = last if isinstance(last, bytes) else last.key
        version = "" if isinstance(last, bytes) else last.version
    return VersionPage(
        [each for each in kept if not isinstance(each, bytes)],
        [each for each in kept if isinstance(each, bytes)],
        following,
        version,
        truncated,
    )
