"""Load generators: plain os calls in tight loops over buffers that are made once, so that the
filesystem is what is measured.

Names and buffers are made outside the timed part. Each loop ends at `limit_s` even when its work is
not done, so a slow system costs no more time than a fast one; results are rates over what was done.
Python adds about 1 µs to a call of stat(2) (measured against the same loop in C: 1.4 µs and 1.9 µs
for a name that exists, 4.6 µs and 5.6 µs for one that does not), for every system alike; KVFS's
clients are Python programs, so no helper in C stands in for them.
"""

import contextlib
import mmap
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks._processes import together

MIB: Final = 1 << 20
_FILE_CHUNK: Final = 8 * MIB
_CHECK_EVERY: Final = 32
_STORM_NAMES: Final = 25_000

_clock = time.perf_counter


class ShortTransfer(Exception):
    """A read or write moved fewer bytes than asked."""


def buffer(size_bytes: int) -> mmap.mmap:
    """Page-aligned (for O_DIRECT), touched, and not compressible beyond its 1 MiB period."""
    memory = mmap.mmap(-1, size_bytes)
    piece = os.urandom(min(size_bytes, MIB))
    for offset in range(0, size_bytes, len(piece)):
        memory[offset : offset + len(piece)] = piece[: size_bytes - offset]
    return memory


# --- blocks: whole files, written and read in one call ------------------------------------------


def write_blocks(
    folder: Path, data: mmap.mmap, count: int, limit_s: float, *, direct: bool = False
) -> tuple[float, list[str]]:
    """Writes, renames into place; returns bytes per second and the names. No fsync, as the clients
    do.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if direct else 0)
    tag = secrets.token_hex(6)
    names = [f"{folder}/{tag}{number:06x}.bin" for number in range(count)]
    size, done = len(data), 0
    began = _clock()
    until = began + limit_s
    for name in names:
        temporary = name + ".tmp"
        descriptor = os.open(temporary, flags, 0o644)
        try:
            if os.write(descriptor, data) != size:
                raise ShortTransfer(temporary)
        finally:
            os.close(descriptor)
        os.replace(temporary, name)
        done += 1
        if _clock() > until:
            break
    return done * size / (_clock() - began), names[:done]


def read_blocks(
    paths: Sequence[str], size: int, threads: int, limit_s: float, *, once: bool = False
) -> float:
    """Bytes per second over all threads: open, one read, close for each path. `once`: each path
    once, else until `limit_s`.
    """
    shares = [paths[first::threads] for first in range(threads)]
    buffers = [buffer(size) for _ in shares]
    amounts = [0] * threads
    errors: list[Exception] = []
    ready = threading.Barrier(threads + 1)

    def work(number: int) -> None:
        into, share = [buffers[number]], shares[number]
        ready.wait()
        until = _clock() + limit_s
        try:
            while True:
                for path in share:
                    amounts[number] += _read_whole(path, into, size)
                    if _clock() > until:
                        return
                if once:
                    return
        except (OSError, ShortTransfer) as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = _clock()
    for worker in workers:
        worker.join()
    elapsed = _clock() - began
    if errors:
        raise errors[0]
    return sum(amounts) / elapsed


def _read_whole(path: str, into: list[mmap.mmap], size: int) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if os.readv(descriptor, into) != size:
            raise ShortTransfer(path)
    finally:
        os.close(descriptor)
    return size


# --- one large file -----------------------------------------------------------------------------


def write_file(path: Path, size_bytes: int) -> None:
    data = buffer(_FILE_CHUNK)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        for _ in range(0, size_bytes, _FILE_CHUNK):
            if os.write(descriptor, data) != _FILE_CHUNK:
                raise ShortTransfer(str(path))
    finally:
        os.close(descriptor)


def read_file(path: Path, limit_s: float) -> float:
    """Bytes per second of one sequential pass in calls of 8 MiB."""
    amount, elapsed = _pass(path, limit_s)
    return amount / elapsed


def read_whole(path: Path, size: int, limit_s: float) -> float:
    """Seconds of such a pass over all of a file. Raises ShortTransfer."""
    amount, elapsed = _pass(path, limit_s)
    if amount != size:
        raise ShortTransfer(str(path))
    return elapsed


def _pass(path: Path, limit_s: float) -> tuple[int, float]:
    """Bytes and seconds."""
    into, amount = [mmap.mmap(-1, _FILE_CHUNK)], 0
    began = _clock()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while (got := os.readv(descriptor, into)) and _clock() - began < limit_s:
            amount += got
    finally:
        os.close(descriptor)
    return amount, _clock() - began


def read_mapping(path: Path, limit_s: float) -> float:
    """Bytes per second of one pass over a private mapping, copied out in pieces of 8 MiB."""
    into, amount = memoryview(mmap.mmap(-1, _FILE_CHUNK)), 0
    began = _clock()
    with path.open("rb", buffering=0) as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    view = memoryview(mapping)
    try:
        while amount < len(view) and _clock() - began < limit_s:
            into[:] = view[amount : amount + _FILE_CHUNK]
            amount += _FILE_CHUNK
        return amount / (_clock() - began)
    finally:
        view.release()
        mapping.close()


# --- names --------------------------------------------------------------------------------------


def create_files(names: Sequence[str], limit_s: float) -> int:
    """Creates and closes; returns how many were made in the time."""
    return _count(names, limit_s, create)


def create(name: str) -> None:
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))


def per_name(
    names: Sequence[str], limit_s: float, call: Callable[[str], object]
) -> tuple[float, int]:
    """Seconds per call, and how many calls there were."""
    began = _clock()
    done = _count(names, limit_s, call)
    return (_clock() - began) / done, done


def _count(names: Sequence[str], limit_s: float, call: Callable[[str], object]) -> int:
    until = _clock() + limit_s
    for first in range(0, len(names), _CHECK_EVERY):
        share = names[first : first + _CHECK_EVERY]
        for name in share:
            call(name)
        if _clock() > until:
            return first + len(share)
    return len(names)


def list_folder(folder: Path, expected: int) -> float:
    """Seconds per name to list and stat a directory that holds `expected` names."""
    began = _clock()
    with os.scandir(folder) as entries:
        found = sum(1 for entry in entries if entry.stat() is not None)
    elapsed = _clock() - began
    if found != expected:
        raise FileNotFoundError(f"{found} names listed of {expected} in {folder}")
    return elapsed / found


def new_names(folder: Path, count: int) -> list[str]:
    """Names that exist nowhere, of the length of a block's hash."""
    tag = secrets.token_hex(8)
    return [f"{folder}/{tag}{number:016x}" for number in range(count)]


def stat_missing(name: str) -> None:
    try:
        os.stat(name)
    except FileNotFoundError:
        return
    raise FileExistsError(name)


def lone_stats(folder: Path, count: int, pause_s: float) -> float:
    """Median seconds of a single stat of a new missing name, the system at rest before each."""
    times = []
    for name in new_names(folder, count):
        time.sleep(pause_s)
        began = _clock()
        stat_missing(name)
        times.append(_clock() - began)
    return statistics.median(times)


def stat_storm(folder: Path, processes: int, limit_s: float) -> float:
    """Seconds per stat of a new missing name, over several processes that do nothing else."""

    def prepare() -> Callable[[], float]:
        names = new_names(folder, _STORM_NAMES)
        return lambda: per_name(names, limit_s, stat_missing)[0]

    return 1 / sum(1 / seconds for seconds in together([prepare] * processes))


_BUSY_S = 60
"""After which a busy process ends, whatever became of who started it."""
_SPIN = f"import time; end = time.time() + {_BUSY_S}\nwhile time.time() < end: pass"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute, each in a session of its own as services
    are."""
    command = [sys.executable, "-S", "-c", _SPIN]
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.wait()
