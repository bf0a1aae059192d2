"""Bytes as people read them in a file: in hexadecimal, with what they mean."""

from collections.abc import Iterator
from typing import Final

_IN_LINE: Final = 40


def shown(name: str, data: bytes, *meaning: str) -> Iterator[str]:
    """Lines for one thing that is kept or sent."""
    yield f"{name}: {len(data)} bytes"
    for start in range(0, len(data), _IN_LINE):
        part = data[start : start + _IN_LINE]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"    {part.hex()}  {text}"
    yield from (f"    {line}" for line in meaning)
