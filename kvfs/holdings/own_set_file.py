"""The file of a node's own set: header, words, intents, ring of changes, rows. No policy.

It is mapped into memory, so what was stored survives the death of the process, in the order of the
stores; a power cut keeps any part of it. A word and a slot are 8 aligned bytes that one instruction
stores: they are old or new. Each word carries 16 bits of a checksum, the header 64.

The kernel gives space to all of the file before it is mapped, since storing into a hole of a full
disk would kill the process.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvfs.base.descriptors import closing
from kvfs.base.errors import Corrupt
from kvfs.holdings.fingerprints import RANGES, U64
from kvfs.holdings.row_address import SLOTS

MOST_INTENTS: Final = 4096
MOST_SPILLED: Final = 4096
LEAST_ROWS: Final = RANGES
VALUE_BITS: Final = 48
"""Bits of the value of a word."""
_MAGIC: Final = b"KVFSown\0"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQQ??6xQQ")
_CHECK: Final = struct.Struct("<Q")
_ROWS, _SEQUENCE, _INTENDED = range(3)
_WORDS_AT: Final = 512
_INTENTS_AT: Final = 4096
_SPILLED_AT: Final = _INTENTS_AT + 8 * MOST_INTENTS
_RING_AT: Final = _SPILLED_AT + 8 * MOST_SPILLED
_ROW_BYTES: Final = 8 * SLOTS


@dataclass(frozen=True, slots=True)
class OwnSetHeader:
    """The identity of a set, and how far it can be believed."""

    store: int
    epoch: int
    boot: int
    """The boot in which it was last open."""
    is_filled: bool
    """Whether it has all that the node holds."""
    is_closed: bool
    """Whether all of it was on disk when this was written."""
    count: int = 0
    digest: int = 0
    """With `count`, of what it holds, if it is closed."""


class OwnSetFile:
    """The file, mapped."""

    def __init__(self, path: Path, ring_size: int) -> None:
        """Maps an existing file. Raises OSError, Corrupt."""
        self._path = path
        self._ring_size = ring_size
        with closing(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
            self._map(fd)
        self._epoch = self.header().epoch
        for at in (_ROWS, _SEQUENCE, _INTENDED):
            self._get(at)
        if not LEAST_ROWS <= self.row_count <= len(self.rows):
            raise Corrupt(f"{path} has fewer rows than it says")

    @classmethod
    def create(cls, path: Path, ring_size: int, header: OwnSetHeader) -> "OwnSetFile":
        """Makes an empty one, in the place of any other. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with closing(os.open(path, flags, 0o600)) as fd:
            os.posix_fallocate(fd, 0, _size(ring_size, LEAST_ROWS))
            for at, value in ((_ROWS, LEAST_ROWS), (_SEQUENCE, 0), (_INTENDED, 0)):
                word = _CHECK.pack(_word(value, at, header.epoch))
                os.pwrite(fd, word, _WORDS_AT + 8 * at)
            os.pwrite(fd, _packed(header, ring_size), 0)
        return cls(path, ring_size)

    # --- what it consists of

    def header(self) -> OwnSetHeader:
        """Reads the header. Raises Corrupt."""
        packed = self._memory[: _HEADER.size]
        (check,) = _CHECK.unpack_from(self._memory, _HEADER.size)
        if check != xxhash.xxh3_64_intdigest(packed):
            raise Corrupt(f"the header of {self._path} is damaged")
        magic, version, ring_size, *fields = _HEADER.unpack(packed)
        if (magic, version, ring_size) != (_MAGIC, _VERSION, self._ring_size):
            raise Corrupt(f"{self._path} is of another version")
        return OwnSetHeader(*fields)

    def write_header(self, header: OwnSetHeader) -> None:
        """Replaces the header; its epoch stays."""
        packed = _packed(header, self._ring_size)
        self._memory[: len(packed)] = packed

    @property
    def row_count(self) -> int:
        """Rows that are in use."""
        return self._get(_ROWS)

    @row_count.setter
    def row_count(self, value: int) -> None:
        self._set(_ROWS, value)

    @property
    def sequence(self) -> int:
        """Number of the last change that is told to others."""
        return self._get(_SEQUENCE)

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._set(_SEQUENCE, value)

    @property
    def intended(self) -> int:
        """Number and purpose of the intents; 0: they have no meaning."""
        return self._get(_INTENDED)

    @intended.setter
    def intended(self, value: int) -> None:
        self._set(_INTENDED, value)

    # --- its size and its way to the disk

    def extend(self, row_count: int) -> None:
        """Makes room for so many rows. Raises OSError, and is then as before."""
        with closing(os.open(self._path, os.O_RDWR | os.O_CLOEXEC)) as fd:
            os.posix_fallocate(fd, 0, _size(self._ring_size, row_count))
            self._map(fd)

    def sync(self) -> None:
        """Writes everything to the disk. Raises OSError."""
        self._memory.flush()
        with closing(os.open(self._path, os.O_RDWR | os.O_CLOEXEC)) as fd:
            os.fsync(fd)

    def _map(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < _size(self._ring_size, LEAST_ROWS):
            raise Corrupt(f"{self._path} is too short")
        self._memory = mmap.mmap(fd, size)
        self._words = self._array(_WORDS_AT, 3)
        self.intents = self._array(_INTENTS_AT, MOST_INTENTS)
        self.spilled = self._array(_SPILLED_AT, MOST_SPILLED)
        self.ring = self._array(_RING_AT, self._ring_size)
        at = _size(self._ring_size, 0)
        count = (size - at) // _ROW_BYTES
        self.rows = self._array(at, count * SLOTS).reshape(-1, SLOTS)

    def _array(self, at: int, count: int) -> U64:
        return np.frombuffer(self._memory, np.uint64, count, at)

    def _get(self, at: int) -> int:
        word = int(self._words[at])
        value = word >> 16
        if word != _word(value, at, self._epoch):
            raise Corrupt(f"word {at} of {self._path} is damaged")
        return value

    def _set(self, at: int, value: int) -> None:
        self._words[at] = _word(value, at, self._epoch)


def _size(ring_size: int, row_count: int) -> int:
    return (_RING_AT + 8 * ring_size + 4095 & ~4095) + row_count * _ROW_BYTES


def _word(value: int, at: int, epoch: int) -> int:
    return value << 16 | xxhash.xxh3_64_intdigest(b"%d %d" % (at, value), epoch) & 0xFFFF


def _packed(header: OwnSetHeader, ring_size: int) -> bytes:
    packed = _HEADER.pack(
        _MAGIC,
        _VERSION,
        ring_size,
        header.store,
        header.epoch,
        header.boot,
        header.is_filled,
        header.is_closed,
        header.count,
        header.digest,
    )
    return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))
