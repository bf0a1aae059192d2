"""Many reads of a file by two calls of the kernel: Linux's native AIO (io_submit(2)).

With O_DIRECT on ext4, xfs or btrfs all of them reach the disk at once; elsewhere the kernel does
one after the other. Containers may use it by default, unlike io_uring.

Invariants
- When `read` has returned or raised, none of its reads is under way any more.
- A read that the kernel refuses is a result, not an error.
- Contexts are reused, by any thread: the kernel takes 30 ms to end one (measured, 2 processors). A
  process that was forked has none of them.
"""

import contextlib
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MOST: Final = 128
"""Reads at once. Measured with pieces of 2 and 5.5 KiB, cold, a virtual NVMe disk with 2
processors, 2 to 8 threads: 17 to 19 µs each, 17 to 22 with 32."""
_KEPT: Final = 8
"""Idle contexts that are kept: as many as a load has threads."""
_IOCB: Final = struct.Struct("=QIIHhIQQqQII")
"""Data, key, flags of the read, operation (0: pread), priority, descriptor, address, length,
offset, reserved, flags, descriptor to notify: struct iocb of linux/aio_abi.h, little-endian."""
_EVENT: Final = struct.Struct("=QQqq")
"""Data, iocb, result, a second result."""


class _Calls(NamedTuple):
    """Numbers of system calls."""

    setup: int
    destroy: int
    submit: int
    getevents: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}
_libc: Final = ctypes.CDLL(None, use_errno=True)


class AioRead(NamedTuple):
    """A read. With O_DIRECT all of its fields are aligned."""

    address: int
    size: int
    offset: int


class NativeAio:
    """A context of the kernel. One thread uses it at a time."""

    def __init__(self) -> None:
        """Raises OSError: the kernel lacks it, forbids it, or has none left to give (sysctl
        fs.aio-max-nr)."""
        self._context = ctypes.c_ulong(0)
        self._calls = _CALLS.get(platform.machine())
        if self._calls is None:
            raise OSError(errno.ENOSYS, f"not known how on {platform.machine()}")
        if _call(self._calls.setup, ctypes.c_ulong(MOST), ctypes.byref(self._context)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"io_setup: {os.strerror(number)}")
        self._blocks = ctypes.create_string_buffer(_IOCB.size * MOST)
        first = ctypes.addressof(self._blocks)
        self._pointers = (ctypes.c_void_p * MOST)(
            *range(first, first + _IOCB.size * MOST, _IOCB.size)
        )
        self._events = ctypes.create_string_buffer(_EVENT.size * MOST)

    def read(self, fd: int, reads: Sequence[AioRead]) -> list[int]:
        """Reads at most `MOST` pieces; returns for each the bytes read, fewer than asked for at the
        file's end, or an error's number below 0. Waits without a deadline, as read(2) does. Raises
        OSError."""
        for at, (address, size, offset) in enumerate(reads):
            block = (at, 0, 0, 0, 0, fd, address, size, offset, 0, 0, 0)
            _IOCB.pack_into(self._blocks, at * _IOCB.size, *block)
        results = [-errno.EAGAIN] * len(reads)
        try:
            left = self._submit(results)
            while left:
                left -= self._gather(left, results)
        except BaseException:
            self.close()
            raise
        return results

    def _submit(self, results: list[int]) -> int:
        """Returns how many reads are under way."""
        assert self._calls is not None
        begun = at = 0
        while at < len(results):
            pointers = ctypes.byref(self._pointers, at * ctypes.sizeof(ctypes.c_void_p))
            count = _call(self._calls.submit, self._context, len(results) - at, pointers)
            if count <= 0:  # the first of them was refused
                results[at] = -ctypes.get_errno() or -errno.EAGAIN
                at += 1
                continue
            begun += count
            at += count
        return begun

    def _gather(self, left: int, results: list[int]) -> int:
        """Returns how many reads ended: at least one, unless a signal came."""
        assert self._calls is not None
        count = _call(self._calls.getevents, self._context, left, left, self._events, None)
        if count < 0:
            if ctypes.get_errno() == errno.EINTR:
                return 0
            raise OSError(ctypes.get_errno(), "io_getevents")
        for at in range(count):
            number, _, result, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
            results[number] = result
        return count

    def close(self) -> None:
        """Waits for the reads under way. Idempotent; later reads are refused."""
        context, self._context = self._context, ctypes.c_ulong(0)
        if self._calls is not None and context:
            _call(self._calls.destroy, context)

    def __del__(self) -> None:
        self.close()


_idle: Final[list[NativeAio]] = []
os.register_at_fork(after_in_child=_idle.clear)


@contextlib.contextmanager
def lend() -> Iterator[NativeAio]:
    """Lends a context that nobody else uses until the block ends. Raises the OSError of
    `NativeAio`."""
    try:
        aio = _idle.pop()
    except IndexError:
        aio = NativeAio()
    yield aio  # where that raises it is not used again
    if len(_idle) < _KEPT:
        _idle.append(aio)
    else:
        aio.close()


def why_not() -> str:
    """Returns why native AIO is missing; empty: it is available."""
    try:
        NativeAio().close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _call(number: int, *arguments: object) -> int:
    """Returns the kernel's long, all values of which fit an int."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc.syscall(ctypes.c_long(number), *wide))
