"""Takes inode numbers ahead for the namespaces whose names are this node's own, so that an engine
that is away keeps nobody from making files there."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import trio

from kvfs.base.errors import KvfsError
from kvfs.meta import inode_ranges, keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.replica.local_namespaces import LocalNamespaces

_RETRY_S: Final = 1.0
_log = logging.getLogger(__name__)


class Commit(Protocol):
    """Commits a transaction at the server (`Proposer.commit`)."""

    async def __call__(self, fn: Callable[[Transaction], Any], /) -> Any: ...


class RangeKeeper:
    """The keeper of one replica's ranges."""

    def __init__(self, local: EmbeddedEngine, locals_: LocalNamespaces, commit: Commit) -> None:
        self._local = local
        self._locals = locals_
        self._commit = commit
        self._turn = trio.Lock()
        self._wake = trio.Event()

    def begin(self) -> None:
        """Gives up numbers that were taken in an earlier run; comes before any is used. Raises
        NoSpace, ReadOnly, Unavailable."""
        self._local.transact_now(inode_ranges.give_up)

    def look(self) -> None:
        """Has it looked soon whether there are enough numbers left; does not wait."""
        self._wake.set()

    async def take(self, namespace_id: int) -> None:
        """Returns when this node has numbers of a namespace that had too few. Raises Unavailable,
        Conflict, NoSpace."""
        async with self._turn:
            if not self._lacks(namespace_id):
                return
            first = await self._commit(partial(_advance, namespace_id))
            if first and self._locals.has(namespace_id):
                self._local.transact_now(lambda t: inode_ranges.add(t, namespace_id, first))

    async def run(self) -> None:
        """Takes numbers where half a range is used, until cancelled."""
        complained = False
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            try:
                for namespace_id in self._locals.numbers():
                    await self.take(namespace_id)
                complained = False
            except KvfsError as error:
                if not complained:
                    _log.warning("inode numbers are not taken ahead: %s", error)
                complained = True
                self._wake.set()
                await trio.sleep(_RETRY_S)

    def _lacks(self, namespace_id: int) -> bool:
        found = self._local.read_now(lambda t: inode_ranges.left(t, namespace_id))
        return found < inode_ranges.RANGE // 2


def _advance(namespace_id: int, t: Transaction) -> int:
    """Returns the first number of a new range; 0: the namespace is gone."""
    if t.get(keys.namespace(namespace_id)) is None:
        return 0
    return inode_ranges.advance(t, namespace_id, inode_ranges.RANGE)
