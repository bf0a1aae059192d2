"""The objects that every client writes and reads: their names and their content."""

import random
from typing import Final

MIB: Final = 1 << 20
SIZES: Final = {"empty": 0, "small": 11, "above-a-part": 5 * MIB + 1, "large": 20 * MIB}
ODD: Final = (
    "with space",
    "plus+sign",
    "per%cent",
    "100%25",
    "ünïcode/☃",
    "a&b=c?d#e",
    "~-_.!*'()",
)


def content(size: int) -> bytes:
    """Always the same for a size."""
    return random.Random(size).randbytes(size)
