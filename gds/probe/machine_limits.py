"""Limits of a machine, to which loads are compared: plain reads of a file, copies in memory; and
the states in which they are measured: a file that is in the page cache, or is not."""

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gds.io.memory import allocate
from gds.io.page_cache import cached_bytes
from kvfs.base.descriptors import closing
from kvfs.base.errors import Corrupt, NotSupported
from kvfs.base.units import format_size

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; the module mmap does not name it."""
_COPY_BYTES: Final = 8 << 20
_ATTEMPTS: Final = 8
_PAUSE_S: Final = 0.02
_clock = time.perf_counter


def read_rate(fd: int, *, direct: bool, threads: int, read_bytes: int) -> float:
    """Returns bytes per second of plain reads of a whole file into buffers in huge pages, which are
    reused. `direct`: past the page cache. Raises OSError (EINVAL: this filesystem has no O_DIRECT),
    Corrupt if the file becomes shorter, MemoryError."""
    with _opened(fd, os.O_RDONLY | (os.O_DIRECT if direct else 0)) as own:
        total = os.fstat(own).st_size
        buffers = [_backed(read_bytes) for _ in range(threads)]

        def read(number: int, begin: int) -> None:
            wanted = min(read_bytes, total - begin)
            done = 0
            while done < wanted:
                count = os.preadv(own, [buffers[number][done:]], begin + done)
                if not count:
                    raise Corrupt(f"truncated while it was read: it ends at byte {begin + done}")
                done += count

        return total / timed(threads, range(0, total, read_bytes), read)


def copy_rate(size: int, threads: int) -> float:
    """Returns bytes per second from memory into fresh memory, both in huge pages. Raises
    MemoryError."""
    source = _backed(size)
    back_memory(size)
    target = allocate(size)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target)]

    def copy(_: int, begin: int) -> None:
        wanted = min(_COPY_BYTES, size - begin)
        ctypes.memmove(addresses[1] + begin, addresses[0] + begin, wanted)

    return size / timed(threads, range(0, size, _COPY_BYTES), copy)


def back_memory(size: int) -> None:
    """Makes so much of the free memory immediately available to whoever takes it next. A virtual
    machine's host may take back free memory within seconds (a reporting balloon): filling memory
    then takes a second of CPU per GiB more, for no other reason than a pause before. In huge pages,
    if the kernel has them: small ones are served from those too."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
            with contextlib.suppress(OSError):  # an older kernel
                memory.madvise(advice)


def drop_cached(fd: int) -> None:
    """Drops the file from the page cache; proven, not believed.

    Raises NotSupported if the cache keeps some of it (memory is the only place of a tmpfs; another
    process has it mapped), or if the kernel cannot tell; OSError."""
    os.fdatasync(fd)
    left: int | None = None
    for attempt in range(_ATTEMPTS):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached_bytes(fd, 0, 0)
        if left == 0:
            return
        if left is None:
            raise NotSupported("this kernel does not tell what the page cache has (Linux 6.5 does)")
        # Pages under writeback, or in somebody's hands, stay until that ends.
        time.sleep(_PAUSE_S * 2**attempt)
    raise NotSupported(
        f"the page cache keeps {format_size(left or 0)} of the file: it is in a filesystem of "
        "memory, or mapped by somebody"
    )


def cache(fd: int) -> None:
    """Reads the file into the page cache, as far as memory goes. Raises OSError."""
    buffer, begin = allocate(_COPY_BYTES), 0
    while count := os.preadv(fd, [buffer], begin):
        begin += count


def timed(threads: int, offsets: Iterable[int], work: Callable[[int, int], None]) -> float:
    """Returns seconds until threads, each by its number, have worked on all offsets. Raises what
    one of them raised. Interrupted, it ends with the work under way."""
    left, lock = iter(offsets), threading.Lock()
    errors: list[BaseException] = []
    ended = False

    def run(number: int) -> None:
        try:
            while not ended:
                with lock:
                    offset = next(left, None)
                if offset is None:
                    return
                work(number, offset)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    began = _clock()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        ended = True
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    elapsed = _clock() - began
    if errors:
        raise errors[0]
    return elapsed


@contextlib.contextmanager
def _opened(fd: int, flags: int) -> Iterator[int]:
    """Opens the same file once more."""
    with closing(os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)) as own:
        yield own


def _backed(size: int) -> memoryview:
    memory = allocate(size)
    for offset in range(0, size, mmap.PAGESIZE):
        memory[offset] = 1
    return memory
