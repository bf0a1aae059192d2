"""Changes of names behind the mount's back, as a process reports them to the node."""

from collections.abc import Iterable
from itertools import starmap
from typing import NamedTuple

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


class SentChange(msgspec.Struct):
    """A change in a control request: in JSON an object whose name is base64."""

    parent: int
    name: bytes
    ino: int = 0


def to_wire(changes: Iterable[Change]) -> list[SentChange]:
    """Returns the changes for a control request."""
    return list(starmap(SentChange, changes))


def from_wire(raw: object) -> list[Change]:
    """Reads the result of `to_wire`. Raises Invalid."""
    try:
        return [
            Change(each.parent, each.name, each.ino)
            for each in msgspec.convert(raw, list[SentChange])
        ]
    except msgspec.ValidationError as error:
        raise Invalid(f"not a change of a name: {error}") from None
