"""Blocks in the cold tier whose names are removed: their objects go, however many there are, and
whatever the tier does meanwhile."""

import base64
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from kvfs.base.errors import Unavailable
from kvfs.holdings.fingerprints import Fingerprinter, gathered
from kvfs.holdings.own_set import OwnSet
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Flag, namespace_root, pack
from kvfs.node.names.tombstones import KEPT_NS, Tombstones
from kvfs.node.siblings import cold_blocks
from kvfs.node.siblings.cold_blocks import ColdBlocks
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.tree import namespaces, tree
from kvfs.tree.copies.cold_copies import Object
from kvfs.tree.copies.held_names import HeldName
from tests.contract.small_node import new_inode
from tests.contract.tombs import removed
from tests.jumping import run_jumping

ME, SPACE, NOW = 1, 1, 10**18


class Tier:
    """A bucket: what is told of each object."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, str]] = {}
        self.is_away = False

    async def told(self, name: str) -> dict[str, str] | None:
        await self._answer()
        return self.objects.get(name)

    async def put(self, _wanted: Object, name: str, told: dict[str, str]) -> bool:
        await self._answer()
        self.objects[name] = told
        return True

    async def delete(self, name: str) -> None:
        await self._answer()
        self.objects.pop(name, None)

    async def names(self, prefix: str) -> list[str]:
        await self._answer()
        return [each for each in self.objects if each.startswith(prefix)]

    async def _answer(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_away:
            raise Unavailable("the bucket does not answer")


class SlowTier(Tier):
    """A bucket that is seconds away: each way is slow by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._puts = iter([(1.0, 1.0), (3.5, 4.0)])

    async def put(self, wanted: Object, name: str, told: dict[str, str]) -> bool:
        there_s, back_s = next(self._puts)
        await trio.sleep(there_s)
        await super().put(wanted, name, told)
        await trio.sleep(back_s)
        return True

    async def delete(self, name: str) -> None:
        await trio.sleep(3)
        await super().delete(name)
        await trio.sleep(1)


class Sent:
    """A node that has sent blocks there."""

    def __init__(self, root: Path, tier: Tier) -> None:
        self.now = NOW
        self.has_space = True
        self.engine = EmbeddedEngine(root)
        self.engine.node = keys.pack_node(ME)
        self.stones = Tombstones(self.engine, lambda: self.now)
        self.tier = tier
        self.set = OwnSet.open(root / "cold", ME, 1)
        self.set.mark_filled()
        self.fingerprinter = Fingerprinter(1, keys.pack_u16(SPACE))
        sets: Any = SimpleNamespace(
            cold=self.set,
            exchange=SimpleNamespace(changed=lambda: None),
            fingerprint=lambda _space, path: self.fingerprinter.of(path),
            cold_holders=lambda _space, path: (self.fingerprinter.of(path), self._senders(path)),
            claims_of=self._nobody_else,
            learn=self._nobody_else,
        )
        own: Any = SimpleNamespace(
            read=self.engine.read,
            is_local=lambda _space: True,
            namespace=lambda _space: SimpleNamespace(cold=True) if self.has_space else None,
        )
        here: Any = SimpleNamespace(engine=own, tier=self.tier)
        self.cold = ColdBlocks(
            here.engine, ME, here.tier, lambda: sets, self.stones, DifferingNames()
        )

    def send(self, path: bytes) -> str:
        """Puts a block there, and returns the name of its object."""
        inode = new_inode()
        inode.flags, inode.ctime_ns = Flag.PUBLISHED | Flag.SEALED, NOW
        record = cold_blocks._ColdRecord(cold_blocks._hash(path), HeldName([], 7, pack(inode)))
        fingerprint = self.fingerprinter.of(path)
        name = str(cold_blocks._Place(ME, SPACE, fingerprint))
        raw = cold_blocks._encode(record)
        self.tier.objects[name] = {"kvfs-block": base64.b64encode(raw).decode()}
        self.set.ensure(gathered([fingerprint]))
        return name

    def write(self, number: int, path: bytes, changed_ns: int) -> int:
        """Writes and seals a block, in the place of one before it; returns its inode."""
        ino, inode = namespace_root(SPACE) + number, new_inode()
        inode.flags, inode.ctime_ns = Flag.PUBLISHED | Flag.SEALED, changed_ns

        def put(t: Transaction) -> None:
            if tree.find(t, namespace_root(SPACE), path) is not None:
                tree.unlink(t, namespace_root(SPACE), path, NOW, keep=lambda _ino: False)
            tree.add(t, namespace_root(SPACE), path, ino, inode)

        self.engine.transact_now(put)
        return ino

    def tells(self, path: bytes) -> tuple[bool, bool]:
        """Returns whether the tier has a block, and whether it is said to have it."""
        name = str(cold_blocks._Place(ME, SPACE, self.fingerprinter.of(path)))
        return name in self.tier.objects, bool(self._senders(path))

    def _senders(self, path: bytes) -> list[int]:
        return [ME] if self.set.holds(gathered([self.fingerprinter.of(path)]))[0] else []

    async def _nobody_else(self, names: Sequence[tuple[int, bytes]]) -> list[tuple[int, None]]:
        return [(0, None) for _ in names]

    def remove(self, path: bytes) -> None:
        self.cold.removed(removed(self.engine, self.stones, (SPACE, path, NOW), ME))


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def sent(tmp_path: Path, tier: Tier) -> Iterator[Sent]:
    made = Sent(tmp_path, tier)
    yield made
    made.engine.close()


def run(sent: Sent, act: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sent.cold.run)
            await trio.sleep(1)
            await act()
            await trio.sleep(60)
            nursery.cancel_scope.cancel()

    run_jumping(main)


def test_more_removals_than_can_wait_leave_no_object(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_blocks, "_MOST_REMOVED", 3)
    kept = sent.send(b"kept")
    for number in range(10):
        sent.send(b"%d" % number)

    async def act() -> None:
        sent.tier.is_away = True
        for number in range(10):
            sent.remove(b"%d" % number)
        await trio.sleep(30)
        sent.tier.is_away = False

    run(sent, act)
    assert list(sent.tier.objects) == [kept]
    assert len(sent.set) == 1


def test_what_waits_for_the_tier_for_more_than_a_day_is_deleted(sent: Sent) -> None:
    sent.send(b"block")

    async def act() -> None:
        sent.tier.is_away = True
        sent.remove(b"block")
        await trio.sleep(30)
        sent.now += KEPT_NS + 1
        sent.stones.expire()
        sent.tier.is_away = False

    run(sent, act)
    assert not sent.tier.objects


def test_an_object_whose_record_is_damaged_keeps_no_other_one_there(sent: Sent) -> None:
    for path in (b"damaged", b"whole"):
        sent.send(path)
    sent.tier.objects[sent.send(b"damaged")] = {"kvfs-block": "?"}

    async def act() -> None:
        sent.remove(b"damaged")
        sent.remove(b"whole")

    run(sent, act)
    assert not sent.tier.objects
    assert len(sent.set) == 0


@pytest.mark.parametrize("tier", [SlowTier()])
def test_what_is_sent_anew_while_its_removal_is_under_way_is_there_if_it_is_claimed(
    sent: Sent,
) -> None:
    sent.engine.transact_now(_make_namespace)

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            first = [(sent.write(7, b"block", NOW), 0)]
            nursery.start_soon(partial(sent.cold.sent, first, patient=True))
            await trio.sleep(0.5)
            sent.remove(b"block")
            again = [(sent.write(8, b"block", NOW + 2), 0)]
            nursery.start_soon(partial(sent.cold.sent, again, patient=True))

    run(sent, act)
    assert sent.tells(b"block") == (True, True)


@pytest.mark.parametrize("tier", [SlowTier()])
def test_what_was_on_its_way_when_its_namespace_was_removed_goes_too(sent: Sent) -> None:
    sent.engine.transact_now(_make_namespace)
    sent.send(b"other")

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            block = [(sent.write(7, b"block", NOW), 0)]
            nursery.start_soon(partial(sent.cold.sent, block, patient=True))
            await trio.sleep(0.5)
            sent.has_space = False
            sent.cold.namespace_removed(SPACE)

    run(sent, act)
    assert not sent.tier.objects
    assert len(sent.set) == 0


def _make_namespace(t: Transaction) -> None:
    namespaces.format(t, 1, 0, 0)
    namespaces.create(t, b"blocks", kind="cache", coherence="peer", uid=0, gid=0, now=1)
