"""A digest that is computed in a thread of its own while its bytes are written.

MD5 takes longer than receiving, all other digests and the write together. Computed beside them it
is all that one body waits for; with as many bodies as processors, threads of their own would only
displace each other.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from s3api.rules.checksums import Hasher

_CPUS: Final = len(os.sched_getaffinity(0))
_SHARE: Final = 8
"""The share of the processors for this, one in so many: the rest is for other workers, receiving
and the mount."""


class Hashing:
    """The threads of one worker."""

    def __init__(self) -> None:
        self._most = max(1, _CPUS // _SHARE)
        self._executor = ThreadPoolExecutor(self._most, thread_name_prefix="md5")
        self._under_way = 0

    @contextmanager
    def body(self) -> Iterator["Beside | None"]:
        """Lends a thread to one large body; None: others need the processors. To be called in the
        event loop."""
        self._under_way += 1
        try:
            yield Beside(self._executor) if self._under_way <= self._most else None
        finally:
            self._under_way -= 1


class Beside:
    """The digest of one body: one step at a time, in order."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._step: Future[None] | None = None

    def update(self, hasher: Hasher, parts: Sequence[memoryview]) -> None:
        """Takes the next bytes, after the ones before; their buffer may be reused after the next
        call, or after `wait`. Any thread."""
        self.wait()
        self._step = self._executor.submit(_update, hasher, parts)

    def wait(self) -> None:
        """Waits until all has been taken: a buffer's worth at most. Any thread."""
        if self._step is not None:
            self._step.result()
            self._step = None


def _update(hasher: Hasher, parts: Sequence[memoryview]) -> None:
    for part in parts:
        hasher.update(part)
