"""News of names from nodes that lie, or are broken: it costs little, and ends."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base.errors import Corrupt, Unavailable
from kvfs.holdings import claim_slots, delta_batch
from kvfs.holdings.answers import answer
from kvfs.holdings.delta_batch import of_messages, packed
from kvfs.holdings.delta_codec import decode, encode
from kvfs.holdings.fingerprints import NONE
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.messages import Deltas, HoldingsAsk
from kvfs.holdings.own_set import OwnSet
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_exchange import NameExchange
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import ASK
from kvfs.node.names.peer_outbox import PeerOutbox
from tests.jumping import run_jumping
from tests.unit.holdings.claim_model import u64

ME, OTHER, STRANGER = 1, 2, 9
HELD = u64(range(100, 200))
_SOME = 4000


class Node:
    """One node, and another one that it asks."""

    def __init__(self, directory: Path) -> None:
        self.table = HolderTable(0)
        self.other = OwnSet.open(directory / "other", OTHER, 1)
        self.other.add(HELD)
        self.asks: list[HoldingsAsk] = []
        self.answers: Callable[[HoldingsAsk], Awaitable[list[bytes]]] = self._answer
        members = NameMembers(ME, lambda: [(OTHER, True)])
        self.outbox = PeerOutbox(self._call, members.interval_s, self._hear)
        own = OwnSet.open(directory / "own", ME, 1)
        known = KnownHolders(lambda _: self.table, [own], members, self._call)
        self.exchange = NameExchange([own], known, members, self.outbox, lambda: None, lambda: 0.0)

    def hear(self, *messages: Deltas) -> None:
        self.exchange.told(delta_batch.encode([packed(of_messages(messages))]))

    def heartbeat(self) -> None:
        last = self.other.deltas_since(self.other.sequence)
        assert last is not None
        self.hear(last)

    async def _call(self, _node: int, method: str, params: Any, _deadline_s: float) -> Any:
        if method != ASK:
            return None
        question = decode(params[0])
        assert isinstance(question, HoldingsAsk)
        self.asks.append(question)
        return await self.answers(question)

    async def _answer(self, question: HoldingsAsk) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [encode(each) for each in answer(self.other, question)]

    async def _hear(self, _answer: Any) -> None:
        raise AssertionError("nobody answers with news")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def run(node: Node, scene: Callable[[Node], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.outbox.run)
            nursery.start_soon(node.exchange.run)
            await trio.testing.wait_all_tasks_blocked()
            await scene(node)
            nursery.cancel_scope.cancel()

    run_jumping(main)


async def beat(node: Node, seconds: int) -> None:
    """The other one tells once a second where it has come to."""
    for _ in range(seconds):
        node.heartbeat()
        await trio.sleep(1)


def held(node: Node) -> int:
    return node.table.count(OTHER)


def test_what_is_told_for_another_node_is_undone_by_that_one(node: Node) -> None:
    async def scene(node: Node) -> None:
        await beat(node, 2)
        assert held(node) == len(HELD)
        sequence, epoch = node.other.sequence, node.other.epoch
        some = u64(range(1000, 1000 + 50))
        node.hear(Deltas(OTHER, epoch, sequence + 1, sequence + 50, some, NONE, None))
        await trio.sleep(1)
        assert held(node) == len(HELD) + 50
        await beat(node, 15)
        assert held(node) == len(HELD)
        node.hear(Deltas(OTHER, 1 << 63, 5, 5, some[:1], NONE, None))
        await beat(node, 3)
        assert held(node) == len(HELD)
        node.hear(Deltas(OTHER, epoch, 1 << 46, 1 << 46, some[:1], NONE, None))
        await beat(node, 3)
        assert (held(node), node.exchange.report()["lagging"]) == (len(HELD), 0)

    run(node, scene)


def test_a_digest_that_never_agrees_is_asked_about_ever_more_seldom(node: Node) -> None:
    async def scene(node: Node) -> None:
        await beat(node, 2)
        node.asks.clear()
        for _ in range(300):
            sequence, epoch = node.other.sequence, node.other.epoch
            node.hear(Deltas(OTHER, epoch, sequence + 1, sequence, NONE, NONE, 1))
            await trio.sleep(1)
        assert 5 < len(node.asks) < 30
        node.other.add(u64([7]))
        await beat(node, 2)
        assert held(node) == len(HELD) + 1

    run(node, scene)


def test_what_a_node_claims_takes_a_bounded_table(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its fingerprints belong to one row."""
    monkeypatch.setattr(claim_slots, "_LEAST_SPILLED", 1 << 10)

    async def scene(node: Node) -> None:
        before, last = node.table.size_bytes, 0
        for number in range(2):
            some = u64(range(number * _SOME, (number + 1) * _SOME))
            first, last = last + 1, last + _SOME
            node.hear(Deltas(OTHER, 3, first, last, some << u64([16])[0], NONE, None))
            await trio.sleep(0.1)
        assert node.table.size_bytes == before
        assert node.table.counters.refused
        assert node.table.counters.claims + node.table.counters.refused == last

    run(node, scene)


def test_news_of_strangers_and_of_oneself_is_ignored_and_damage_refused(node: Node) -> None:
    async def scene(node: Node) -> None:
        for store in (ME, STRANGER):
            node.hear(Deltas(store, 1, 1, 1, u64([5]), NONE, None))
        with pytest.raises(Corrupt):
            node.exchange.told(b"KVHB" + bytes(60))
        await trio.sleep(3)
        assert node.table.counters.claims == 0
        assert not node.asks

    run(node, scene)


def test_an_origin_that_does_not_answer_is_asked_now_and_then(node: Node) -> None:
    async def never(_question: HoldingsAsk) -> list[bytes]:
        await trio.sleep(10)
        raise Unavailable("it did not answer in 10 s")

    async def scene(node: Node) -> None:
        node.answers = never
        await beat(node, 100)
        assert 5 < len(node.asks) <= 11
        node.answers = node._answer
        await beat(node, 15)
        assert held(node) == len(HELD)

    run(node, scene)


@pytest.mark.parametrize("told", [b"", b"nonsense", b"x" * 1000])
def test_an_answer_that_is_none_is_as_no_answer(node: Node, told: bytes) -> None:
    async def nonsense(_question: HoldingsAsk) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        return [told]

    async def scene(node: Node) -> None:
        node.answers = nonsense
        await beat(node, 20)
        assert len(node.asks) <= 20
        assert held(node) == 0
        node.answers = node._answer
        await beat(node, 4)
        assert held(node) == len(HELD)

    run(node, scene)
