"""Random operations on one file, each checked against a copy in memory.

    python tests/integration/exerciser.py DIRECTORY [--seed N] [--operations N]

Reads and writes (buffered, direct, appended, through short and long-lived shared mappings),
truncation, allocation, punched and zeroed ranges, copies within the file and from another, syncs,
dropped caches and reopening follow each other in an order that the seed fixes. After every
operation the size, and after every read the bytes, must be what the copy in memory says. An
operation that the filesystem lacks (EOPNOTSUPP at a trial before the first operation) is left out
and named in the result.
"""

import argparse
import collections
import ctypes
import errno
import mmap
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

PAGE = mmap.PAGESIZE
LIMIT = 1 << 20
_KEEP_SIZE, _PUNCH, _ZERO = 1, 2, 16
_HISTORY = 40

_libc = ctypes.CDLL(None, use_errno=True)


class Mismatch(AssertionError):
    """The file is not what it should be; the message tells the last operations."""


def _fallocate(fd: int, mode: int, start: int, length: int) -> None:
    if _libc.fallocate(fd, mode, ctypes.c_long(start), ctypes.c_long(length)) < 0:
        raise OSError(ctypes.get_errno(), "fallocate")


class Exerciser:
    """One file under test, its copy in memory, and the operations between them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.path = directory / "exercised"
        self.other = directory / "donor"
        self.random = random.Random(seed)
        self.seed = seed
        self.expected = bytearray()
        self.done: collections.deque[str] = collections.deque(maxlen=_HISTORY)
        self.counts: collections.Counter[str] = collections.Counter()
        self.buffer = mmap.mmap(-1, LIMIT + PAGE)
        self.long_view: mmap.mmap | None = None
        self.fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        self.direct = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        self.donation = self.random.randbytes(LIMIT)
        self.other.write_bytes(self.donation)
        self.donor = os.open(self.other, os.O_RDONLY)
        self.lacking: list[str] = []
        self.operations = self._supported()

    def _supported(self) -> list[Callable[[], str]]:
        always = [
            self.read,
            self.read,
            self.read_path,
            self.read_direct,
            self.read_mapped,
            self.write,
            self.write,
            self.write_direct,
            self.write_mapped,
            self.write_long_mapped,
            self.append,
            self.truncate,
            self.copy_within,
            self.copy_from_other,
            self.sync,
            self.drop_caches,
            self.reopen,
        ]
        for operation, mode in (
            (self.allocate, 0),
            (self.allocate_beyond, _KEEP_SIZE),
            (self.punch, _PUNCH | _KEEP_SIZE),
            (self.zero, _ZERO),
        ):
            try:
                _fallocate(self.fd, mode, 0, PAGE)
                always.append(operation)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self.lacking.append(operation.__name__)
        os.ftruncate(self.fd, 0)
        return always

    def run(self, operations: int) -> None:
        """Perform this many operations. Raises Mismatch, or the OSError of a failed call."""
        for _ in range(operations):
            operation = self.random.choice(self.operations)
            self.counts[operation.__name__] += 1
            self.done.append(operation.__name__)
            try:
                self.done[-1] += " " + operation()
            except OSError as error:
                raise Mismatch(self._tell(f"failed: {error}")) from error
            self._check_size()
        self._check_bytes(self.path.read_bytes(), 0, "at the end")

    def close(self) -> None:
        if self.long_view is not None:
            self.long_view.close()
        for fd in (self.fd, self.direct, self.donor):
            os.close(fd)
        self.buffer.close()

    # --- checks ---

    def _tell(self, what: str) -> str:
        return "\n  ".join([f"seed {self.seed}: {what}; the last operations:", *self.done])

    def _check_size(self) -> None:
        for size in (os.fstat(self.fd).st_size, self.path.stat().st_size):
            if size != len(self.expected):
                raise Mismatch(self._tell(f"size {size}, expected {len(self.expected)}"))

    def _check_bytes(self, found: bytes, start: int, how: str) -> None:
        wanted = self.expected[start : start + len(found)]
        if found == wanted:
            return
        at = next((n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), -1)
        raise Mismatch(self._tell(f"{how}: {len(found)} bytes from {start} differ at {start + at}"))

    # --- ranges ---

    def _range(self, limit: int, unit: int = 1) -> tuple[int, int]:
        """A random start and length below the limit, small lengths more often."""
        start = self.random.randrange(max(limit // unit, 1)) * unit
        most = max((limit - start) // unit, 1)
        length = min(most, 1 + int(most * self.random.random() ** 3)) * unit
        return start, length

    def _put(self, start: int, data: bytes) -> None:
        if start > len(self.expected):
            self.expected.extend(bytes(start - len(self.expected)))
        self.expected[start : start + len(data)] = data

    # --- reading ---

    def read(self) -> str:
        start, length = self._range(LIMIT)
        found = os.pread(self.fd, length, start)
        self._check_length(found, start, length)
        return f"{start}+{length}"

    def _check_length(self, found: bytes, start: int, length: int) -> None:
        wanted = max(min(length, len(self.expected) - start), 0)
        if len(found) != wanted:
            raise Mismatch(self._tell(f"{len(found)} bytes from {start}, expected {wanted}"))
        self._check_bytes(found, start, "read")

    def read_path(self) -> str:
        self._check_length(self.path.read_bytes(), 0, LIMIT)
        return ""

    def read_direct(self) -> str:
        start, length = self._range(LIMIT, PAGE)
        with memoryview(self.buffer) as whole, whole[:length] as part:
            count = os.preadv(self.direct, [part], start)
        self._check_length(self.buffer[:count], start, length)
        return f"{start}+{length}"

    def read_mapped(self) -> str:
        if not self.expected:
            return "nothing"
        start, length = self._range(len(self.expected))
        with mmap.mmap(self.fd, len(self.expected), prot=mmap.PROT_READ) as view:
            self._check_bytes(view[start : start + length], start, "mapped read")
        return f"{start}+{length}"

    # --- writing ---

    def write(self) -> str:
        start, length = self._range(LIMIT)
        return self._written(start, os.pwrite(self.fd, self._fresh(length), start), length)

    def _fresh(self, length: int) -> bytes:
        self.latest = self.random.randbytes(length)
        return self.latest

    def _written(self, start: int, count: int, length: int) -> str:
        if count != length:
            raise Mismatch(self._tell(f"wrote {count} of {length} bytes at {start}"))
        self._put(start, self.latest)
        return f"{start}+{length}"

    def write_direct(self) -> str:
        start, length = self._range(LIMIT, PAGE)
        self.buffer[:length] = self._fresh(length)
        with memoryview(self.buffer) as whole, whole[:length] as part:
            return self._written(start, os.pwritev(self.direct, [part], start), length)

    def write_mapped(self) -> str:
        if not self.expected:
            return "nothing"
        start, length = self._range(len(self.expected))
        with mmap.mmap(self.fd, len(self.expected)) as view:
            view[start : start + length] = self._fresh(length)
        return self._written(start, length, length)

    def write_long_mapped(self) -> str:
        """Through a mapping that was made before other operations, and has outlived its handle."""
        if not self.expected:
            return "nothing"
        if self.long_view is None:
            os.ftruncate(self.fd, LIMIT)
            self.long_view = mmap.mmap(self.fd, LIMIT)
            os.ftruncate(self.fd, len(self.expected))
        start, length = self._range(len(self.expected))
        self._check_bytes(self.long_view[start : start + length], start, "long mapping")
        self.long_view[start : start + length] = self._fresh(length)
        return self._written(start, length, length)

    def append(self) -> str:
        length = self.random.randrange(1, 5000)
        if len(self.expected) + length > LIMIT:
            return "full"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            return self._written(len(self.expected), os.write(fd, self._fresh(length)), length)
        finally:
            os.close(fd)

    # --- shape ---

    def truncate(self) -> str:
        size = self.random.randrange(LIMIT)
        if self.random.random() < 0.5:
            os.ftruncate(self.fd, size)
        else:
            os.truncate(self.path, size)
        del self.expected[size:]
        self.expected.extend(bytes(size - len(self.expected)))
        return str(size)

    def allocate(self) -> str:
        start, length = self._range(LIMIT)
        _fallocate(self.fd, 0, start, length)
        if start + length > len(self.expected):
            self.expected.extend(bytes(start + length - len(self.expected)))
        return f"{start}+{length}"

    def allocate_beyond(self) -> str:
        start, length = self._range(LIMIT)
        _fallocate(self.fd, _KEEP_SIZE, start, length)
        return f"{start}+{length}"

    def punch(self) -> str:
        start, length = self._range(LIMIT)
        _fallocate(self.fd, _PUNCH | _KEEP_SIZE, start, length)
        end = min(start + length, len(self.expected))
        if start < end:
            self.expected[start:end] = bytes(end - start)
        return f"{start}+{length}"

    def zero(self) -> str:
        start, length = self._range(LIMIT)
        _fallocate(self.fd, _ZERO, start, length)
        self._put(start, bytes(length))
        return f"{start}+{length}"

    # --- copies ---

    def copy_within(self) -> str:
        size = len(self.expected)
        if size < 2:
            return "too small"
        half = size // 2
        start, length = self._range(half)
        target = half + self.random.randrange(min(LIMIT - half - length, half) + 1)
        data = bytes(self.expected[start : start + length])
        self._copy(self.fd, start, target, length)
        self._put(target, data)
        return f"{start}+{length} to {target}"

    def copy_from_other(self) -> str:
        start, length = self._range(LIMIT)
        target = self.random.randrange(LIMIT - length + 1)
        self._copy(self.donor, start, target, length)
        self._put(target, self.donation[start : start + length])
        return f"{start}+{length} to {target}"

    def _copy(self, source: int, start: int, target: int, length: int) -> None:
        while length:
            step = os.copy_file_range(source, self.fd, length, start, target)
            if not step:
                raise Mismatch(self._tell(f"copied nothing from {start}"))
            start, target, length = start + step, target + step, length - step

    # --- handles and caches ---

    def sync(self) -> str:
        call = self.random.choice((os.fsync, os.fdatasync))
        call(self.fd)
        if self.long_view is not None and self.random.random() < 0.5:
            self.long_view.flush()
        return call.__name__

    def drop_caches(self) -> str:
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return ""

    def reopen(self) -> str:
        what = self.random.choice(("plain", "direct", "both", "mapping", "all"))
        if what in ("mapping", "all") and self.long_view is not None:
            self.long_view.close()
            self.long_view = None
        if what in ("plain", "both", "all"):
            os.close(self.fd)
        if what in ("direct", "both", "all"):
            os.close(self.direct)
            self.direct = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        if what in ("plain", "both", "all"):
            self.fd = os.open(self.path, os.O_RDWR)
        return what


def exercise(directory: Path, seed: int, operations: int) -> str:
    """Run it; returns what was done, in one line. Raises Mismatch."""
    exerciser = Exerciser(directory, seed)
    try:
        exerciser.run(operations)
    finally:
        exerciser.close()
    done = ", ".join(f"{name} {count}" for name, count in sorted(exerciser.counts.items()))
    lacking = f"; lacking: {', '.join(exerciser.lacking)}" if exerciser.lacking else ""
    return f"seed {seed}: {operations} operations: {done}{lacking}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Random file operations, checked.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--operations", type=int, default=10_000)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    home = options.directory / f"exerciser-{options.seed}"
    home.mkdir()
    try:
        print(exercise(home, options.seed, options.operations))
    except Mismatch as error:
        sys.exit(str(error))
    for path in home.iterdir():
        path.unlink()
    home.rmdir()


if __name__ == "__main__":
    main()
