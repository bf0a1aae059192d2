"""Lists of inode numbers, as keys hold them."""

from kvfs.meta import keys
from kvfs.meta.engine import Transaction


def listed(
    t: Transaction, after: bytes, end: bytes, limit: int, of: bytes | None = None
) -> list[int]:
    """Returns up to `limit` inode numbers that end the keys after `after` and before `end`; with
    `of`, only those that have this value."""
    found: list[int] = []
    for key, value in t.scan(after + b"\0", end):
        if of is not None and value != of:
            continue
        found.append(keys.unpack_u64(key, len(key) - 8))
        if len(found) >= limit:
            break
    return found
