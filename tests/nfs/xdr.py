"""External Data Representation (RFC 4506): values to bytes and back.

Pure. All is big-endian, in units of four bytes; what is shorter is padded with zeros. The unpacker
never reads past its buffer, and a length that a peer sent is held against the buffer and a bound
before anything is allocated.
"""

import os
import struct
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

LONGEST: Final = 64 << 20
"""No opaque value is longer than that: the largest READ that servers offer."""
MOST: Final = 1 << 20
"""No array has more elements."""

_UINT: Final = struct.Struct(">I")
_INT: Final = struct.Struct(">i")
_UINT64: Final = struct.Struct(">Q")
_INT64: Final = struct.Struct(">q")


class XdrError(Exception):
    """Bytes that are no such value."""


class Packer:
    """Appends values; each method returns the packer, so that a structure is one expression."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __bytes__(self) -> bytes:
        return bytes(self._buffer)

    def uint(self, value: int) -> "Packer":
        self._buffer += _UINT.pack(value)
        return self

    def int32(self, value: int) -> "Packer":
        self._buffer += _INT.pack(value)
        return self

    def uint64(self, value: int) -> "Packer":
        self._buffer += _UINT64.pack(value)
        return self

    def int64(self, value: int) -> "Packer":
        self._buffer += _INT64.pack(value)
        return self

    def boolean(self, value: bool) -> "Packer":
        return self.uint(int(value))

    def fixed(self, value: bytes) -> "Packer":
        """Opaque bytes whose length both sides know."""
        self._buffer += value
        self._buffer += bytes(-len(value) % 4)
        return self

    def opaque(self, value: bytes) -> "Packer":
        return self.uint(len(value)).fixed(value)

    def string(self, value: str) -> "Packer":
        """Text, or any name of a file as Python tells it."""
        return self.opaque(os.fsencode(value))

    def array(self, values: Iterable[T], pack: "Callable[[Packer, T], object]") -> "Packer":
        every = list(values)
        self.uint(len(every))
        for value in every:
            pack(self, value)
        return self

    def optional(self, value: T | None, pack: "Callable[[Packer, T], object]") -> "Packer":
        self.boolean(value is not None)
        if value is not None:
            pack(self, value)
        return self

    def raw(self, encoded: bytes) -> "Packer":
        """What is encoded already."""
        assert len(encoded) % 4 == 0, len(encoded)
        self._buffer += encoded
        return self


class Unpacker:
    """Takes values off the front. Raises XdrError where they are not there."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def done(self) -> None:
        """Raises XdrError where something is left."""
        if self.left:
            raise XdrError(f"{self.left} bytes too many")

    def uint(self) -> int:
        return int(_UINT.unpack(self._take(4))[0])

    def int32(self) -> int:
        return int(_INT.unpack(self._take(4))[0])

    def uint64(self) -> int:
        return int(_UINT64.unpack(self._take(8))[0])

    def int64(self) -> int:
        return int(_INT64.unpack(self._take(8))[0])

    def boolean(self) -> bool:
        value = self.uint()
        if value > 1:
            raise XdrError(f"a boolean of {value}")
        return bool(value)

    def fixed(self, length: int) -> bytes:
        value = self._take(length)
        if any(self._take(-length % 4)):
            raise XdrError("padding that is not zero")
        return value

    def opaque(self, longest: int = LONGEST) -> bytes:
        length = self.uint()
        if length > longest:
            raise XdrError(f"{length} bytes where at most {longest} may be")
        return self.fixed(length)

    def string(self, longest: int = LONGEST) -> str:
        return os.fsdecode(self.opaque(longest))

    def array(self, unpack: "Callable[[Unpacker], T]", most: int = MOST) -> list[T]:
        count = self.uint()
        if count > most:
            raise XdrError(f"{count} elements where at most {most} may be")
        return [unpack(self) for _ in range(count)]

    def optional(self, unpack: "Callable[[Unpacker], T]") -> T | None:
        return unpack(self) if self.boolean() else None

    def chain(self, unpack: "Callable[[Unpacker], T]") -> list[T]:
        """A linked list: each element stands behind a boolean of one, the end is one of zero."""
        found: list[T] = []
        while self.boolean():
            found.append(unpack(self))
        return found

    def rest(self) -> bytes:
        return self._take(self.left)

    def _take(self, length: int) -> bytes:
        if length > self.left:
            raise XdrError(f"{length} bytes wanted, {self.left} left")
        start, self._at = self._at, self._at + length
        return self._data[start : self._at]
