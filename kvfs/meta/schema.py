"""Checks that metadata are of a schema that this program reads, and makes them its own.

Every process that opens an engine's file checks it: one that took a later schema for its own would
misread records, and `fsck` would repair what is right. The key `V` holds it:

| `V` | read by programs of | records have tags (`kvfs.meta.records`) |
|---|---|---|
| `1` | schema 1 and 2 | no: a program of schema 1 drops them when it rewrites a record |
| `1>2` | schema 2 | not yet (`kvfs.cluster.schema_upgrade`) |
| `2` | schema 2 | yes |

No record is rewritten for it: those without tags are of both schemas.
"""

from typing import Final

from kvfs.base.errors import NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction

BEFORE: Final = b"%d" % (keys.SCHEMA - 1)
RISING: Final = b"%b>%d" % (BEFORE, keys.SCHEMA)
PRESENT: Final = b"%d" % keys.SCHEMA


def check(t: Transaction) -> None:
    """Raises NotSupported if they are of a later one; does nothing if none was written yet."""
    version = t.get(keys.VERSION)
    if version is not None:
        require(version)


def require(version: bytes) -> None:
    """Raises NotSupported if this version of a schema is a later one."""
    if version not in (BEFORE, RISING, PRESENT):
        found = version.decode(errors="replace")
        raise NotSupported(
            f"the metadata have schema {found}, this KVFS reads {keys.SCHEMA - 1} and"
            f" {keys.SCHEMA}: use the version that made it"
        )


def found(t: Transaction) -> int:
    """Returns the schema that may be written; 0: none was written yet."""
    version = t.get(keys.VERSION)
    if version is None:
        return 0
    return keys.SCHEMA if version == PRESENT else keys.SCHEMA - 1


def has_tags(t: Transaction) -> bool:
    """Returns whether records may be given tags: no program drops them. As with every read, a
    transaction that asked is not committed if the answer has changed."""
    return t.get(keys.VERSION) == PRESENT


def upgrade(t: Transaction) -> bool:
    """Makes metadata that no program of another version uses those of this one. Returns whether
    they were of an earlier one."""
    if found(t) in (0, keys.SCHEMA):
        return False
    t.put(keys.VERSION, PRESENT)
    return True
