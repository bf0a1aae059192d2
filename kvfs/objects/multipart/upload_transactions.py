"""Uploads in parts. No I/O here.

An upload is a directory in the bucket's `object_keys.UPLOADS`, named by its id; in it are its
parts, as files named by their numbers. The attributes of the object that they are to become are
kept as attributes of the directory.

| step | left by a kill after it |
|---|---|
| created | the upload: it can go on, or be aborted |
| part: as a put, into the directory | the part |
| part, received into its place in a file of many: see `part_slots` | the part |
| complete: the object's data assembled in a draft | the upload, a draft (handled as any other) |
| complete: one transaction puts the object, removes the parts and notes the result | the object |

The note of a completed upload stays for an hour, so that completing it again gives the same
answer.
"""

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvfs.base.errors import Invalid
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Inode
from kvfs.objects import lookup, mutations, object_attributes
from kvfs.objects.lookup import Bucket
from kvfs.objects.multipart import part_assembly
from kvfs.objects.multipart.part_assembly import PartBytes
from kvfs.objects.mutations import Moment, New
from kvfs.objects.object_attributes import Metadata
from kvfs.objects.object_errors import InvalidPart, NoSuchUpload, PartOrder, PartTooSmall
from kvfs.objects.object_info import Facts
from kvfs.objects.object_keys import COMPLETED, UPLOADS, check_key
from kvfs.tree import etags
from kvfs.tree.entries import lose_link, touch
from kvfs.tree.inodes import drop_inode, read_inode
from kvfs.vfs.post_commit import Changed

MAX_PARTS: Final = 10_000
MIN_PART_BYTES: Final = 5 << 20
_KEY: Final = b"trusted.s3.upload-key"
_RESULT: Final = b"trusted.s3.upload-result"
_KEPT_NS: Final = 3_600_000_000_000
_SWEPT: Final = 8
_ID_BYTES: Final = 40


class Upload(NamedTuple):
    """An upload that was begun."""

    id: str
    key: bytes
    begun_ns: int
    metadata: dict[str, str]
    directory: int
    """The inode number of its directory."""


class UploadPart(NamedTuple):
    """A part of an upload."""

    number: int
    ino: int
    inode: Inode
    etag: str
    metadata: dict[str, str]
    place: PartBytes

    @property
    def size(self) -> int:
        return self.inode.size

    @property
    def version(self) -> int:
        """The version of its data file."""
        return self.inode.version


class CompletedPart(NamedTuple):
    """A part as the completing client names it."""

    number: int
    etag: str
    """The ETag without quotes."""
    checksum: tuple[str, str] | None = None
    """Name (of `object_attributes`) and value that the part must have been given."""


class UploadPage(NamedTuple):
    """A part of a list of uploads: the point to go on after is a key and an id."""

    uploads: list[Upload]
    prefixes: list[bytes]
    following: bytes
    following_id: str
    truncated: bool


def create(
    t: Transaction, bucket: Bucket, key: bytes, metadata: Metadata, moment: Moment
) -> Upload:
    """Begins an upload. Raises Invalid (no possible key), TooLarge."""
    check_key(key)
    _sweep(t, bucket, moment)
    above = _directory(t, bucket, UPLOADS, moment)
    name = b"%016x%s" % (moment.now, os.urandom(12).hex().encode())
    ino = mutations.add_directory(t, bucket, above, name, 0, moment)
    t.put(keys.xattr(ino, _KEY), key)
    object_attributes.write(t, ino, metadata)
    return Upload(name.decode(), key, moment.now, dict(metadata), ino)


def find(t: Transaction, bucket: Bucket, key: bytes, upload_id: str) -> Upload:
    """Raises NoSuchUpload."""
    name = upload_id.encode(errors="replace")
    above = t.get(keys.directory_entry(bucket.root, UPLOADS))
    value = None
    if above is not None and len(name) == _ID_BYTES and b"/" not in name:
        value = t.get(keys.directory_entry(keys.unpack_u64(above), name))
    if value is None:
        raise _missing(upload_id)
    found = _upload(t, name, keys.unpack_u64(value))
    if found.key != key:
        raise _missing(upload_id)
    return found


def put_part(
    t: Transaction,
    bucket: Bucket,
    upload: Upload,
    number: int,
    new: New,
    moment: Moment,
    changed: Changed,
) -> UploadPart:
    """Puts a part, over one of the same number. Raises NoSuchUpload, Invalid, Dropped."""
    check_number(number)
    find(t, bucket, upload.key, upload.id)
    name = part_name(number)
    inode = mutations.put_file(t, bucket, upload.directory, name, new, moment, changed)
    ino = new.body.ino
    return UploadPart(number, ino, inode, new.etag, dict(new.metadata), PartBytes(ino, 0))


def put_part_in_place(
    t: Transaction,
    bucket: Bucket,
    upload: Upload,
    number: int,
    place: PartBytes,
    size: int,
    etag: str,
    metadata: Metadata,
    moment: Moment,
    changed: Changed,
    *,
    synced: bool,
) -> UploadPart:
    """Puts a part whose bytes are in an assembly. Raises NoSuchUpload, InvalidPart (the assembly
    was evicted)."""
    directory, name = find(t, bucket, upload.key, upload.id).directory, part_name(number)
    if place.data not in part_assembly.find(t, directory).values():
        raise InvalidPart("the upload's data were evicted")
    mutations.remove_file(t, directory, name, moment, changed)
    ino, inode = part_assembly.add_part(
        t, bucket, directory, name, place, size, moment, synced=synced
    )
    t.put(keys.xattr(ino, etags.ETAG), etags.packed(etag, inode))
    object_attributes.write(t, ino, metadata)
    return UploadPart(number, ino, inode, etag, dict(metadata), place)


def list_parts(
    t: Transaction, upload: Upload, after: int, limit: int, boot: int
) -> tuple[list[UploadPart], bool]:
    """Returns up to `limit` parts with numbers greater than `after`, and whether there are more."""
    prefix = keys.entries(upload.directory)
    found: list[UploadPart] = []
    if limit <= 0:
        return found, False
    assemblies = frozenset(part_assembly.find(t, upload.directory).values())
    for key, value in t.scan(prefix + part_name(after + 1), keys.after(prefix)):
        part = _part(t, int(key[len(prefix) :]), keys.unpack_u64(value), assemblies, boot)
        if part is None:
            continue
        if len(found) == limit:
            return found, True
        found.append(part)
    return found, False


def part_name(number: int) -> bytes:
    """Returns the name of a part in the upload's directory."""
    return b"%05d" % number


def _part(
    t: Transaction, number: int, ino: int, assemblies: frozenset[int], boot: int
) -> UploadPart | None:
    """Returns a part; None if its data are gone."""
    inode, raw = read_inode(t, ino), object_attributes.read_raw(t, ino)
    place = part_assembly.take_place(raw)
    if place is None and not lookup.is_object(t, ino, inode, boot):
        return None
    if place is not None and not (place.data in assemblies and _is_kept(t, place, inode, boot)):
        return None
    etag = etags.etag_of(raw.get(etags.ETAG), ino, inode)
    return UploadPart(
        number, ino, inode, etag, object_attributes.split(raw), place or PartBytes(ino, 0)
    )


def _is_kept(t: Transaction, place: PartBytes, inode: Inode, boot: int) -> bool:
    """Returns whether the bytes of a part in an assembly survived the last power cut, if there was
    one: for those of another node, that node knows, as with files (`published_view.is_visible`)."""
    if inode.boot in (0, boot):
        return True
    return bool(t.node) and t.get(keys.unsealed(place.data)) not in (None, t.node)


def choose_parts(
    t: Transaction, upload: Upload, wanted: Sequence[CompletedPart], boot: int
) -> list[UploadPart]:
    """Returns the parts to assemble; if a part is named again the last naming counts, as if it were
    sent again. Raises PartOrder, InvalidPart, PartTooSmall."""
    if not wanted:
        raise Invalid("an upload is completed with at least one part")
    if any(one.number > other.number for one, other in itertools.pairwise(wanted)):
        raise PartOrder("the parts are not in ascending order")
    there = {each.number: each for each in list_parts(t, upload, 0, MAX_PARTS, boot)[0]}
    last = {each.number: each for each in wanted}
    chosen = [_choose(there.get(number), each) for number, each in last.items()]
    for part in chosen[:-1]:
        if part.size < MIN_PART_BYTES:
            message = f"part {part.number} has {part.size} bytes, less than 5 MiB"
            raise PartTooSmall(message, part.number, part.etag, part.size)
    return chosen


def check_unchanged(
    t: Transaction, bucket: Bucket, upload: Upload, parts: Sequence[UploadPart], boot: int
) -> None:
    """Raises NoSuchUpload, InvalidPart (a part was replaced since it was chosen)."""
    find(t, bucket, upload.key, upload.id)
    there = {each.number: each.ino for each in list_parts(t, upload, 0, MAX_PARTS, boot)[0]}
    for part in parts:
        if there.get(part.number) != part.ino:
            raise InvalidPart(f"part {part.number} was changed while the upload was completed")


def complete(
    t: Transaction,
    bucket: Bucket,
    upload: Upload,
    result: Facts,
    moment: Moment,
    changed: Changed,
) -> None:
    """Removes an upload whose object was put in this transaction, and notes that."""
    _remove(t, bucket, upload, moment, changed)
    above = _directory(t, bucket, COMPLETED, moment)
    ino = mutations.add_note(t, bucket, above, upload.id.encode(), moment)
    t.put(keys.xattr(ino, _KEY), upload.key)
    t.put(keys.xattr(ino, _RESULT), f"{result.etag} {result.version}".encode())


def completed(t: Transaction, bucket: Bucket, key: bytes, upload_id: str) -> tuple[str, str] | None:
    """Returns (ETag, version) that completing this upload gave, within the last hour."""
    above = t.get(keys.directory_entry(bucket.root, COMPLETED))
    name = upload_id.encode(errors="replace")
    if above is None or len(name) != _ID_BYTES or b"/" in name:
        return None
    value = t.get(keys.file_entry(keys.unpack_u64(above), name))
    if value is None or t.get(keys.XATTR + value + _KEY) != key:
        return None
    etag, _, version = (t.get(keys.XATTR + value + _RESULT) or b"").decode().partition(" ")
    return etag, version


def abort(
    t: Transaction, bucket: Bucket, key: bytes, upload_id: str, moment: Moment, changed: Changed
) -> None:
    """Removes an upload with its parts. Raises NoSuchUpload."""
    _remove(t, bucket, find(t, bucket, key, upload_id), moment, changed)


def list_all(
    t: Transaction,
    bucket: Bucket,
    *,
    prefix: bytes = b"",
    delimiter: bytes = b"",
    start_after: bytes = b"",
    start_id: str = "",
    max_uploads: int = 1000,
) -> UploadPage:
    """Returns uploads in the order of their keys, then of their beginning; after (`start_after`,
    `start_id`); without an id the whole key is left out. Reads all uploads of the bucket."""
    found: list[tuple[bytes, str, Upload | None]] = []
    common: set[bytes] = set()
    for upload in _uploads(t, bucket):
        key = upload.key
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        if at >= 0:
            common.add(key[: at + len(delimiter)])
        elif key > start_after or (start_id and key == start_after and upload.id > start_id):
            found.append((key, upload.id, upload))
    found += [(each, "", None) for each in common if each > start_after]
    found.sort(key=lambda each: each[:2])
    kept = found[: max(max_uploads, 0)]
    truncated = bool(kept) and len(found) > max_uploads
    return UploadPage(
        [each for _, _, each in kept if each is not None],
        [key for key, _, each in kept if each is None],
        kept[-1][0] if truncated else b"",
        kept[-1][1] if truncated else "",
        truncated,
    )


def check_number(number: int) -> None:
    """Raises Invalid."""
    if not 1 <= number <= MAX_PARTS:
        raise Invalid(f"the number of a part is 1 to {MAX_PARTS}, not {number}")


def notes(t: Transaction, directory: int) -> list[tuple[bytes, int]]:
    """Returns (name, inode number) of the results of completed uploads, the oldest upload first."""
    prefix = keys.entries(directory)
    return [
        (key[len(prefix) :], keys.unpack_u64(value))
        for key, value in t.scan(prefix, keys.after(prefix))
    ]


def remove_note(t: Transaction, directory: int, name: bytes, ino: int) -> None:
    """Removes a note, at once, since only this module sees it."""
    t.delete(keys.file_entry(directory, name))
    drop_inode(t, ino, read_inode(t, ino))


def _choose(part: UploadPart | None, wanted: CompletedPart) -> UploadPart:
    if part is None:
        raise InvalidPart(f"there is no part {wanted.number}", wanted.number, wanted.etag)
    if part.etag != wanted.etag:
        message = f"the ETag of part {part.number} is {part.etag}, not {wanted.etag}"
        raise InvalidPart(message, wanted.number, wanted.etag)
    if wanted.checksum is not None:
        name, value = wanted.checksum
        if part.metadata.get(name) != value:
            message = f"the {name} of part {part.number} is another one"
            raise InvalidPart(message, wanted.number, wanted.etag)
    return part


def _uploads(t: Transaction, bucket: Bucket) -> Iterator[Upload]:
    above = t.get(keys.directory_entry(bucket.root, UPLOADS))
    if above is None:
        return
    prefix = keys.ENTRY + above
    for key, value in t.scan(prefix, keys.after(prefix)):
        yield _upload(t, key[len(prefix) : -1], keys.unpack_u64(value))


def _upload(t: Transaction, name: bytes, ino: int) -> Upload:
    raw = object_attributes.read_raw(t, ino)
    key = raw.pop(_KEY, b"")
    return Upload(name.decode(), key, int(name[:16], 16), object_attributes.split(raw), ino)


def _directory(t: Transaction, bucket: Bucket, name: bytes, moment: Moment) -> int:
    value = t.get(keys.directory_entry(bucket.root, name))
    if value is not None:
        return keys.unpack_u64(value)
    return mutations.add_directory(t, bucket, bucket.root, name, 0, moment)


def _remove(
    t: Transaction, bucket: Bucket, upload: Upload, moment: Moment, changed: Changed
) -> None:
    directory = upload.directory
    prefix = keys.entries(directory)
    for key, value in list(t.scan(prefix, keys.after(prefix))):
        ino, name = keys.unpack_u64(value), key[len(prefix) :]
        t.delete(key)
        inode = read_inode(t, ino)
        if part_assembly.is_place(inode):
            drop_inode(t, ino, inode)  # it has no data, and nobody holds it
            continue
        removed = lose_link(t, ino, inode, (directory, name), moment.now, lambda _: True)
        mutations.tell(t, changed, directory, name, removed)
    above = keys.unpack_u64(t.get(keys.directory_entry(bucket.root, UPLOADS)) or b"")
    name = upload.id.encode()
    t.delete(keys.directory_entry(above, name))
    drop_inode(t, directory, read_inode(t, directory))
    touch(t, above, read_inode(t, above), moment.now, -1)
    _remove_if_empty(t, bucket, above, moment)


def _remove_if_empty(t: Transaction, bucket: Bucket, above: int, moment: Moment) -> None:
    """Removes a directory that no mount shows, so that nobody holds it."""
    if next(t.scan(keys.entries(above), keys.after(keys.entries(above))), None) is None:
        t.delete(keys.directory_entry(bucket.root, UPLOADS))
        drop_inode(t, above, read_inode(t, above))
        touch(t, bucket.root, read_inode(t, bucket.root), moment.now, -1)


def _sweep(t: Transaction, bucket: Bucket, moment: Moment) -> None:
    """Removes a few notes that are older than anyone asks for."""
    above = t.get(keys.directory_entry(bucket.root, COMPLETED))
    if above is None:
        return
    directory = keys.unpack_u64(above)
    for name, ino in notes(t, directory)[:_SWEPT]:
        if read_inode(t, ino).ctime_ns + _KEPT_NS < moment.now:
            remove_note(t, directory, name, ino)


def _missing(upload_id: str) -> NoSuchUpload:
    return NoSuchUpload(
        f"there is no upload {upload_id}: it was completed or aborted, or never was"
    )
