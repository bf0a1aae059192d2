"""The media on which data files may lie, and the notation for their places."""

import os
import pwd
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from kvfs.base.errors import Invalid
from kvfs.base.units import exact_size, parse_size

MEDIA: Final = ("ram", "ssd")
SHARED: Final = "shared:"
"""The beginning of the medium of a shared store; its name follows."""
_OWNER: Final = ":owner="
_NO_USER: Final = 0xFFFF_FFFF
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Place(msgspec.Struct, frozen=True):
    """A directory of data files."""

    medium: str
    """'ram', 'ssd', or 'shared:' and the name of a shared store."""
    root: str
    limit: int = 0
    """Bytes; 0: those of its filesystem."""
    owner: int = 0
    """The user who owns it and its files, beside root and the node's user."""
    mount_point: str = ""
    """The mount that it lay on when the node started; empty: it is not known."""

    @property
    def flag(self) -> str:
        """The command line's option that names such a place."""
        return "--shared" if self.is_shared else "--tier"

    def __str__(self) -> str:
        """Returns it as written on the command line."""
        if self.is_shared:
            owner = f"{_OWNER}{self.owner}" if self.owner else ""
            return f"{self.medium.removeprefix(SHARED)}={self.root}{owner}"
        return f"{self.medium}={self.root}:{exact_size(self.limit)}"

    @property
    def is_shared(self) -> bool:
        return self.medium.startswith(SHARED)


def parse_tier(text: str) -> Place:
    """Parses `ram=DIR:SIZE`, `ssd=DIR:SIZE`. Raises Invalid."""
    medium, equals, rest = text.partition("=")
    root, colon, size = rest.rpartition(":")
    if not equals or not colon or medium not in MEDIA or not os.path.isabs(root):
        raise Invalid(f"'{text}' is no tier: write ram=DIR:SIZE or ssd=DIR:SIZE, DIR from /")
    limit = parse_size(size)
    if not limit:
        raise Invalid(f"'{text}': a tier of no size holds nothing")
    return Place(medium, os.path.abspath(root), limit)


def parse_shared(text: str) -> Place:
    """Parses `NAME=DIR`, `NAME=DIR:owner=USER`. Raises Invalid."""
    name, _, rest = text.partition("=")
    root, _, owner = rest.partition(_OWNER)
    if not _NAME.fullmatch(name) or not os.path.isabs(root):
        raise Invalid(f"'{text}' is no shared store: write NAME=DIR, DIR from /")
    return Place(SHARED + name, os.path.abspath(root), owner=_user(owner) if owner else 0)


def _user(text: str) -> int:
    """Returns a user's number. Raises Invalid."""
    if text.isdecimal() and int(text) < _NO_USER:
        return int(text)
    try:
        return pwd.getpwnam(text).pw_uid
    except KeyError:
        raise Invalid(f"there is no user '{text}' here: give the name or number of one") from None


def is_shared(media: Sequence[str]) -> bool:
    """Returns whether a namespace with these media has its files in a shared store."""
    return bool(media) and media[0].startswith(SHARED)


def is_medium(text: str) -> bool:
    """Returns whether a namespace may name it."""
    return text in MEDIA or bool(
        text.startswith(SHARED) and _NAME.fullmatch(text.removeprefix(SHARED))
    )
