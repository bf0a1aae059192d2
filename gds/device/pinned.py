"""Buffers of the host from which a device copies without the driver's own staging: memory that is
registered with it once, which takes longer than filling it, and lent again and again.

Memory that is not lent is kept for the next load, up to `KEPT_BYTES`. Memory that cannot be
registered is lent all the same, and not kept: copies are slower then."""

import threading
from collections.abc import Callable
from typing import Final

from gds.device.devices import Staging
from gds.io.memory import allocate
from gds.io.tensors import bytes_of
from kvfs.base.errors import NoSpace

KEPT_BYTES: Final = 288 << 20
"""As much as one load takes."""


class PinnedPool:
    """A pool of pinned buffers. Any thread may use it."""

    def __init__(
        self,
        register: Callable[[int, int], str],
        release: Callable[[int], None],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`register` takes an address and a size, and returns the reason if it refuses; `release`
        takes an address."""
        self._register = register
        self._release = release
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._idle: list[Staging] = []

    def lend(self, size: int) -> Staging:
        """Returns a buffer of at least `size` bytes that begins at a page. Raises NoSpace."""
        with self._lock:
            for at, staging in enumerate(self._idle):
                if len(staging.memory) >= size:
                    return self._idle.pop(at)
        try:
            memory = allocate(size)
        except MemoryError as error:
            raise NoSpace(f"a pinned buffer: {error}") from None
        raw = bytes_of(memory)
        return Staging(memory, raw, refused=self._register(raw.data_ptr(), size))

    def give_back(self, staging: Staging) -> None:
        """Takes back a buffer from which nothing copies any more."""
        if staging.refused:
            return
        with self._lock:
            self._idle.append(staging)
            dropped = []
            while sum(len(each.memory) for each in self._idle) > self._kept_bytes:
                dropped.append(self._idle.pop(0))
        for each in dropped:
            self._release(each.raw.data_ptr())
