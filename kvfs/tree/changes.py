"""Changes of names behind the mount's back, as a process reports them to the node."""

import base64
import binascii
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from kvfs.base.errors import Invalid


class Change(NamedTuple):
    """A name that came, went or now stands for another inode, behind the mount's back."""

    parent: int
    """The directory whose listing, or content, is forgotten too; 0: none is."""
    name: bytes
    """The name as a mount shows it; empty: no mount does, it is about the inode alone."""
    ino: int
    """The inode that lost a link by it, perhaps its last, or about which something else is told; 0:
    none."""


class _Wire(msgspec.Struct):
    parent: int
    name: str
    ino: int = 0


def to_wire(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Returns the changes for a control request: names are base64."""
    return [
        {
            "parent": each.parent,
            "name": base64.b64encode(each.name).decode("ascii"),
            "ino": each.ino,
        }
        for each in changes
    ]


def from_wire(raw: object) -> list[Change]:
    """Reads the result of `to_wire`. Raises Invalid."""
    try:
        return [
            Change(each.parent, base64.b64decode(each.name, validate=True), each.ino)
            for each in msgspec.convert(raw, list[_Wire])
        ]
    except (msgspec.ValidationError, binascii.Error) as error:
        raise Invalid(f"not a change of a name: {error}") from None
