"""The ETag of a file, as S3 shows it: kept beside the record, or computed from it.

It is kept as an extended attribute (`user.s3.etag`: ETag, size, mtime in ns) and holds while file
and record agree on size and mtime. A file without one, since a mount wrote it, has one computed
from its number, size and mtime, which takes no time and which no client takes for an MD5.

| a namespace's `etag` | bodies that come by S3 | files of the mount and of clients |
|---|---|---|
| fast | a fast hash of the content, large ones | computed |
| md5 | MD5 | computed |
| md5-all | MD5 | MD5, by the sealer |

In the last a file that is not sealed yet has no final ETag (`sealed_etags`).
"""

from typing import Final

import xxhash

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode

ETAG: Final = b"user.s3.etag"


def packed(etag: str, inode: Inode) -> bytes:
    """Returns the value of the attribute."""
    return b"%s %d %d" % (etag.encode(), inode.size, inode.mtime_ns)


def etag_of(kept: bytes | None, ino: int, inode: Inode) -> str:
    """Returns the ETag, without quotes: the given one, if the file is still what it was then; else
    one that no client takes for an MD5 and that stays while nobody writes."""
    if kept is not None and is_content_as_given(kept, inode):
        given = kept.partition(b" ")[0]
        if given.replace(b"-", b"").isalnum():  # else somebody on the mount wrote it
            return given.decode()
    return computed(ino, inode)


def is_content_as_given(kept: bytes, inode: Inode) -> bool:
    """Returns whether nobody wrote to the file since this ETag was given to it."""
    return kept.partition(b" ")[2] == b"%d %d" % (inode.size, inode.mtime_ns)


def computed(ino: int, inode: Inode) -> str:
    """Returns the ETag of a file without a given one, from its number, size and mtime."""
    seed = b"%d %d %d" % (ino, inode.size, inode.mtime_ns)
    return xxhash.xxh3_128_hexdigest(seed) + "-1"


def is_awaited(kept: bytes | None, inode: Inode) -> bool:
    """Returns whether a file of a namespace of `md5-all` is to have another ETag when it is
    sealed."""
    if inode.flags & Flag.SEALED:
        return False
    return kept is None or not is_content_as_given(kept, inode)


def follow(t: Transaction, ino: int, inode: Inode, mtime_ns: int) -> None:
    """Keeps the ETag valid for a sealed file that gets this mtime: its content, and so its ETag,
    stay. To be called before that."""
    kept = t.get(keys.xattr(ino, ETAG))
    if kept is not None and is_content_as_given(kept, inode):
        given = kept.partition(b" ")[0]
        t.put(keys.xattr(ino, ETAG), b"%s %d %d" % (given, inode.size, mtime_ns))
