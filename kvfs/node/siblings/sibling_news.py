"""The news that siblings tell each other: who has a copy too, and who has it no more. Nothing is
acknowledged: what is lost is found by the next look at all (`sibling_keeper`).

Invariant
- What waits for a node is bounded. One that does not take it is told nothing for a second.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import trio

from kvfs.base.background import Background
from kvfs.base.errors import Invalid, KvfsError
from kvfs.cluster.handshake import Party
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import namespace_of
from kvfs.node.names.name_protocol import Call, parse_messages
from kvfs.node.siblings.copy_protocol import (
    MOST_TOLD,
    SIBLINGS,
    SiblingNews,
    decode_news,
    encode_news,
)
from kvfs.tree.copies import siblings

_INTERVAL_S: Final = 0.05
_SEND_S: Final = 2.0
_REST_S: Final = 1.0
_MOST_WAITING: Final = 256
"""Messages that wait for one node."""


class SiblingTelling:
    """The news of one node."""

    def __init__(
        self, engine: Engine, me: int, call: Call, lost: Callable[[Sequence[int]], None]
    ) -> None:
        """`lost` is told of files that have a sibling less."""
        self._engine = engine
        self._me = me
        self._lost = lost
        self._call = call
        self._waiting: dict[int, list[bytes]] = {}
        """News for each node that is being told some."""
        self._resting: dict[int, float] = {}
        self._tasks = Background()

    async def run(self) -> None:
        """Tells, until cancelled."""
        await self._tasks.run()

    def tell(
        self, files: Sequence[tuple[int, int]], have: Sequence[int], others: Iterable[int]
    ) -> None:
        """Tells others which nodes have these files, by number and version; `have` empty: this one
        has them no more. Never waits."""
        if not self._tasks.runs:
            return
        for start in range(0, len(files), MOST_TOLD):
            news = SiblingNews(list(files[start : start + MOST_TOLD]), list(have))
            raw = encode_news(news)
            for node in others:
                self._add(node, raw)

    async def heard(self, peer: Party, params: Any) -> None:
        """Handles the request `siblings`. Raises Invalid, Corrupt, Unavailable."""
        for raw in parse_messages(params):
            news = decode_news(raw)
            if len(news.files) > MOST_TOLD or not all(0 < node < 1 << 16 for node in news.nodes):
                raise Invalid("siblings of too many files, or nodes that cannot be")
            await self._apply(peer.node, news)

    def _add(self, node: int, raw: bytes) -> None:
        if node == self._me or trio.current_time() < self._resting.get(node, 0.0):
            return
        waiting = self._waiting.get(node)
        if waiting is None:
            self._waiting[node] = [raw]
            self._tasks.begin(self._send, node)
        elif len(waiting) < _MOST_WAITING:
            waiting.append(raw)

    async def _send(self, node: int) -> None:
        try:
            while some := self._waiting[node]:
                self._waiting[node] = []
                await self._call(node, SIBLINGS, some, _SEND_S)
                await trio.sleep(_INTERVAL_S)
        except KvfsError:
            self._resting[node] = trio.current_time() + _REST_S
        finally:
            del self._waiting[node]

    async def _apply(self, teller: int, news: SiblingNews) -> None:
        files = [e for e in news.files if self._engine.is_local(namespace_of(e[0]))]
        if not files:
            return

        def fn(t: Transaction) -> list[int]:
            if not news.nodes:
                return [ino for ino, _ in files if siblings.forget(t, ino, teller)]
            for ino, version in files:
                siblings.note(t, ino, version, news.nodes)
            return []

        self._lost(await self._engine.transact(fn))
