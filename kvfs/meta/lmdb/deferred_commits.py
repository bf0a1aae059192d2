"""Commits that are put off until the next one, of any process: a mapped file of what they wrote.

What only its maker may see yet, as a file before its first close, needs no commit of its own: its
writes are kept here, under the engine's writer lock, and whoever commits next writes them first, in
the same transaction. So every transaction that changes anything finds the engine as if each had
been committed at once, and a kill loses none.

| step | a kill after it leaves | what repairs it |
|---|---|---|
| the writes are in the file, not counted | as before | - |
| counted | a deferred commit | the next commit, or the next to open the engine, writes it |
| written by a commit of anybody | counted after a commit that is not the last | it counts no more |
| cleared by the next transaction that writes | nothing | - |

Invariants
- It is changed under the engine's writer lock alone: so a commit, which gives the lock away, leaves
  what it wrote counted.
- What is counted holds after one commit, in one boot: any other that did not write it, and any
  power cut, ends it. Only the process that opens the engine alone asks for the boot: those that
  have it open together are of one, though one in another mount namespace may take it for another.
- All blocks of the file are allocated: a full disk costs nobody a SIGBUS.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Final

import msgspec

from kvfs.meta.lmdb.journal import Writes

_NAME: Final = "deferred"
_SIZE: Final = 16 << 10
_MOST: Final = 16
"""Most commits that are put off at a time: each reader of them looks through all."""
COMMIT_BYTES: Final = 16
"""So much of the end of a journal's packed position is its last commit, by number and digest; a new
base leaves that as it is."""
_HEADER: Final = struct.Struct(f"<IIQ{COMMIT_BYTES}s")
"""Number of commits, end of the last, boot, the commit that they follow."""
_LENGTH: Final = struct.Struct("<I")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[bytes | None]).decode


def end_of_other_boots(directory: Path, boot: int) -> None:
    """Ends what was put off in another boot. Nobody else may have the engine open. Raises
    OSError."""
    path = directory / _NAME
    if not path.exists():
        return
    with path.open("r+b") as file:
        header = file.read(_HEADER.size)
        if len(header) == _HEADER.size and _HEADER.unpack(header)[2] != _unsigned(boot):
            file.seek(0)
            file.write(bytes(_LENGTH.size))


def _unsigned(boot: int) -> int:
    return boot & (1 << 64) - 1


class DeferredCommits:
    """The view of one process. Raises OSError if the file cannot be had."""

    def __init__(self, directory: Path, boot: int) -> None:
        self._boot = _unsigned(boot)
        fd = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self.counted = memoryview(self._map).cast("I")
        """The words of the file; the first is the number of commits. Only looked at by others."""

    def holds_after(self, packed: bytes) -> bool:
        """Returns whether what is counted holds if the journal ends at this packed position."""
        count, _, _, last = _HEADER.unpack_from(self._map)
        return bool(count) and last == packed[-COMMIT_BYTES:]

    def all(self) -> Writes:
        """Returns the writes of all that are counted."""
        writes: Writes = []
        at = _HEADER.size
        for _ in range(self.counted[0]):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(self._map, at)[0]
            writes += _decode(self._map[start:at])
        return writes

    def add(self, commit: bytes, writes: Writes) -> bool:
        """Puts off the writes of a transaction after this commit; returns False if there is no room
        for them. Those that are counted follow the same."""
        count = self.counted[0]
        end = _HEADER.unpack_from(self._map)[1] if count else _HEADER.size
        payload = _encode(writes)
        following = end + _LENGTH.size + len(payload)
        if count >= _MOST or following > _SIZE:
            return False
        self._map[end:following] = _LENGTH.pack(len(payload)) + payload
        self._map[4 : _HEADER.size] = _HEADER.pack(0, following, self._boot, commit)[4:]
        self.counted[0] = count + 1
        return True

    def clear(self) -> None:
        """Forgets them: they are written, or hold no more."""
        self.counted[0] = 0

    def close(self) -> None:
        """Gives the mapping up; idempotent. What is counted stays."""
        if not self._map.closed:
            self.counted.release()
            self._map.close()
