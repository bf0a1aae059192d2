"""A digest that is computed in a thread of its own while its bytes are written.

MD5 takes longer than receiving, all other digests and the write together. Beside them it is what
one body waits for alone; where as many bodies come as there are processors, threads of their own
would only change places with each other.
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
        """Lends a thread to one large body; None: others need the processors. Called in the event
        loop."""
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
        """Take the next bytes, when those before them were; their buffer may be reused after the
        next call, or after `wait`. Any thread."""
        self.wait()
        self._step = self._executor.submit(_update, hasher, parts)

    def wait(self) -> None:
        """Until all has been taken; a buffer's worth at most. Any thread."""
        if self._step is not None:
            self._step.result()
            self._step = None


def _update(hasher: Hasher, parts: Sequence[memoryview]) -> None:
    for part in parts:
        hasher.update(part)
