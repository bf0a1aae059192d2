"""Delegations that a node gives back because others ask for them, by namespace."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from kvfs.base.errors import KvfsError

_RETRY_S: Final = 0.25
_log = logging.getLogger(__name__)


class GiveBacks:
    """The delegations of one kind that are to be given back."""

    def __init__(self, give_back: Callable[[int], Awaitable[None]], failing: str) -> None:
        """`give_back` does it for a namespace; it raises KvfsError: then it is done again, after
        those of other namespaces. `failing`: how the log says that others wait."""
        self._give_back = give_back
        self._failing = failing
        self._waiting: dict[int, None] = {}
        self._wake = trio.Event()

    def soon(self, namespace_id: int) -> None:
        """Has one given back."""
        self._waiting[namespace_id] = None
        self._wake.set()

    async def run(self) -> None:
        """Gives them back until cancelled."""
        complained = False
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                namespace_id = next(iter(self._waiting))
                del self._waiting[namespace_id]
                try:
                    await self._give_back(namespace_id)
                    complained = False
                except KvfsError as error:
                    self._waiting[namespace_id] = None
                    if not complained:
                        _log.warning("%s: %s", self._failing, error)
                    complained = True
                    await trio.sleep(_RETRY_S)
