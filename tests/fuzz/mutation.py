"""Inputs that are nearly right: seeds of a grammar, changed at random.

All comes from one `random.Random`, so that a seed repeats it.
"""

import random
from collections.abc import Callable, Sequence
from typing import Final

_NUMBERS: Final = (
    *(b"0", b"-1", b"1", b"255", b"65535", b"65536", b"2147483648", b"4294967296"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"1e9", b"0x1"),
    *(b"\xff\xff\xff\xff", b"\xff" * 8, b"\x80\0\0\0", b"00000000000000000000000000001"),
)
_TEXTS: Final = (
    *(b"\0", b"\r\n", b"\n", b"%00", b"%", b"..", b"//", b"\xc3\x28", b"\xed\xa0\x80"),
    *(b"\xf4\x90\x80\x80", "\u202e".encode(), b"\x85", b"\t", b'"', b"\\", b"<", b"&#0;", b"&a;"),
)
_MOST_BYTES: Final = 64 << 10
Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutated(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to a few changes of an input; `others` are words and inputs to take parts of."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        data = draw.choice(_CHANGES)(draw, data, others)
    return data[:_MOST_BYTES]


def _span(draw: random.Random, data: bytes) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.choice((1, 2, 4, 8, 16, 64)))


def _flip(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([draw.randrange(256)])
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def _remove(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + data[end:]


def _repeat(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:end] + data[start:end] * draw.choice((1, 2, 8, 64)) + data[end:]


def _cut(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _insert(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(draw.choice((_NUMBERS, _TEXTS, others or _TEXTS))) + data[at:]


def _overwrite(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + draw.choice(draw.choice((_NUMBERS, others or _TEXTS))) + data[end:]


def _join(draw: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = draw.choice(others) if others else b""
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def _noise(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    start, end = _span(draw, data)
    return data[:start] + draw.randbytes(draw.randrange(16)) + data[end:]


_CHANGES: Final[Sequence[Change]] = (
    *(_flip, _remove, _repeat, _cut, _insert, _overwrite, _join, _noise),
)
