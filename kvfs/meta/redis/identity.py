"""The cluster that owns a server's metadata, and their layout there. No I/O."""

import secrets
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Conflict, NotSupported
from kvfs.meta.redis.scripts import Item

SCHEMA: Final = 2
"""The version of the layout within the server that new metadata have."""
_KNOWN: Final = ("1", "2")
"""The versions that are read and written (`scripts.RAISE`)."""
TOGETHER: Final = "single"
"""All metadata are in one shard."""
SHARDS: Final = "shards"
"""Namespaces have shards of their own (`kvfs.meta.shards`)."""
_SPREAD: Final = "namespaces"
"""Each namespace is in a shard of its own, as copies in a Redis cluster once were."""


def arguments(cluster: str | None) -> list[Item]:
    """Returns IDENTIFY's arguments: the values to set if there are none."""
    owner = (cluster or secrets.token_hex(8)).encode()
    return [b"schema", SCHEMA, b"layout", TOGETHER.encode(), b"cluster", owner]


def checked(found: Sequence[bytes], cluster: str | None, shown: str) -> str:
    """Returns the cluster that owns the metadata, by the answer of the engine `shown` to IDENTIFY.
    Raises NotSupported; Conflict if they are not those of `cluster`."""
    schema, layout, whose = (value.decode() for value in found)
    if schema not in _KNOWN:
        raise _strange(shown, f"version {schema}", " and ".join(_KNOWN))
    if layout == _SPREAD:
        raise NotSupported(
            f"the engine {shown} holds a copy that is spread over the servers of its cluster, which"
            " only versions before this one read: copy it to a store with one of those, or name"
            " another prefix (?prefix=NAME)"
        )
    if layout not in (TOGETHER, SHARDS):
        raise _strange(shown, f"'{layout}'", f"'{TOGETHER}'")
    if cluster is not None and whose != cluster:
        raise Conflict(
            f"the engine {shown} belongs to the cluster {whose}, not to {cluster}: name another"
            " prefix (?prefix=NAME)"
        )
    return whose


def _strange(shown: str, layout: str, known: str) -> NotSupported:
    return NotSupported(
        f"the engine {shown} is laid out as {layout}, this KVFS knows {known}: use the version that"
        " made it"
    )
