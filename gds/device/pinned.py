"""Buffers of the host that a device copies from without the driver's own staging: memory that is
registered with it once, which takes longer than to fill it, and lent again and again.

What is not lent is kept for the next load, up to `KEPT_BYTES`. Where memory cannot be registered it
is lent all the same, and not kept: copies are slower then."""

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
    """Any thread."""

    def __init__(
        self,
        register: Callable[[int, int], str],
        release: Callable[[int], None],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`register` takes an address and a size, and says why it refuses; `release` an address."""
        self._register = register
        self._release = release
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._idle: list[Staging] = []

    def lend(self, size: int) -> Staging:
        """One of at least `size` bytes, that begins at a page. Raises NoSpace."""
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
        """Nothing copies from it any more."""
        if staging.refused:
            return
        with self._lock:
            self._idle.append(staging)
            dropped = []
            while sum(len(each.memory) for each in self._idle) > self._kept_bytes:
                dropped.append(self._idle.pop(0))
        for each in dropped:
            self._release(each.raw.data_ptr())
