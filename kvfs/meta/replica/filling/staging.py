"""Files for what is read of a server before a metadata replica is written: its pairs, which come in
no order, and the log's entries that come meanwhile.

Both go into files without a name, which end with the process. Pairs are sorted a run at a time; the
runs are merged as they are read back, some blocks of each at a time.
"""

import errno
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final, NamedTuple

import msgspec

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta import keys
from kvfs.meta.redis.log import LogEntry
from kvfs.meta.redis.scripts import Pair

_RUN: Final = (50_000, 200_000)
"""Pairs that are sorted at once, at first and in the end, of many: for a tenth of a second, and for
a third; 50 MB of memory. Nothing else runs meanwhile, but many runs take memory as well."""
_RUNS: Final = 200
_BLOCK: Final = 500
"""Pairs that are read back at once: two blocks of each run are in memory while all are merged."""
_LEAST: Final = 16
"""Blocks that are merged at once, at least."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_pairs: Final = msgspec.msgpack.Decoder(list[Pair]).decode
_decode_entries: Final = msgspec.msgpack.Decoder(list[LogEntry]).decode


class _Block(NamedTuple):
    """The place of a block in the file."""

    offset: int
    length: int


class _File:
    """A file of blocks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._end = 0
        try:
            self._file: IO[bytes] = TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._refused(error) from error

    def append(self, data: bytes) -> _Block:
        """Raises NoSpace, Unavailable."""
        try:
            if os.pwrite(self._file.fileno(), data, self._end) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._refused(error) from error
        block = _Block(self._end, len(data))
        self._end += len(data)
        return block

    def read(self, block: _Block) -> bytes:
        """Raises Unavailable."""
        try:
            return os.pread(self._file.fileno(), block.length, block.offset)
        except OSError as error:
            raise self._refused(error) from error

    def close(self) -> None:
        self._file.close()

    def _refused(self, error: OSError) -> NoSpace | Unavailable:
        kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unavailable
        return kind(f"what is read from the engine cannot be kept in {self._directory}: {error}")


class StagedPairs:
    """Pairs that come in any order, a key perhaps several times."""

    def __init__(self, directory: Path, early: bytes) -> None:
        """`early`: the beginning of the keys that are wanted before all others. Raises NoSpace,
        Unavailable."""
        self.early: list[Pair] = []
        """The pairs with such keys, once all were added."""
        self._wanted = (early,), (keys.after(early),)
        self._file = _File(directory)
        self._gathered: list[Pair] = []
        self._count = self._runs = 0
        self._blocks: list[tuple[bytes, _Block]] = []
        """The blocks of all runs, each with its first key."""

    def add(self, names: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Raises NoSpace, Unavailable."""
        self._gathered += zip(names, values, strict=True)
        self._count += len(names)
        least, most = _RUN
        if len(self._gathered) >= min(most, max(least, self._count // _RUNS)):
            self._end_run()

    def end(self) -> None:
        """Takes notice that all were added. Raises NoSpace, Unavailable."""
        self._end_run()

    def sorted(self) -> Iterator[list[Pair]]:
        """Yields all pairs in the order of their keys, in lists. Raises Unavailable."""
        blocks = sorted(self._blocks)
        step, here = max(_LEAST, self._runs), list[Pair]()
        for at in range(0, len(blocks), step):
            for _, block in blocks[at : at + step]:
                here += _decode_pairs(self._file.read(block))
            here.sort()
            count = len(here)
            if at + step < len(blocks):  # no later block has a key before that one's first
                count = bisect_left(here, (blocks[at + step][0],))
            yield here[:count]
            here = here[count:]

    def close(self) -> None:
        """Drops all of it; idempotent."""
        self._file.close()

    def _end_run(self) -> None:
        pairs, self._gathered = self._gathered, []
        pairs.sort()
        first, last = (bisect_left(pairs, key) for key in self._wanted)
        self.early += pairs[first:last]
        for first in range(0, len(pairs), _BLOCK):
            part = pairs[first : first + _BLOCK]
            self._blocks.append((part[0][0], self._file.append(_encode(part))))
        self._runs += 1


class StagedEntries:
    """Entries of a log, in their order."""

    def __init__(self, directory: Path) -> None:
        """Raises NoSpace, Unavailable."""
        self._file = _File(directory)
        self._blocks: list[_Block] = []

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Raises NoSpace, Unavailable."""
        self._blocks.append(self._file.append(_encode(entries)))

    def __iter__(self) -> Iterator[list[LogEntry]]:
        """Yields all entries in the lists that were added. Raises Unavailable."""
        for block in self._blocks:
            yield _decode_entries(self._file.read(block))

    def close(self) -> None:
        """Drops all of them; idempotent."""
        self._file.close()
