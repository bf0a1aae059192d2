"""Reasons why a requested name is missing. Pure.

| reason | the name |
|---|---|
| `never_stored` | was never stored here, was removed by its users, or its reason is forgotten |
| `evicted` | went for space, or with the node that had it |
| `expired` | was ended by a lifecycle rule |
| `other_version` | exists, but not in the requested version |
| `unavailable` | cannot be had: no node that has it answers, or the engine does not |
| `damaged` | had data that were not what was stored |

A name that went is remembered as a word in a table: the reason, and enough of the name's hash to
tell it from others. A newer name replaces an older one in its slot.
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
"""Words of the table, of 32 bits each: of the last 65,536 names that went it has lost one in
sixteen."""
_CODE_BITS: Final = 3
_HASH_SHIFT: Final = 64 - 32 + _CODE_BITS


hash_of: Final = xxhash.xxh3_64_intdigest
"""The hash of a name, by the engine's key of a file's entry; its lowest bits are its slot."""


def word_of(hashed: int, reason: Lost) -> int:
    """Returns the word that remembers a name with this hash."""
    return hashed >> _HASH_SHIFT << _CODE_BITS | REASONS.index(reason)


def reason_in(word: int, hashed: int) -> Reason:
    """Returns the reason in a word for the name with this hash; `never_stored`: there is none."""
    if word >> _CODE_BITS != hashed >> _HASH_SHIFT:
        return "never_stored"
    code = word & (1 << _CODE_BITS) - 1
    return REASONS[code] if code < len(REASONS) else "never_stored"


def reason_of(error: NotFound) -> Reason:
    """Returns the reason if nothing is remembered of the name."""
    match error:
        case OtherVersion():
            return "other_version"
        case Unreached():
            return "unavailable"
        case _:
            return "never_stored"
