"""Uploads to a cold tier: some at once, each by a task that goes on when nobody waits for it any
more."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Generic, TypeVar

import trio

from kvfs.base.background import Background

K = TypeVar("K")
T = TypeVar("T")
_AT_ONCE: Final = 4


class ColdUploads(Generic[K, T]):
    """The files on their way, each by a name."""

    def __init__(
        self,
        tasks: Background,
        send: Callable[[T], Awaitable[object]],
        is_away: Callable[[], bool],
    ) -> None:
        """`is_away`: whether the tier takes nothing now."""
        self._tasks = tasks
        self._send = send
        self._is_away = is_away
        self._going: set[K] = set()
        self._ended = trio.Event()
        """Set, and replaced, when one of these has ended."""

    def __bool__(self) -> bool:
        return bool(self._going)

    async def send(self, wanted: Mapping[K, T]) -> None:
        """Sends these, while the tier is there; returns when none of them is on its way. Cancelled:
        those begun go on."""
        for name, each in wanted.items():
            while name not in self._going and len(self._going) >= _AT_ONCE:
                await self._ended.wait()
            if self._is_away():
                break
            if self._tasks.runs and name not in self._going:
                self._going.add(name)
                self._tasks.begin(self._send_one, name, each)
        while any(name in self._going for name in wanted):
            await self._ended.wait()

    async def _send_one(self, name: K, each: T) -> None:
        try:
            await self._send(each)
        finally:
            self._going.discard(name)
            self._ended.set()
            self._ended = trio.Event()
