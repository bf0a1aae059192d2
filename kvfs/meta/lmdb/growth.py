"""The growth of the metadata by a commit, and whether the commit may be made when space or memory
has run out. Pure."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvfs.meta import keys


class Growth(NamedTuple):
    """The additions of commits; negative if they remove."""

    names: int
    """Names in directories."""
    size_bytes: int
    """Bytes of keys and values."""

    @property
    def takes_away(self) -> bool:
        """Whether it is a removal, which is let pass wherever possible."""
        return self.names < 0 or self.size_bytes < 0

    def with_(self, other: "Growth") -> "Growth":
        return Growth(self.names + other.names, self.size_bytes + other.size_bytes)


NONE = Growth(0, 0)


def growth_of(
    writes: Iterable[tuple[bytes, bytes | None]], before: Callable[[bytes], bytes | None]
) -> Growth:
    """Returns the growth. `writes`: keys, each once, with their new values (None: removed).
    `before`: a key's old value."""
    names = size_bytes = 0
    for key, value in writes:
        old = before(key)
        size_bytes -= 0 if old is None else len(key) + len(old)
        size_bytes += 0 if value is None else len(key) + len(value)
        if keys.is_entry(key):
            names += (value is not None) - (old is not None)
    return Growth(names, size_bytes)
