"""A node that keeps copies of its blocks on another one, which is played: what was sealed gets its
copy, whatever happens while an earlier one is made, only what is known of a node is believed of its
copies, and a drained node gives away what it has at that moment."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.base.errors import Unavailable
from kvfs.cluster.handshake import Party
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Namespace, namespace_root, pack, unpack_namespace
from kvfs.node.siblings.copy_protocol import CopyOffer, CopyOutcome, packed
from kvfs.node.siblings.copy_taker import CopyTaker
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.siblings.living_nodes import LivingNodes
from kvfs.node.siblings.sibling_keeper import SiblingKeeper
from kvfs.node.tasks.drainer import Draining, TakenBlocks
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.tree import namespaces, tree
from kvfs.tree.changes import Change
from kvfs.tree.copies import siblings
from kvfs.tree.copies.held_names import HeldName
from kvfs.tree.copies.siblings import HeldBlock
from tests.contract.bringers import Shared, publish
from tests.contract.memory_engine import MemoryEngine
from tests.contract.small_node import new_inode
from tests.jumping import run_jumping

ME, OTHER = 1, 2
INO = namespace_root(1) + 1
ROOM = 1 << 40
CONTENT = bytes(16)


class Engine(Shared):
    """That of a node, with one namespace of its own."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine(), ME)

    def is_local(self, namespace_id: int) -> bool:
        return namespace_id == 1

    def namespace(self, number: int) -> Namespace | None:
        value = self.read_now(lambda t: t.get(keys.namespace(number)))
        return None if value is None else unpack_namespace(value)


class Other:
    """The other node: what it was offered. A copy is made once `goes_on` is set."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, int]] = []
        self.goes_on = trio.Event()
        self.is_known = True
        self.outcome = CopyOutcome.HERE

    def resting(self) -> set[int]:
        return set()

    async def make(self, _node: int, blocks: Sequence[HeldBlock]) -> dict[int, CopyOutcome]:
        self.offered += [(each.ino, each.inode.version) for each in blocks]
        await self.goes_on.wait()
        return {each.ino: self.outcome for each in blocks}


async def _nothing_to_forget(gone: Sequence[Change]) -> None:
    assert not gone


async def _no_claims(names: Sequence[tuple[int, bytes]]) -> list[tuple[int, list[int] | None]]:
    return [(0, []) for _ in names]


class Scene:
    """A node, beside the other one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.engine = Engine()
        self.engine.transact_now(_format)
        self.other = Other()
        hosts = ClusterSnapshot([Host(each, ROOM, ROOM) for each in (ME, OTHER)])
        self.keeper = SiblingKeeper(
            self.engine,  # type: ignore[arg-type]
            ME,
            LivingNodes(ME, lambda: hosts, lambda _node: None, trio.current_time),
            self.other,  # type: ignore[arg-type]
            DifferingNames(),
            _no_claims,
            lambda _node: self.other.is_known,
            lambda _files, _have, _others: None,
            1 << 30,
        )

    def write(self, version: int | None = None, seal: bytes = CONTENT, ino: int = INO) -> None:
        """A block is sealed; with a version, as its next content."""
        if version is None:
            self.engine.transact_now(lambda t: _make(t, ino))
        fd = os.open(self.root / "data", os.O_CREAT | os.O_RDWR)
        os.pwrite(fd, b"block", 0)
        st = os.fstat(fd)
        os.close(fd)
        self.engine.transact_now(lambda t: publish(t, ino, st, version=version, seal=seal))
        self.keeper.sealed([ino])

    def siblings(self) -> list[int]:
        (block,) = self.engine.read_now(lambda t: siblings.look(t, [INO]))
        return block.siblings


def _format(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    policy = {"kind": "cache", "coherence": "peer", "replicas": 1}
    policy["acknowledge"] = "sync"
    namespaces.create(t, b"blocks", uid=0, gid=0, now=1, **policy)  # type: ignore[arg-type]


def _make(t: Transaction, ino: int) -> None:
    tree.add(t, namespace_root(1), b"block%d" % ino, ino, new_inode())


def run(tmp_path: Path, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.keeper.run)
            await act(scene)
            nursery.cancel_scope.cancel()

    run_jumping(main)


def test_content_that_is_sealed_while_the_copy_before_it_is_made_gets_its_own(
    tmp_path: Path,
) -> None:
    async def act(scene: Scene) -> None:
        scene.write()
        await trio.sleep(1)
        assert scene.other.offered == [(INO, 0)]
        scene.write(1)
        scene.other.goes_on.set()
        await trio.sleep(1)
        assert scene.other.offered == [(INO, 0), (INO, 1)]
        assert scene.siblings() == [OTHER]

    run(tmp_path, act)


def test_a_close_fails_soon_where_the_other_node_keeps_other_content(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.other.goes_on.set()
        scene.other.outcome = CopyOutcome.OTHER
        scene.write()
        with trio.fail_after(2), pytest.raises(Unavailable, match="other content has this name"):
            await scene.keeper.acknowledge([INO])

    run(tmp_path, act)


def test_a_close_waits_for_a_node_that_may_take_its_copy_yet(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.other.goes_on.set()
        scene.other.outcome = CopyOutcome.REFUSED
        scene.write()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.keeper.acknowledge, [INO])
            await trio.sleep(5)
            scene.other.outcome = CopyOutcome.HERE
        assert scene.siblings() == [OTHER]

    run(tmp_path, act)


def test_a_close_whose_content_is_replaced_waits_for_a_copy_of_the_new_one(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.other.goes_on.set()
        scene.other.outcome = CopyOutcome.REFUSED
        scene.write()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.keeper.acknowledge, [INO])
            await trio.sleep(2)
            scene.write(1)
            scene.other.outcome = CopyOutcome.HERE
        assert scene.other.offered[-1] == (INO, 1)
        assert scene.siblings() == [OTHER]

    run(tmp_path, act)


def test_a_sibling_of_which_too_little_is_known_stays_one(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.other.goes_on.set()
        scene.other.is_known = False
        scene.write()
        await trio.sleep(60)
        assert scene.siblings() == [OTHER]
        assert len(scene.other.offered) == 1
        scene.other.is_known = True  # it says by now what it holds: not this block
        await trio.sleep(600)
        assert len(scene.other.offered) > 1

    run(tmp_path, act)


def test_a_drained_node_keeps_what_was_written_after_another_node_took_it(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.write()
        evicted: list[int] = []

        async def offer(inos: Sequence[int], _afford: object) -> TakenBlocks:
            taken = dict.fromkeys(inos, CONTENT)
            scene.write(1, b"other content   ")
            return TakenBlocks(taken, [])

        async def evict(ino: int) -> bool:
            evicted.append(ino)
            return True

        async def nothing(*_: int) -> None:
            raise AssertionError("the node is not drained yet")

        host = Host(ME, ROOM, ROOM, state="draining")
        made: Any = SimpleNamespace(
            me=ME, engine=scene.engine, snapshot=lambda: ClusterSnapshot([host])
        )
        draining = Draining(made, evict, offer, nothing, nothing)
        with trio.move_on_after(0.5):  # one pass
            await draining.run()
        assert not evicted
        assert draining.report()["draining"]["files_left"] == 1

    run(tmp_path, act)


@pytest.mark.parametrize("blocks", [1, 300])
def test_nothing_goes_once_a_drain_was_stopped_nor_in_the_next_one_as_taken_in_this(
    tmp_path: Path, blocks: int
) -> None:
    """It is stopped before what was taken goes, or, of so many that one offer does not have them
    all, before the next offer."""

    async def act(scene: Scene) -> None:
        for number in range(blocks):
            scene.write(ino=INO + number)
        hosts = {"draining": Host(ME, ROOM, ROOM, state="draining"), "active": Host(ME, ROOM, ROOM)}
        state = "draining"
        offered: list[int] = []
        evicted: list[int] = []

        async def offer(inos: Sequence[int], _afford: object) -> TakenBlocks:
            offered.extend(inos)
            await trio.sleep(0.2)
            return TakenBlocks(dict.fromkeys(inos, CONTENT) if INO not in offered[1:] else {}, [])

        async def evict(ino: int) -> bool:
            evicted.append(ino)
            return True

        async def nothing(*_: int) -> None:
            raise AssertionError("the node is not drained")

        made: Any = SimpleNamespace(
            me=ME, engine=scene.engine, snapshot=lambda: ClusterSnapshot([hosts[state]])
        )
        draining = Draining(made, evict, offer, nothing, nothing)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(draining.run)
            await trio.sleep(0.1 if blocks > 1 else 0.3)
            state = "active"
            await trio.sleep(5)
            assert not evicted
            assert draining.report()["draining"] is None
            assert len(set(offered)) == min(blocks, 256)
            state = "draining"
            await trio.sleep(5)
            assert len(set(offered)) == blocks
            assert not evicted, "nobody took one in this drain"
            nursery.cancel_scope.cancel()

    run(tmp_path, act)


class Brings:
    """Data that come once `come` is set."""

    def __init__(self) -> None:
        self.come = trio.Event()

    async def bring(self, _ino: int) -> None:
        await self.come.wait()

    def record_now(self) -> None:
        pass


class Kept:
    """What a node answers to an offer of a file of which it has former content."""

    def __init__(self, scene: Scene, *, is_open: bool = False) -> None:
        self.gone: list[Change] = []
        stones: Any = SimpleNamespace(hides=lambda *_: False, renew=lambda _names: None)
        self._taker = CopyTaker(
            *(scene.engine, Brings(), stones, lambda _inos: None, DifferingNames()),
            *(lambda _ino: is_open, self._forget),
        )

    async def _forget(self, gone: Sequence[Change]) -> None:
        self.gone += gone

    async def offered(self, version: int, *, is_sealed: bool) -> CopyOutcome:
        record = new_inode()
        record.size, record.version = 7, version
        record.flags = Flag.PUBLISHED | Flag.SEALED if is_sealed else Flag.PUBLISHED
        record.checksum = b"of other content" if is_sealed else b""
        offer = packed([CopyOffer(1, b"block%d" % INO, HeldName([], INO, pack(record)))])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._taker.run)
            await trio.sleep(0.1)
            (outcome,) = await self._taker.take(Party("cluster", OTHER, 1, "host"), offer)
            nursery.cancel_scope.cancel()
        return CopyOutcome(outcome)


THEIRS, OWN, NEXT = 1 << 16 | OTHER, 1 << 16 | ME, 2 << 16 | OTHER


@pytest.mark.parametrize("is_sealed", [False, True], ids=["closed", "sealed"])
@pytest.mark.parametrize("has", [THEIRS, OWN, NEXT], ids=["theirs", "own", "newer"])
@pytest.mark.parametrize("is_open", [False, True], ids=["idle", "open"])
def test_former_content_goes_for_a_copy_of_what_was_written_after_it(
    tmp_path: Path, has: int, is_sealed: bool, is_open: bool
) -> None:
    async def act(scene: Scene) -> None:
        scene.write()
        scene.write(has)
        kept = Kept(scene, is_open=is_open)
        offered = THEIRS if has == NEXT else NEXT
        outcome = await kept.offered(offered, is_sealed=is_sealed)
        goes = has != NEXT and not is_open and not (has == OWN and is_sealed)
        assert [each.ino for each in kept.gone] == [INO] * goes
        assert outcome is (CopyOutcome.COMING if goes else CopyOutcome.OTHER)

    run(tmp_path, act)


def test_two_nodes_that_offer_one_block_are_both_told_that_it_came(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        brings = Brings()
        stones: Any = SimpleNamespace(hides=lambda *_: False, renew=lambda _names: None)
        taker = CopyTaker(
            *(scene.engine, brings, stones, lambda _inos: None, DifferingNames()),
            *(lambda _ino: False, _nothing_to_forget),
        )
        record = new_inode()
        record.flags = Flag.PUBLISHED | Flag.SEALED
        offer = packed([CopyOffer(1, b"theirs", HeldName([], INO, pack(record)))])
        told: dict[int, list[int]] = {}

        async def ask(node: int) -> None:
            told[node] = await taker.take(Party("cluster", node, 1, "host"), offer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(taker.run)
            await trio.sleep(0.1)
            async with trio.open_nursery() as asking:
                asking.start_soon(ask, 2)
                asking.start_soon(ask, 3)
                await trio.sleep(0.1)
                brings.come.set()
                await trio.sleep(0.1)
                taker.recorded(INO)
            nursery.cancel_scope.cancel()
        assert told == {2: [CopyOutcome.HERE], 3: [CopyOutcome.HERE]}

    run(tmp_path, act)
