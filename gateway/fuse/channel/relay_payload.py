"""READ and WRITE in relay mode: payload between /dev/fuse and a data file, in a few worker threads.

The event loop serves a request itself when its pages are cached (RWF_NOWAIT), or while writes are
as fast as memory; everything that may wait for a disk goes to a thread, which answers the kernel
itself. A hand-over costs a wake-up and a hand-over of the GIL, as much as moving 1 MiB."""

import contextlib
import errno
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from gateway.fuse.codec.protocol import BUFFER_BYTES, OUT_HEADER, WRITE_OUT

log = logging.getLogger(__name__)
_THREADS: Final = 4
_SLOW_S: Final = 0.003
_PENALTY_S: Final = 0.25
_GONE: Final = (errno.ENOENT, errno.ENODEV, errno.EBADF)
Job = Callable[["PayloadLane"], None]


class PayloadLane:
    """A thread's own page-aligned buffer: reused, so that no payload becomes a Python object."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.memory = mmap.mmap(-1, BUFFER_BYTES)
        self.view = memoryview(self.memory)

    def reply_cached(self, unique: int, fd: int, offset: int, size: int) -> bool:
        """Answers a READ if that needs no disk. Returns whether it did."""
        try:
            n = os.preadv(fd, [self.view[:size]], offset, os.RWF_NOWAIT)
        except OSError:
            return False
        if n < size and offset + n < os.fstat(fd).st_size:
            return False
        reply(self.device, [OUT_HEADER.pack(OUT_HEADER.size + n, 0, unique), self.view[:n]])
        return True

    def reply_read(self, unique: int, fd: int, offset: int, size: int) -> None:
        """Answers a READ from the data file; a short answer is the end of the file."""
        try:
            n = _read_full(fd, self.view[:size], offset)
        except OSError as e:
            reply_error(self.device, unique, e.errno or errno.EIO)
            return
        reply(self.device, [OUT_HEADER.pack(OUT_HEADER.size + n, 0, unique), self.view[:n]])


def _read_full(fd: int, into: memoryview, offset: int) -> int:
    done = 0
    while done < len(into):
        n = os.preadv(fd, [into[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


def reply(device: int, parts: list[bytes | memoryview]) -> None:
    """Writes one message to the kernel, which takes none for a request that was interrupted or a
    mount that is gone."""
    try:
        os.writev(device, parts)
    except OSError as e:
        if e.errno not in _GONE:
            raise


def reply_error(device: int, unique: int, code: int) -> None:
    """Answers a request with an errno."""
    reply(device, [OUT_HEADER.pack(OUT_HEADER.size, -code, unique)])


def write_payload(device: int, unique: int, fd: int, offset: int, payload: memoryview) -> None:
    """Answers a WRITE: its payload goes to the data file."""
    done = 0
    try:
        while done < len(payload):
            done += os.pwrite(fd, payload[done:], offset + done)
    except OSError as e:
        if not done:
            reply_error(device, unique, e.errno or errno.EIO)
            return
    body = WRITE_OUT.pack(done, 0)
    reply(device, [OUT_HEADER.pack(OUT_HEADER.size + len(body), 0, unique), body])


class WritePace:
    """Decides whether the loop may write by itself: as long as the disk takes data as fast as
    memory does.

    A context for one write. After a write that had to wait, the next ones go to the workers for a
    while.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._began = 0.0

    def quick(self) -> bool:
        """Returns whether the last writes were quick."""
        return time.monotonic() >= self._until

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        if now - self._began > _SLOW_S:
            self._until = now + _PENALTY_S


class Workers:
    """Threads that answer READs and WRITEs which may wait."""

    def __init__(self, device: int) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._run, args=(device,), name=f"kvfs-payload-{i}", daemon=True
            )
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Runs `job` in a worker. The waiting callers bound the queue: each blocked caller counts
        once, and so does the kernel's own readahead (max_background)."""
        self._jobs.put(job)

    def close(self, deadline_s: float) -> bool:
        """Ends the threads after the queued jobs. Returns whether all ended in time. Blocks the
        calling thread."""
        for _ in self._threads:
            self._jobs.put(None)
        end = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, device: int) -> None:
        lane = PayloadLane(device)
        while (job := self._jobs.get()) is not None:
            try:
                job(lane)
            except Exception:  # a bug: this request hangs, the others must not
                log.exception("a READ or WRITE was not answered")


class PayloadBuffers:
    """Buffers for reading requests; one that holds a WRITE's payload is lent to a worker until the
    payload is written. At most LIMIT are made."""

    LIMIT: Final = 8

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._made = 0

    def take(self) -> memoryview | None:
        """Returns a buffer of BUFFER_BYTES; None while all are lent."""
        with contextlib.suppress(IndexError):
            return self._free.pop()
        if self._made == self.LIMIT:
            return None
        self._made += 1
        return memoryview(mmap.mmap(-1, BUFFER_BYTES))

    def give(self, buffer: memoryview) -> None:
        """Takes back a buffer."""
        self._free.append(buffer)
