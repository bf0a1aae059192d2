"""Entity tags.

A tag of 32 hexadecimal digits is the body's MD5: clients verify it when it looks so, and tools that
synchronise take an object without such a tag for unchanged. So bodies that come by S3 have it,
unless their bucket says `fast`: MD5 runs at 0.6 to 0.8 GB/s a core. Then it is computed for small
bodies, for those that come with a Content-MD5, for which it is needed anyway, and for those whose
client wants a cryptographic digest, which is no faster by an order. Every other tag ends in `-N`,
as S3's own tags of multipart uploads do, and no client takes it for an MD5. All tags here are
without quotes.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

MD5_LIMIT_BYTES: Final = 256 << 10
"""Bodies up to this size have their MD5 as tag in any bucket: 0.35 ms at most."""

_DIGEST_BYTES: Final = 16


def wants_md5(size: int | None, *, hashed: bool) -> bool:
    """Returns whether a body's tag is its MD5 in a bucket of fast ones; `hashed`: the client sent
    it, or wants another such digest. An unknown size counts as large."""
    return hashed or (size is not None and size <= MD5_LIMIT_BYTES)


def is_md5(tag: str) -> bool:
    """Returns whether it is the MD5 of the content."""
    return "-" not in tag


def fast_etag(digest: bytes) -> str:
    """Returns the tag of a body from a fast hash of 16 bytes."""
    assert len(digest) == _DIGEST_BYTES
    return f"{digest.hex()}-1"


def multipart_etag(part_etags: Sequence[str]) -> str:
    """Returns the tag of a completed upload: the MD5 of its parts' digests and their number, which
    is S3's own if the parts' tags are MD5s."""
    digests = b"".join(bytes.fromhex(tag[: 2 * _DIGEST_BYTES]) for tag in part_etags)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_etags)}"
