"""Checks that metadata are of the schema that this program reads. Every process that opens an
engine's file checks it: one that took a newer schema for its own would misread records, and `fsck`
would repair what is right."""

from kvfs.base.errors import NotSupported
from kvfs.meta import keys
from kvfs.meta.engine import Transaction


def check(t: Transaction) -> None:
    """Raises NotSupported if they are of another one; does nothing if none was written yet."""
    version = t.get(keys.VERSION)
    if version not in (None, b"%d" % keys.SCHEMA):
        found = (version or b"").decode(errors="replace")
        raise NotSupported(
            f"the metadata have schema {found}, this KVFS reads {keys.SCHEMA}:"
            " use the version that made it"
        )
