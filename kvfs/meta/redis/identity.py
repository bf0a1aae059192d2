"""Whose a server's metadata are, and how they are laid out there. No I/O."""

import secrets
from collections.abc import Sequence
from typing import Final

from kvfs.base.errors import Conflict, NotSupported
from kvfs.meta.redis.scripts import Item
from kvfs.meta.redis.sharding import Layout

SCHEMA: Final = 1
"""Of the layout within the server."""
_LAYOUTS: Final = tuple(each.value for each in Layout)


def arguments(layout: Layout, cluster: str | None) -> list[Item]:
    """IDENTIFY's: what is to be so where nothing is there yet."""
    owner = (cluster or secrets.token_hex(8)).encode()
    return [b"schema", SCHEMA, b"layout", layout.value.encode(), b"cluster", owner]


def checked(found: Sequence[bytes], cluster: str | None, shown: str) -> tuple[str, Layout]:
    """Whose the metadata are, and how they are laid out, by what IDENTIFY of the engine `shown`
    answered. Raises NotSupported; Conflict where they are not those of `cluster`."""
    schema, layout, whose = (value.decode() for value in found)
    if schema != str(SCHEMA):
        raise _strange(shown, f"version {schema}", str(SCHEMA))
    if layout not in _LAYOUTS:
        raise _strange(shown, f"'{layout}'", " and ".join(_LAYOUTS))
    if cluster is not None and whose != cluster:
        raise Conflict(
            f"the engine {shown} belongs to the cluster {whose}, not to {cluster}: name another"
            " prefix (?prefix=NAME)"
        )
    return whose, Layout(layout)


def _strange(shown: str, layout: str, known: str) -> NotSupported:
    return NotSupported(
        f"the engine {shown} is laid out as {layout}, this KVFS knows {known}: use the version that"
        " made it"
    )
