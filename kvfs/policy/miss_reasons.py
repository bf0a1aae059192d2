"""Why a name that was asked for is not there. Pure.

| reason | what was asked for |
|---|---|
| `never_stored` | nobody stored it here, its users removed it, or why it went is forgotten |
| `evicted` | for space, or with the node that had it |
| `expired` | a lifecycle rule ended it |
| `other_version` | there is one, but not the one that was asked for |
| `unavailable` | nobody who has it answers, or the engine does not |
| `damaged` | its data were not what was stored |

A name that went is remembered as a word in a table: the reason, and enough of the name's hash to
tell it from others. A newer name takes the place of an older one.
"""

from typing import Final, Literal

import xxhash

from kvfs.base.errors import NotFound, OtherVersion, Unreached

Reason = Literal["never_stored", "evicted", "expired", "other_version", "unavailable", "damaged"]
Lost = Literal["evicted", "expired", "unavailable", "damaged"]
"""Reasons for which names go."""
REASONS: Final[tuple[Reason, ...]] = (
    "never_stored",  # first: what a word of zeroes says
    "evicted",
    "expired",
    "other_version",
    "unavailable",
    "damaged",
)
SLOTS: Final = 1 << 19
"""Words of the table, of 32 bits each: of the 65,536 names that went last it has lost one in
sixteen."""
_CODE_BITS: Final = 3
_HASH_SHIFT: Final = 64 - 32 + _CODE_BITS


hash_of: Final = xxhash.xxh3_64_intdigest
"""The hash of a name, by the engine's key of a file's entry; its lowest bits are its slot."""


def word_of(hashed: int, reason: Lost) -> int:
    """The word that is remembered for a name with this hash."""
    return hashed >> _HASH_SHIFT << _CODE_BITS | REASONS.index(reason)


def reason_in(word: int, hashed: int) -> Reason:
    """The reason in a word for the name with this hash; `never_stored`: there is none."""
    if word >> _CODE_BITS != hashed >> _HASH_SHIFT:
        return "never_stored"
    code = word & (1 << _CODE_BITS) - 1
    return REASONS[code] if code < len(REASONS) else "never_stored"


def reason_of(error: NotFound) -> Reason:
    """The reason where nothing is remembered of the name."""
    match error:
        case OtherVersion():
            return "other_version"
        case Unreached():
            return "unavailable"
        case _:
            return "never_stored"
