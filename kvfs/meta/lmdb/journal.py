"""The redo journal of the embedded engine: the writes of each commit, appended before it commits.

LMDB commits without syncing, so after a power cut `data.mdb` may be torn. The journal is synced
instead: some 600 bytes a commit in one sequential file, where syncing LMDB's own pages costs 40 KB.

`journal.<generation>` starts with a header, and a mark of how far a sync has acknowledged it (it
reaches the disk with the next one); records follow. Each record's digest covers the digest before
it, so reading stops at the first record that is torn, missing or left over from an append that did
not commit. The journal's end is kept in the engine itself (`POSITION_KEY`) and moves with each
commit: a record that a killed process appended and did not commit is overwritten by the next
writer, of any process.

A record holds absolute values, so replaying it onto a state that has it already changes nothing.
"""

import errno
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import msgspec

from kvfs.base.errors import Corrupt
from kvfs.meta.lmdb.magic import refuse_later

POSITION_KEY: Final = b"\xffjournal"
"""A key in the unnamed database, beyond every key of the metadata."""
GENERATION_KEY: Final = b"\xffgeneration"
"""A key like it: the number that the last commit to the metadata has in the journal, which does not
record it: a rebuild of the engine sets it again."""
REPLICA_KEY: Final = b"\xffmirror"
"""A key like it: what a replica of a cluster's metadata replicates (`replica.replica_mark`)."""
_MAGIC: Final = b"KVFSJRN2"
_FORMER_MAGIC: Final = b"KVFSJRN1"
"""The beginning of a journal without a mark, whose records follow its header."""
_HEADER: Final = struct.Struct("<8sQQ8s")
"""magic, generation, sequence number and digest of the last record before this file."""
_MARK: Final = struct.Struct("<QQ8s")
"""Sequence number of the last record that was on disk, zero, digest of both."""
_MARK_END: Final = _HEADER.size + _MARK.size
"""The end of the mark; all of it lies in the first sector of the disk, which is written whole or
not at all."""
_RECORD: Final = struct.Struct("<I8s")
"""Length and digest of the payload that follows: msgpack of a `Record`."""
POSITION: Final = struct.Struct("<QQQ8s")
"""A packed `Position`."""
_DIGEST_SIZE: Final = 8
_READ_SIZE: Final = 1 << 20
_NO_DIGEST: Final = bytes(_DIGEST_SIZE)

Writes = list[bytes | None]
"""Keys and values in turn; None for the value of a deleted key."""


def last_values(writes: Writes) -> dict[bytes, bytes | None]:
    """Returns the last value of each key, in the order of their first writes."""
    pairs = iter(writes)
    return dict(zip(pairs, pairs, strict=True))  # type: ignore[arg-type] # no key is None


class Record(msgspec.Struct, array_like=True):
    """One commit."""

    sequence: int
    database: bytes
    """Its name; empty for the unnamed one."""
    writes: Writes


class Position(NamedTuple):
    """The end of the journal."""

    generation: int
    end: int
    """Offset in bytes of the next record."""
    sequence: int
    """The number of the last record; grows by one with each commit, over all generations."""
    digest: bytes
    """The digest of the last record."""


FIRST: Final = Position(0, 0, 0, _NO_DIGEST)
_made: Final = tuple.__new__
"""Makes a named tuple without a call of Python for each commit."""
_blake2b: Final = hashlib.blake2b
_encode: Final = msgspec.msgpack.Encoder().encode
decode_record: Final = msgspec.msgpack.Decoder(Record).decode
"""Raises msgspec.MsgspecError."""


def journal_path(directory: Path, generation: int) -> Path:
    return directory / f"journal.{generation}"


def generations(directory: Path, kind: str) -> list[int]:
    """Returns the generations that have a `base` or `journal`, ascending."""
    suffixes = (path.suffix[1:] for path in directory.glob(f"{kind}.*"))
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())


def unpack_position(packed: bytes) -> Position:
    return _made(Position, POSITION.unpack(packed))


def pack_position(position: Position) -> bytes:
    return POSITION.pack(*position)


def pack_generation(position: Position) -> bytes:
    """Returns the generation of a commit that ends there."""
    return position.sequence.to_bytes(8, "little")


def prepare_journal(directory: Path, generation: int) -> None:
    """Makes an empty journal; it is on disk, except for its name, when this returns. Raises
    OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    fd = os.open(journal_path(directory, generation), flags, 0o600)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def start_journal(directory: Path, after: Position) -> Position:
    """Begins the prepared journal of the next generation; returns its position. Raises OSError."""
    generation = after.generation + 1
    fd = os.open(journal_path(directory, generation), os.O_WRONLY | os.O_CLOEXEC)
    try:
        header = _HEADER.pack(_MAGIC, generation, after.sequence, after.digest)
        os.pwrite(fd, header + bytes(_MARK.size), 0)
    finally:
        os.close(fd)
    return Position(generation, _MARK_END, after.sequence, after.digest)


class JournalWriter:
    """Appends the commits of one process. Use it from one thread at a time, inside the write
    transaction."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._generation = -1
        self._fd = -1

    def append(self, position: Position, database: bytes, writes: Writes) -> Position:
        """Appends one commit; returns the position to record in it. Raises OSError."""
        if position.generation != self._generation:
            self._open(position.generation)
        sequence = position.sequence + 1
        payload = _encode((sequence, database, writes))
        digest = _blake2b(position.digest + payload, digest_size=_DIGEST_SIZE).digest()
        record = _RECORD.pack(len(payload), digest) + payload
        if os.pwrite(self._fd, record, position.end) != len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        end = position.end + len(record)
        return _made(Position, (position.generation, end, sequence, digest))

    def take_back(self, before: Position) -> None:
        """Invalidates the record after this position, also on the disk. It is overwritten, since
        its blocks may be all that a full disk has left for the next. Raises OSError."""
        if before.generation == self._generation:
            os.pwrite(self._fd, bytes(_RECORD.size), before.end)
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = self._generation = -1

    def _open(self, generation: int) -> None:
        self.close()
        path = journal_path(self._directory, generation)
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._generation = generation


def sync_journals(directory: Path, generation: int) -> None:
    """Makes every journal up to this generation survive power loss, as far as it goes now.

    The older ones are needed for as long as they are there. Raises OSError, FileNotFoundError among
    them when the newest has meanwhile been replaced by a base.
    """
    for number in {generation, *generations(directory, "journal")}:
        if number > generation:
            continue
        try:
            fd = os.open(journal_path(directory, number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if number == generation:
                raise
            continue
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def mark_synced(fd: int, sequence: int) -> None:
    """Notes in a journal that its commits up to this one are on disk. Raises OSError."""
    if os.pread(fd, len(_MAGIC), 0) == _MAGIC and sequence > read_mark(fd):
        packed = struct.pack("<QQ", sequence, 0)
        os.pwrite(fd, packed + chain_digest(b"", packed), _HEADER.size)


def read_mark(fd: int) -> int:
    """Returns the commit up to which a journal was on disk for certain; 0 if it does not say.
    Raises OSError."""
    head = os.pread(fd, _MARK_END, 0)
    if len(head) < _MARK_END or not head.startswith(_MAGIC):
        return 0
    sequence, _, digest = _MARK.unpack_from(head, _HEADER.size)
    is_whole = digest == chain_digest(b"", head[_HEADER.size : -_DIGEST_SIZE])
    return int(sequence) if is_whole else 0


def read_start(path: Path) -> Position | None:
    """Returns the position before the first record of a journal; None if its header is not whole.
    Raises NotSupported if it is of a later version."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, generation, sequence, digest = _HEADER.unpack(header)
    refuse_later(path, _MAGIC, magic)
    if magic not in (_MAGIC, _FORMER_MAGIC):
        return None
    end = _MARK_END if magic == _MAGIC else _HEADER.size
    return Position(generation, end, sequence, digest)


def read_records(path: Path, start: Position) -> Iterator[tuple[Record, Position]]:
    """Yields the whole records after `start`, each with the position after it."""
    position = start
    with path.open("rb", buffering=_READ_SIZE) as file:
        file.seek(start.end)
        while True:
            prefix = file.read(_RECORD.size)
            if len(prefix) < _RECORD.size:
                return
            length, digest = _RECORD.unpack(prefix)
            payload = file.read(length) if length <= os.fstat(file.fileno()).st_size else b""
            if len(payload) < length or chain_digest(position.digest, payload) != digest:
                return
            record = decode_record(payload)
            if record.sequence != position.sequence + 1:
                raise Corrupt(f"{path} has record {record.sequence} after {position.sequence}")
            end = position.end + _RECORD.size + length
            position = Position(position.generation, end, record.sequence, digest)
            yield record, position


def chained_records(directory: Path, start: Position) -> Iterator[tuple[Record, Position]]:
    """Yields the whole records after `start` in its journal and those after it, each with the
    position after it."""
    reached = start
    for generation in generations(directory, "journal"):
        path = journal_path(directory, generation)
        if generation > start.generation:
            beginning = read_start(path)
            if beginning is None or beginning[2:] != reached[2:]:
                continue
            reached = beginning
        elif generation < start.generation:
            continue
        for record, after in read_records(path, reached):
            reached = after
            yield record, after


def cut_journal(directory: Path, end: Position) -> bool:
    """Drops the bytes behind the last commit, of a process that was killed or never synced; returns
    whether the journal reaches so far. Nobody may be writing. Raises OSError."""
    path = journal_path(directory, end.generation)
    size = path.stat().st_size
    if size > end.end:
        os.truncate(path, end.end)
    return size >= end.end


def replay(
    environment: lmdb.Environment, records: Iterable[tuple[Record, Position]], start: Position
) -> Position:
    """Applies the records after `start`, in transactions of some thousand; returns how far they
    go."""
    reached = start
    batches: dict[bytes, dict[bytes, bytes | None]] = {}
    for record, after in records:
        batch = batches.setdefault(record.database, {})
        pairs = iter(record.writes)
        for key, value in zip(pairs, pairs, strict=True):
            assert key is not None
            batch[key] = value
        reached = after
        if after.sequence % 4_096 == 0:
            _apply(environment, batches)
    _apply(environment, batches)
    return reached


def _apply(environment: lmdb.Environment, batches: dict[bytes, dict[bytes, bytes | None]]) -> None:
    for name, batch in batches.items():
        database = environment.open_db(name or None)
        with environment.begin(database, write=True) as transaction:
            for key in sorted(batch):
                value = batch[key]
                if value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, value)
    batches.clear()


def parse_record(data: bytes | mmap.mmap, offset: int) -> tuple[int, bytes, bytes] | None:
    """Returns the length of the payload by its header, the stored digest, and the payload (shorter
    if `data` end); None if there is no room for a header."""
    if len(data) < offset + _RECORD.size:
        return None
    length, digest = _RECORD.unpack_from(data, offset)
    start = offset + _RECORD.size
    return length, digest, data[start : start + length]


def chain_digest(previous: bytes, payload: bytes) -> bytes:
    """Returns the digest of a record that follows one with the digest `previous`."""
    return _blake2b(previous + payload, digest_size=_DIGEST_SIZE).digest()
