"""The contents of a journal behind the first record that cannot be read, and the way past that
record.

A power cut leaves a torn end, behind which nothing was acknowledged: replay ends there. Damage (a
bit that flipped, a sector that was lost, a file cut short) looks alike at its first byte. Two
things tell it apart: a mark says up to which commit the journals were on disk, and whole records
follow. If the sector of the mark was lost itself, the header has gone with it, which no power cut
does to the journal that a base was made with.

The way past one record is the stored chain: the next record's digest covers this one's. If a digest
was damaged the record's own is tried, if a length was damaged the places of the records that
follow. Nothing else is believed: bytes that merely look like a record may be a user's, in an
extended attribute.
"""

import mmap
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.base.errors import UNDECODABLE
from kvfs.meta.lmdb.journal import (
    Position,
    Record,
    chain_digest,
    chained_records,
    decode_record,
    generations,
    journal_path,
    parse_record,
    read_mark,
    read_start,
)

_PAYLOAD: Final = re.compile(rb"\x93(?:[\x00-\x7f]|\xcc.|\xcd..|\xce.{4}|\xcf.{8})\xc4", re.DOTALL)
"""The beginning of each payload: an array of three, of which the first is a number, the second
bytes."""
_HEADER_BYTES: Final = 12
"""Bytes of a record's header."""
_LOOKED_AT: Final = 16
"""Records that follow one with a damaged length and may be the next."""


class JournalDamage(NamedTuple):
    """The first record that cannot be read, and the records behind it."""

    path: Path
    offset: int
    """The offset in bytes."""
    sequence: int
    """The commit's, as the chain counts."""
    synced: int
    """The last commit that is known to have been on disk."""
    following: int
    """The number of whole records behind it."""
    is_certain: bool
    """Whether acknowledged commits are missing; else a power cut may have left the same."""

    def __str__(self) -> str:
        known = f"it was on disk up to commit {self.synced}, and " if self.is_certain else ""
        return (
            f"{self.path} is damaged at byte {self.offset}: commit {self.sequence} cannot be read;"
            f" {known}{self.following} whole commits follow"
        )


def find(directory: Path, start: Position, reached: Position, least: int) -> JournalDamage | None:
    """Returns the damage behind the last record of the chain that begins at `start`; None for a
    torn end. `least`: a commit that was on disk, besides those that the marks name. Raises
    OSError."""
    synced = max(start.sequence, least, *_marks(directory))
    path = journal_path(directory, reached.generation)
    following = 0
    for generation in generations(directory, "journal"):
        if generation >= reached.generation:
            offset = reached.end + 1 if generation == reached.generation else 0
            data = _contents(journal_path(directory, generation))
            following += sum(1 for _ in _records_in(data, offset, reached.sequence))
    size = path.stat().st_size if path.exists() else -1
    is_beheaded = size > reached.end and _is_beheaded(journal_path(directory, start.generation))
    is_certain = size < reached.end or synced > reached.sequence or is_beheaded
    if not following and not is_certain:
        return None
    return JournalDamage(path, reached.end, reached.sequence + 1, synced, following, is_certain)


def _is_beheaded(path: Path) -> bool:
    """Returns whether the journal of a base has lost its header, and perhaps the mark behind it. It
    was on disk before the base had its name."""
    return path.exists() and read_start(path) is None


def records_past_damage(
    directory: Path, start: Position, lost: list[int]
) -> Iterator[tuple[Record, Position]]:
    """Like `journal.chained_records`, and continues behind each damaged record, as far as the
    stored chain leads; `lost` gets the sequence numbers of those that cannot be read."""
    reached = start
    while True:
        for record, after in chained_records(directory, reached):
            reached = after
            yield record, after
        step = _step_over(directory, reached)
        if step is None:
            return
        past, after = step
        if past is not None:
            yield past, after
        elif after.sequence > reached.sequence:
            lost.append(after.sequence)
        reached = after


def _step_over(directory: Path, reached: Position) -> tuple[Record | None, Position] | None:
    """Steps over one record: returns its content if its payload is whole, and the position; None:
    the chain ends here."""
    data = _contents(journal_path(directory, reached.generation))
    found = parse_record(data, reached.end)
    if found is None:
        return _step_into_next(directory, reached)
    length, stored, payload = found
    begin = reached.end + _HEADER_BYTES
    if len(payload) == length:
        own = chain_digest(reached.digest, payload)
        for digest in (own, stored):
            after = Position(reached.generation, begin + length, reached.sequence + 1, digest)
            if _goes_on(directory, data, after):
                return (decode_record(payload) if digest == own else None), after
    anchors = islice(_records_in(data, reached.end + 1, reached.sequence), _LOOKED_AT)
    for end in (*(offset for offset, _ in anchors), len(data)):
        payload = data[begin:end]
        if payload and chain_digest(reached.digest, payload) == stored:
            after = Position(reached.generation, end, reached.sequence + 1, stored)
            return decode_record(payload), after
    return None


def _step_into_next(directory: Path, reached: Position) -> tuple[None, Position] | None:
    """Steps into the next journal, whose header is damaged and whose first record is chained."""
    path = journal_path(directory, reached.generation + 1)
    if not path.exists() or read_start(path) is not None:
        return None
    data = _contents(path)
    for offset, _ in islice(_records_in(data, 0, reached.sequence), 1):
        at = Position(reached.generation + 1, offset, reached.sequence, reached.digest)
        if _goes_on(directory, data, at):
            return None, at
    return None


def _goes_on(directory: Path, data: "_Contents", after: Position) -> bool:
    """Returns whether the record there, or the next journal, is chained to the digest."""
    found = parse_record(data, after.end)
    if found is None:
        path = journal_path(directory, after.generation + 1)
        start = read_start(path) if path.exists() else None
        return start is not None and start[2:] == after[2:]
    length, digest, payload = found
    return len(payload) == length and chain_digest(after.digest, payload) == digest


def _records_in(data: "_Contents", offset: int, after: int) -> Iterator[tuple[int, Record]]:
    """Yields offset and content of whole records, as they seem, after the commit `after`."""
    at = offset
    while (match := _PAYLOAD.search(data, at + _HEADER_BYTES)) is not None:
        at = match.start() - _HEADER_BYTES
        found = parse_record(data, at)
        record = None if found is None else _decoded(found[0], found[2])
        if found is None or record is None or record.sequence <= after:
            at += 1
            continue
        yield at, record
        at += _HEADER_BYTES + found[0]


def _decoded(length: int, payload: bytes) -> Record | None:
    if len(payload) < length:
        return None
    try:
        return decode_record(payload)
    except UNDECODABLE:
        return None


def _marks(directory: Path) -> list[int]:
    found = [0]
    for generation in generations(directory, "journal"):
        fd = os.open(journal_path(directory, generation), os.O_RDONLY | os.O_CLOEXEC)
        try:
            found.append(read_mark(fd))
        finally:
            os.close(fd)
    return found


_Contents = bytes | mmap.mmap


def _contents(path: Path) -> _Contents:
    """Returns the contents of a journal that nobody writes."""
    if not path.exists() or not path.stat().st_size:
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
