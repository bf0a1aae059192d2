"""A node that learns what many others hold."""

from pathlib import Path
from typing import Any

import trio

from kvfs.holdings import delta_batch
from kvfs.holdings.answers import answer
from kvfs.holdings.delta_batch import of_messages, packed
from kvfs.holdings.delta_codec import decode, encode
from kvfs.holdings.fingerprints import U64, mixed
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.messages import HoldingsAsk
from kvfs.holdings.own_set import OwnSet
from kvfs.node.homes.known_holders import KnownHolders
from kvfs.node.names.name_exchange import NameExchange
from kvfs.node.names.name_members import NameMembers
from kvfs.node.names.name_protocol import ASK
from kvfs.node.names.peer_outbox import PeerOutbox
from tests.jumping import run_jumping
from tests.unit.holdings.claim_model import u64

ME, OTHERS = 1, range(2, 42)
HELD = 3000
_SLOW_S = 5.0


def names_of(node: int) -> U64:
    return mixed(u64(range(node * HELD, (node + 1) * HELD))) >> u64([16])


def test_a_node_that_starts_asks_each_other_once_and_few_at_a_time(tmp_path: Path) -> None:
    """Answers take longer than the time after which a question would be put again."""
    run_jumping(_joins, tmp_path)


async def no_answer(_answer: Any) -> None:
    raise AssertionError("nobody answers with news")


async def _joins(directory: Path) -> None:
    sets = {node: OwnSet.open(directory / str(node), node, 1) for node in (ME, *OTHERS)}
    for node in OTHERS:
        sets[node].add(names_of(node))
    asked: list[int] = []
    under_way, most = 0, 0

    async def call(node: int, method: str, params: Any, deadline_s: float) -> Any:
        nonlocal under_way, most
        if method != ASK:
            return None
        asked.append(node)
        under_way += 1
        most = max(most, under_way)
        await trio.sleep(_SLOW_S)
        under_way -= 1
        assert deadline_s > _SLOW_S
        question = decode(params[0])
        assert isinstance(question, HoldingsAsk)
        return [encode(each) for each in answer(sets[node], question)]

    table = HolderTable(0)
    members = NameMembers(ME, lambda: [(node, True) for node in OTHERS])
    outbox = PeerOutbox(call, members.interval_s, no_answer)
    known = KnownHolders(lambda _: table, [sets[ME]], members, call)
    exchange = NameExchange([sets[ME]], known, members, outbox, lambda: None, lambda: 0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.run)
        nursery.start_soon(exchange.run)
        await trio.testing.wait_all_tasks_blocked()
        for node in OTHERS:
            last = sets[node].deltas_since(sets[node].sequence)
            assert last is not None
            exchange.told(delta_batch.encode([packed(of_messages([last]))]))
        while table.counters.claims < HELD * len(OTHERS):
            await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert sorted(asked) == list(OTHERS)
    assert 1 < most <= 8
    for each in sets.values():
        each.close()
