"""The leases of one process: a mapped file that the takers of data files read.

| part | content |
|---|---|
| header | 8 words of eight bytes: magic, process id, its start time, the segments in use |
| segments | 1,024 of four words: deadline (ns of CLOCK_BOOTTIME), first place, count, bytes |
| places | 65,536 inode numbers in network order |

Invariants
- The owner holds a lock (flock) on the file as long as it lives: a file without a lock is a dead
  process's, and whoever finds it removes it. Process id and start time are for people.
- A segment's deadline is written last and cleared first. A taker that reads one half written reads
  a file too much or too few; too few does no harm, since its owner has yet to look at the marks.
- The child of a fork has no part in its parent's table (`begin_anew`).
"""

import bisect
import contextlib
import fcntl
import heapq
import itertools
import mmap
import os
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.base.clock import now
from kvfs.datastore.kernel.ownership import trusted

SEGMENTS: Final = 1_024
"""Leases of one process at once."""
PLACES: Final = 65_536
"""Files that they are on."""
_WORD: Final = 8
_HEADER: Final = 8
_HIGH: Final = 3
_MAGIC: Final = 0x4B56_4653_4C45_4153
_SEGMENT: Final = 4
_FIRST_PLACE: Final = _HEADER + _SEGMENT * SEGMENTS
SIZE: Final = _WORD * (_FIRST_PLACE + PLACES)
_ATTEMPTS: Final = 16


class ReadLease(NamedTuple):
    """A lease as its owner knows it."""

    segment: int
    first: int
    length: int
    size_bytes: int
    deadline_ns: int
    number: int
    """Another one for each lease of a table."""


class ReadLeaseTable:
    """The table of this process; any thread."""

    def __init__(self, directory: Path) -> None:
        """Makes the file in this directory. Raises OSError."""
        self._path, self._fd = _make(directory)
        self._map = mmap.mmap(self._fd, SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._words[0], self._words[1], self._words[2] = _MAGIC, os.getpid(), _start_time()
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, PLACES)]
        """Free places: first and count of each run, in order, none beside another."""
        self._unused: list[int] = []
        self._high = 0
        self._leases: dict[int, ReadLease] = {}
        self._bytes = 0
        self._ends: list[tuple[int, int]] = []
        """A heap of deadlines and numbers of leases, ended ones among them."""
        self._numbers = itertools.count(1)

    def close(self) -> None:
        """Ends all leases; idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            self._words.release()
            self._map.close()
            self._leases.clear()
            self._path.unlink(missing_ok=True)
            os.close(fd)

    @property
    def leased_bytes(self) -> int:
        """The bytes of all leases of this process."""
        return self._bytes

    def of_others(self) -> int:
        """Returns the bytes of all leases of other processes. Raises OSError."""
        directory = os.fspath(self._path.parent)
        return sum(leased_bytes_in(fd) for fd in living_tables(directory, but=self._fd))

    def forget(self) -> None:
        """Lets go of a parent's table, in the child of a fork: its leases stay."""
        fd, self._fd = self._fd, -1
        self._leases = {}
        self._lock = threading.Lock()
        if fd >= 0:
            self._words.release()
            self._map.close()  # it has a descriptor of its own, which holds the parent's lock
            os.close(fd)

    def hold(self, inos: bytes, size_bytes: int, deadline_ns: int, most: float) -> ReadLease | None:
        """Leases these files (inode numbers in network order, one after the other) of so many
        bytes; None: there is no space for it, or all would be of more than `most` bytes."""
        count = len(inos) // _WORD
        with self._lock:
            if self._fd < 0:
                return None
            self._reclaim()
            if self._bytes + size_bytes > most:
                return None
            segment = self._unused.pop() if self._unused else self._high
            first = self._take(count) if segment < SEGMENTS else None
            if first is None:
                if segment < self._high:
                    self._unused.append(segment)
                return None
            lease = ReadLease(segment, first, count, size_bytes, deadline_ns, next(self._numbers))
            self._leases[lease.number] = lease
            self._bytes += size_bytes
            heapq.heappush(self._ends, (deadline_ns, lease.number))
            place = (_FIRST_PLACE + first) * _WORD
            self._map[place : place + len(inos)] = inos
            if segment == self._high:
                self._high += 1
                self._words[_HIGH] = self._high
            at = _HEADER + _SEGMENT * segment
            self._words[at + 1], self._words[at + 2], self._words[at + 3] = first, count, size_bytes
            self._words[at] = deadline_ns
            return lease

    def shorten(self, lease: ReadLease, count: int) -> None:
        """Leaves of a lease its first files alone."""
        with self._lock:
            if lease.number in self._leases:
                # The places beyond stay taken until the lease ends.
                self._words[_HEADER + _SEGMENT * lease.segment + 2] = count

    def release(self, lease: ReadLease) -> None:
        """Ends a lease; idempotent."""
        with self._lock:
            self._end(lease.number)

    def _reclaim(self) -> None:
        moment = int(now() * 1e9)
        while self._ends and self._ends[0][0] <= moment:
            self._end(heapq.heappop(self._ends)[1])

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        self._words[_HEADER + _SEGMENT * lease.segment] = 0
        self._bytes -= lease.size_bytes
        self._unused.append(lease.segment)
        self._give(lease.first, lease.length)
        if len(self._ends) > 4 * SEGMENTS:
            self._ends = [each for each in self._ends if each[1] in self._leases]
            heapq.heapify(self._ends)

    def _take(self, count: int) -> int | None:
        for at, (first, size) in enumerate(self._free):
            if size > count:
                self._free[at] = first + count, size - count
                return first
            if size == count:
                del self._free[at]
                return first
        return None

    def _give(self, first: int, count: int) -> None:
        at = bisect.bisect(self._free, (first, 0))
        if at < len(self._free) and self._free[at][0] == first + count:
            count += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == first:
            at -= 1
            before, size = self._free.pop(at)
            first, count = before, size + count
        self._free.insert(at, (first, count))


def living_tables(directory: str, *, but: int = -1) -> Iterator[int]:
    """Yields a descriptor of each living process's table, except for the one that is open as `but`;
    removes those of dead ones."""
    own = os.fstat(but).st_ino if but >= 0 else -1
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            path = f"{directory}/{name}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                found = os.fstat(fd)
                is_ours = stat.S_ISREG(found.st_mode) and found.st_uid in trusted()
                if is_ours and found.st_ino != own and _is_owned(fd, path):
                    yield fd
            finally:
                os.close(fd)


def _is_owned(fd: int, path: str) -> bool:
    """Returns whether the owner of a table lives; else it is removed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    with contextlib.suppress(OSError):
        os.unlink(path)
    return False


def leased_in(fd: int, wanted: frozenset[int]) -> set[int]:
    """Returns which of these files a table leases. Raises OSError."""
    found: set[int] = set()
    for first, count, _ in _segments(fd):
        raw = os.pread(fd, count * _WORD, (_FIRST_PLACE + first) * _WORD)
        found.update(wanted.intersection(_unpacked(raw)))
    return found


def leased_bytes_in(fd: int) -> int:
    """Returns the bytes of all that a table leases. Raises OSError."""
    return sum(size for _, _, size in _segments(fd))


def _segments(fd: int) -> Iterator[tuple[int, int, int]]:
    """Yields first place, count and bytes of each lease that has not ended."""
    head = os.pread(fd, _FIRST_PLACE * _WORD, 0)
    if len(head) < _FIRST_PLACE * _WORD:
        return
    high = min(struct.unpack_from("=Q", head, _HIGH * _WORD)[0], SEGMENTS)
    moment = int(now() * 1e9)
    segments = head[_HEADER * _WORD : (_HEADER + _SEGMENT * high) * _WORD]
    for deadline, first, count, size in struct.iter_unpack("=4Q", segments):
        if deadline > moment and first + count <= PLACES:
            yield first, count, size


def _unpacked(raw: bytes) -> Sequence[int]:
    return struct.unpack(f">{len(raw) // _WORD}Q", raw[: len(raw) // _WORD * _WORD])


def _make(directory: Path) -> tuple[Path, int]:
    """Makes an empty table, locked. A taker that comes between its making and its lock takes it for
    a dead process's: then another is made."""
    owner = os.stat(directory)
    for number in range(_ATTEMPTS):
        path = directory / f"{os.getpid()}.{os.urandom(4).hex()}.{number}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, SIZE)  # a hole would be a SIGBUS on a full disk
            if owner.st_uid != os.geteuid():
                os.fchown(fd, owner.st_uid, owner.st_gid)  # root's, which the node is to read
            if os.fstat(fd).st_nlink:
                return path, fd
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)
    raise BlockingIOError("the table of leases was taken for a dead process's again and again")


def _start_time() -> int:
    """Returns this process's start, in clock ticks since boot; 0: not known."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
