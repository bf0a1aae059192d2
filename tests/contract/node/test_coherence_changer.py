"""A node's part of a change to `peer`, while another node does not do its own."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.cluster.node_records import NodeRecord
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, namespace_root, pack
from kvfs.node.coherence.coherence_changer import CoherenceChanger
from kvfs.tree import coherence_change, namespaces, tree
from kvfs.tree.coherence_change import DONE, TOLD
from kvfs.tree.copies import own_part, placements
from tests.contract.bringers import Shared
from tests.contract.memory_engine import MemoryEngine
from tests.contract.small_node import new_inode
from tests.jumping import run_jumping

ME, OTHER, NS = 1, 2, 1
TOP = namespace_root(NS)


class Engine(Shared):
    """That of a node; `local` is synced with it."""

    node = ME

    @property
    def local(self) -> "Engine":
        return self


def _changing(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    namespaces.create(t, b"blocks", kind="cache", uid=0, gid=0, now=1)
    for number in (ME, OTHER):
        node = NodeRecord(number=number, name=f"n{number}", store=f"s{number}", incarnation=1)
        t.put(keys.node(number), pack(node))
    inode = new_inode()
    inode.flags = Flag.PUBLISHED
    tree.add(t, TOP, b"theirs", TOP + 1, inode)
    placements.let_go(t, TOP + 1, t.node)
    placements.hold_at(t, TOP + 1, 0, keys.pack_node(OTHER))
    namespaces.set_policy(t, NS, now=1, coherence="peer")


def test_records_are_not_looked_at_all_the_time_while_another_node_has_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    foreign = own_part.foreign

    def counted(t: Transaction, inos: Sequence[int]) -> list[own_part.ForeignFile]:
        nonlocal looks
        looks += 1
        return foreign(t, inos)

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr(own_part, "foreign", counted)
    common = MemoryEngine()
    engine, other = Engine(common, ME), Engine(common, OTHER)
    engine.transact_now(_changing)
    announcer = SimpleNamespace(scan=nothing)
    exchange = SimpleNamespace(report=lambda: {"lagging": 0})

    async def learn(_names: object) -> None:
        pass

    sets: Any = SimpleNamespace(
        announcer=announcer, exchange=exchange, claims=lambda *_: (), learn=learn
    )
    seat: Any = engine
    jobs: Any = SimpleNamespace(take=nothing)
    changer = CoherenceChanger(
        *(seat, jobs, lambda: sets, lambda _node: True, lambda _ino: False, lambda _inos: None)
    )

    def steps() -> dict[int, bytes]:
        return engine.read_now(lambda t: coherence_change.steps(t, NS))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(changer.run)
            await trio.sleep(20)
            assert 0 < looks < 5
            assert steps() == {ME: TOLD}
            assert changer.report() == [{"namespace": NS, "names_left": 1}]
            other.transact_now(lambda t: coherence_change.report(t, NS, TOLD))
            await trio.sleep(30)
            assert steps()[ME] == DONE
            assert engine.read_now(lambda t: t.get(keys.inode(TOP + 1))) is None
            nursery.cancel_scope.cancel()

    run_jumping(main)
