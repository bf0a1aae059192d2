"""Sizes as people write them: '4GiB', '500M', '90%'.

KiB, MiB ... and the bare letters K, M ... are powers of 1,024 (as in coreutils); KB, MB ... are
powers of 1,000.
"""

import re
from typing import Final

import msgspec

from kvfs.base.errors import Invalid

_LETTERS: Final = "KMGTP"
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?b)?", re.IGNORECASE)
_PERCENT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


class Capacity(msgspec.Struct, frozen=True):
    """A limit: a number of bytes, or a share of the disk that holds the store."""

    size_bytes: int = 0
    percent: float = 0.0

    def of(self, total_bytes: int) -> int:
        """Returns the limit in bytes on a disk of `total_bytes`."""
        return int(total_bytes * self.percent / 100) if self.percent else self.size_bytes

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else exact_size(self.size_bytes)


def parse_size(text: str) -> int:
    """Returns bytes. Raises Invalid, with the accepted forms."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise Invalid(f"'{text}' is not a size; write a number of bytes, or 500M, 4GiB, 1.5T")
    number, letter, suffix = match.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    power = _LETTERS.index(letter.upper()) + 1 if letter else 0
    return int(float(number) * base**power) if "." in number else int(number) * base**power


def parse_capacity(text: str) -> Capacity:
    """Returns a size above zero, or a percentage of the disk above 0 up to 100. Raises Invalid."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        size = parse_size(text)
        if size == 0:
            raise Invalid(
                "a capacity of 0 holds nothing; write a size like 4GiB or a share like 90%"
            )
        return Capacity(size_bytes=size)
    percent = float(match.group(1))
    if not 0 < percent <= 100:
        raise Invalid(f"'{text}' is not a share of the disk; write more than 0% and at most 100%")
    return Capacity(percent=percent)


def format_size(size_bytes: int) -> str:
    """Formats a size, short and for people: '4.0 GiB', '512 B'."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for letter in _LETTERS:
        value /= 1024
        if abs(value) < 1023.95 or letter == _LETTERS[-1]:
            break
    return f"{value:.1f} {letter}iB"


def exact_size(size_bytes: int) -> str:
    """Formats a size so that `parse_size` reads it back without loss: '4GiB', '1500'."""
    letters = ""
    for letter in _LETTERS:
        if size_bytes == 0 or size_bytes % 1024:
            break
        size_bytes //= 1024
        letters = letter
    return f"{size_bytes}{letters}iB" if letters else str(size_bytes)
