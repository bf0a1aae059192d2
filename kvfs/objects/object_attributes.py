"""The attributes of an object beside its bytes, as extended attributes of its file.

| name | attribute | value |
|---|---|---|
| `content-type`, `cache-control`, ... (standard headers) | `user.s3.NAME` | the header's |
| `meta.NAME` (user metadata) | `user.s3.meta.NAME` | the header's |
| `checksum.crc32`, ..., `checksum.type` | `user.s3.checksum.crc32` | base64 |
| `tagging` | `user.s3.tagging` | the caller's encoding |
| (ETag) | `user.s3.etag` | see `tree.etags` |
| `retention` | `trusted.s3.retention` | mode, end in seconds since the epoch |
| `legal-hold` | `trusted.s3.legal-hold` | `ON` |
| `acl`, `owner`, `storage`, `encryption`, `parts` | `trusted.s3.NAME` | the caller's encoding |
| (version) | `trusted.s3.version` | the id of the current version (`versions`); none: null |

Only root can set `trusted.` ones, so that no user of the mount fakes them (`attribute_guard` has
the mount's rules, `attribute_validation` tells which count). Names are text of at most 240 bytes,
values text of at most 64 KiB, and so are all `user.` ones together, except the checksums of parts,
which S3 bounds.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Final

from kvfs.base.errors import TooLarge
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.objects import attribute_validation
from kvfs.tree.etags import ETAG
from kvfs.tree.inodes import MAX_XATTR_VALUE, MAX_XATTRS

Metadata = Mapping[str, str]
VERSION: Final = b"trusted.s3.version"
_USER: Final = b"user.s3."
_TRUSTED: Final = b"trusted.s3."
_PROTECTED: Final = frozenset(
    ("retention", "legal-hold", "acl", "owner", "storage", "encryption", "parts")
)
_OF_PARTS: Final = b"user.s3.part-checksums"
_MAX_NAME: Final = 240
_REMEMBERED: Final = 512
_PREFIX: Final = 9
"""The offset of the name in an attribute's key: `x` and the inode come before."""


def read(t: Transaction, ino: int) -> dict[str, str]:
    """Returns the attributes of an object, except its ETag and version."""
    return split(read_raw(t, ino))


def read_raw(t: Transaction, ino: int) -> dict[bytes, bytes]:
    """Returns all attributes kept here, ETag and version too, by their names; one scan."""
    prefix = keys.xattrs(ino)
    return {
        key[_PREFIX:]: value
        for key, value in t.scan(prefix + b"trusted.s3.", prefix + b"user.s3/")
        if key.startswith((_USER, _TRUSTED), _PREFIX)
    }


def split(raw: Mapping[bytes, bytes]) -> dict[str, str]:
    """Returns the attributes by the callers' names. A malformed one does not count, but locks hold
    all the same."""
    said = {}
    for attribute, packed in raw.items():
        name = name_of(attribute)
        if name is None or attribute in (ETAG, VERSION):
            continue
        value = attribute_validation.believed(name, packed.decode(errors="surrogateescape"))
        if value is not None:
            said[name] = value
    return said


@functools.lru_cache(_REMEMBERED)
def name_of(attribute: bytes) -> str | None:
    """Returns the callers' name; None for an attribute in the wrong class, where nothing is kept: a
    user of the mount must not lift a protection."""
    start = _TRUSTED if attribute.startswith(_TRUSTED) else _USER
    name = attribute[len(start) :].decode(errors="surrogateescape")
    protected = name in _PROTECTED or attribute == VERSION
    return name if protected is (start is _TRUSTED) else None


def write(t: Transaction, ino: int, metadata: Metadata) -> None:
    """Writes the metadata of an object that has none yet. Raises TooLarge."""
    start = keys.xattrs(ino)
    t.put_all([(start + name, value) for name, value in packed(metadata).items()])


def add(t: Transaction, ino: int, metadata: Metadata) -> None:
    """Adds or replaces metadata. Raises TooLarge."""
    added, before = packed(metadata), read_raw(t, ino)
    after = _size({**before, **added})
    if after > _size(before):
        _require_room(after)
    for name, value in added.items():
        t.put(keys.xattr(ino, name), value)


def remove(t: Transaction, ino: int, names: Iterable[str]) -> None:
    for name in names:
        t.delete(keys.xattr(ino, attribute(name)))


def remove_all(t: Transaction, ino: int) -> None:
    """Removes all attributes of an object, ETag and version too."""
    for name in read_raw(t, ino):
        t.delete(keys.xattr(ino, name))


@functools.lru_cache(_REMEMBERED)
def attribute(name: str) -> bytes:
    """Returns the name of the attribute. Raises TooLarge."""
    raw = name.encode(errors="surrogateescape")
    if not 0 < len(raw) <= _MAX_NAME:
        raise TooLarge(f"a name of metadata has 1 to {_MAX_NAME} bytes, not {len(raw)}")
    return (_TRUSTED if name in _PROTECTED else _USER) + raw


def of_other_content(metadata: Metadata) -> dict[str, str]:
    """Returns the attributes that are still true of an object that was written to on the mount: all
    but those computed from its old content."""
    return {
        name: value
        for name, value in metadata.items()
        if name != "parts" and not name.startswith("checksum.")
    }


def packed(metadata: Metadata) -> dict[bytes, bytes]:
    """Returns attributes as they are kept, by their names. Raises TooLarge: one of them, or all
    together."""
    found = {}
    for name, text in metadata.items():
        found[attribute(name)] = value = text.encode(errors="surrogateescape")
        if len(value) > MAX_XATTR_VALUE:
            raise TooLarge(f"{name}: a value has at most {MAX_XATTR_VALUE} bytes, not {len(value)}")
    if sum(map(len, found)) + sum(map(len, found.values())) + len(found) > MAX_XATTRS:
        _require_room(_size(found))
    return found


def _size(those: Mapping[bytes, bytes]) -> int:
    """Returns the bytes that count, as the mount counts them (`inodes.set_xattr`)."""
    return sum(
        len(name) + 1 + len(value)
        for name, value in those.items()
        if name.startswith(_USER) and not name.startswith(_OF_PARTS)
    )


def _require_room(size: int) -> None:
    if size > MAX_XATTRS:
        raise TooLarge(f"all metadata of an object have at most {MAX_XATTRS} bytes, not {size}")
