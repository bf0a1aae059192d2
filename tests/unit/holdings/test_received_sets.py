"""The receiver of messages about holdings: each row of its table, and that it always converges."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvfs.base.errors import Corrupt
from kvfs.holdings.answers import answer, checksums
from kvfs.holdings.delta_batch import of_messages
from kvfs.holdings.delta_codec import decode, encode
from kvfs.holdings.fingerprints import NONE, RANGES, sums_by_range, total
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.home_map import Share, no_ranges
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, Message, RangeContents
from kvfs.holdings.own_set import OwnSet
from kvfs.holdings.own_set_file import MOST_INTENTS
from kvfs.holdings.received_sets import ASK_AGAIN_S, SILENT_S, ReceivedSets
from tests.conftest import LONG
from tests.unit.holdings.claim_model import u64

ORIGIN, EPOCH = 9, 1
KEPT = 64
"""Changes that an origin of these tests keeps."""


class Receiver:
    """A receiver and its table."""

    def __init__(self) -> None:
        self.table = HolderTable(0)
        self.sets = ReceivedSets(self.table)
        self.now = 0.0

    def held(self) -> set[int]:
        return {
            each
            for range_ in range(RANGES)
            for each in self.table.fingerprints_of(ORIGIN, range_).tolist()
        }

    def has(self, *deltas: Deltas | Checksums | RangeContents) -> list[HoldingsAsk]:
        """Receives them; returns the last one's asks."""
        asks: list[HoldingsAsk] = []
        for message in deltas:
            asks = self.receive(message)
        return asks

    def receive(self, message: Deltas | Checksums | RangeContents) -> list[HoldingsAsk]:
        if isinstance(message, Deltas):
            return self.sets.receive_batch(of_messages([message]), self.now)
        return self.sets.receive(message, self.now)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


def changed(
    first: int, *added: int, removed: tuple[int, ...] = (), epoch: int = EPOCH, lie: bool = False
) -> Deltas:
    last = first + len(added) + len(removed) - 1
    return Deltas(ORIGIN, epoch, first, last, u64(added), u64(removed), 1 if lie else None)


def sums(sequence: int, *held: int) -> Checksums:
    return Checksums(ORIGIN, EPOCH, sequence, sums_by_range(u64(held)))


def contents(sequence: int, range_: int, *held: int) -> RangeContents:
    return RangeContents(ORIGIN, EPOCH, sequence, range_, u64(held))


def ask(since: int | None = None, *ranges: int, epoch: int = EPOCH) -> HoldingsAsk:
    return HoldingsAsk(ORIGIN, epoch, since, ranges)


def test_changes_in_order_are_applied(receiver: Receiver) -> None:
    assert receiver.has(changed(1, 10, 11), changed(3, 12, removed=(10,))) == []
    assert receiver.held() == {11, 12}
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 4)


def test_changes_that_are_known_are_ignored(receiver: Receiver) -> None:
    assert receiver.has(changed(1, 10, 11), changed(3, 12, removed=(10,)), changed(1, 10, 11)) == []
    assert receiver.held() == {11, 12}
    assert receiver.sets.counters.duplicates == 1


def test_changes_that_overlap_are_applied(receiver: Receiver) -> None:
    overlapping = Deltas(ORIGIN, EPOCH, 1, 4, u64([11, 12]), u64([10]), None)
    assert receiver.has(changed(1, 10, 11), overlapping) == []
    assert receiver.held() == {11, 12}
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 4)


def test_messages_of_several_origins_together_are_as_one_by_one(receiver: Receiver) -> None:
    chance, single = random.Random(5), Receiver()
    streams: dict[int, list[Deltas]] = {}
    for store in range(1, 6):
        held: set[int] = set()
        streams[store] = []
        for first in range(1, 40):
            name = chance.randrange(12)
            came, went = ((), (name,)) if name in held else ((name,), ())
            held ^= {name}
            digest = total(sums_by_range(u64(held))) if chance.random() < 0.9 else 1
            message = Deltas(store, EPOCH, first, first, u64(came), u64(went), digest)
            if chance.random() < 0.9:
                streams[store].append(message)
    while any(streams.values()):
        picked = [each for each in streams.values() for _ in range(3) if each]
        batch = [each.pop(0) for each in picked if each]
        asks = [one for each in batch for one in single.receive(each)]
        together = receiver.sets.receive_batch(of_messages(batch), 0.0)
        assert sorted(together, key=repr) == sorted(asks, key=repr)
        for store in streams:
            assert receiver.sets.standing(store) == single.sets.standing(store)
            assert receiver.table.digest(store) == single.table.digest(store)
    assert receiver.sets.counters == single.sets.counters


def test_a_gap_is_asked_for_once_and_again_later(receiver: Receiver) -> None:
    assert receiver.has(changed(1, 10), changed(3, 12)) == [ask(since=1)]
    assert receiver.has(changed(4, 13)) == []
    assert receiver.held() == {10}
    assert receiver.sets.lagging == 1
    assert receiver.sets.due(ASK_AGAIN_S / 2) == []
    assert receiver.sets.due(ASK_AGAIN_S) == [ask(since=1)]
    assert receiver.has(changed(2, 11, 12, 13)) == []
    assert receiver.held() == {10, 11, 12, 13}
    assert receiver.sets.lagging == 0
    assert receiver.sets.due(10 * ASK_AGAIN_S) == []


def test_an_origin_that_is_not_known_is_far_behind(receiver: Receiver) -> None:
    assert receiver.has(changed(1000, 10)) == [ask(since=0)]
    assert receiver.has(Deltas(ORIGIN, EPOCH, 1001, 1000, NONE, NONE, 5)) == []


def test_another_epoch_drops_the_origin_and_no_message_of_the_former_returns(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 10, 11))
    assert receiver.has(changed(5, 20, epoch=2)) == [ask(since=0, epoch=2)]
    assert receiver.held() == set()
    assert receiver.has(changed(3, 12)) == []
    assert receiver.has(changed(1, 20, 21, 22, 23, 24, epoch=2)) == []
    assert receiver.held() == {20, 21, 22, 23, 24}
    assert receiver.sets.counters.outdated == 1


def test_an_epoch_that_was_never_seen_does_not_replace_a_later_one(receiver: Receiver) -> None:
    receiver.has(changed(1, 10), changed(1, 30, epoch=3), changed(1, 20, epoch=2))
    assert receiver.held() == {30}
    assert receiver.has(changed(2, 31, epoch=3)) == []
    assert receiver.held() == {30, 31}


def test_an_origin_whose_clock_went_back_is_heard_once_its_later_epoch_is_silent(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 20, epoch=2))
    receiver.now = SILENT_S - 1
    receiver.has(changed(1, 10))
    assert receiver.held() == {20}
    receiver.now = SILENT_S
    assert receiver.has(changed(2, 11)) == [ask(since=0)]
    assert receiver.held() == set()
    receiver.has(changed(1, 10, 11))
    assert receiver.held() == {10, 11}


def test_a_digest_that_differs_leads_to_the_ranges_that_differ(receiver: Receiver) -> None:
    assert receiver.has(changed(1, 10, 11, 1034, lie=True)) == [ask()]
    assert receiver.has(sums(3, 10, 11, 1034, 12, 2060)) == [ask(None, 12)]
    assert receiver.has(contents(3, 12, 12, 2060)) == []
    assert receiver.held() == {10, 11, 12, 1034, 2060}
    right = Deltas(ORIGIN, EPOCH, 4, 3, NONE, NONE, receiver.table.digest(ORIGIN))
    assert receiver.has(right) == []
    assert receiver.sets.counters.differences == 1


def test_a_node_that_lags_further_repairs_by_ranges_while_changes_go_on(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 1, 2))
    assert receiver.has(changed(500, 99)) == [ask(since=2)]
    assert receiver.has(sums(600, 2, 3, 4)) == [ask(None, 1, 3, 4)]
    assert receiver.has(changed(601, 5)) == []
    assert receiver.has(contents(601, 1), contents(602, 3, 3, 1027)) == []
    assert receiver.has(contents(602, 4)) == [ask(since=601)]
    assert receiver.held() == {2, 3, 5, 1027}
    assert receiver.has(changed(602, 1027)) == []
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 602)


def test_contents_from_before_are_applied_if_asked_for_and_changes_repeated(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 1, 2), sums(5, 1, 2, 3), changed(6, 1027, removed=(1,)))
    assert receiver.has(contents(5, 3, 3)) == [ask(since=5)]
    assert receiver.held() == {2, 3}
    assert receiver.has(changed(6, 1027, removed=(1,))) == []
    assert receiver.held() == {2, 3, 1027}
    assert receiver.has(contents(5, 3, 3)) == []
    assert receiver.held() == {2, 3, 1027}


def test_many_ranges_are_asked_for_some_at_a_time(receiver: Receiver) -> None:
    (first,) = receiver.has(sums(900, *range(100)))
    assert first.ranges == tuple(range(32))
    for each in range(31):
        assert receiver.has(contents(900, each, each)) == []
    receiver.now = ASK_AGAIN_S
    assert receiver.sets.due(receiver.now) == [ask(None, 31)]
    (second,) = receiver.has(contents(900, 31, 31))
    assert second.ranges == tuple(range(32, 64))


def test_checksums_from_before_change_nothing(receiver: Receiver) -> None:
    assert receiver.has(changed(1, 1, 2), sums(1, 1)) == []
    assert receiver.held() == {1, 2}


def test_a_digest_means_nothing_while_a_range_is_newer(receiver: Receiver) -> None:
    receiver.has(changed(1, 1, 2), sums(5, 1, 2, 3))
    assert receiver.has(contents(8, 3, 3, 1027)) == [ask(since=5)]
    digest = total(sums_by_range(u64((1, 2, 3, 4))))
    assert receiver.has(Deltas(ORIGIN, EPOCH, 6, 6, u64([4]), NONE, digest)) == []
    assert receiver.sets.counters.differences == 0


def test_a_full_table_asks_for_no_repair(receiver: Receiver) -> None:
    class FullTable(HolderTable):
        is_full = True

    receiver.sets = ReceivedSets(FullTable(0))
    assert receiver.has(changed(1, 1, 2, lie=True)) == []
    assert receiver.has(sums(5, 1, 2, 3)) == []
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 5)


def test_what_others_say_of_an_origin_is_forgotten_once_it_answers_otherwise(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 10, 11))
    assert receiver.has(changed(1 << 47, 12)) == [ask(since=2)]
    assert receiver.sets.receive(changed(3), 0.0) == []
    receiver.sets.answered(ask(since=2), 0.0)
    assert receiver.sets.lagging == 0
    assert receiver.sets.due(10 * ASK_AGAIN_S) == []
    assert receiver.has(changed(3, 12)) == []
    assert receiver.held() == {10, 11, 12}


def test_changes_that_an_origin_never_made_are_dropped_once_all_say_so(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 10, 11), changed(3, 66, 67, 68))
    right = Deltas(ORIGIN, EPOCH, 3, 2, NONE, NONE, total(sums_by_range(u64((10, 11)))))
    for receiver.now in range(int(SILENT_S)):
        assert receiver.has(right) == []
    receiver.now = SILENT_S
    assert receiver.has(right) == [ask(since=0)]
    assert receiver.held() == set()
    assert receiver.sets.receive(changed(1, 10, 11), receiver.now) == []
    assert receiver.has(right) == []
    assert receiver.held() == {10, 11}
    assert receiver.sets.lagging == 0


def test_an_answer_of_the_origin_itself_counts_whatever_epoch_others_told(
    receiver: Receiver,
) -> None:
    receiver.has(changed(1, 10, 11))
    assert receiver.has(changed(1, 66, epoch=1 << 63)) == []
    assert receiver.has(sums(2, 10, 11)) == [ask(None, 10, 11)]
    assert receiver.has(contents(2, 10, 10), contents(2, 11, 11)) == []
    assert receiver.held() == {10, 11}
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 2)


def test_an_origin_that_left_is_forgotten(receiver: Receiver) -> None:
    receiver.has(changed(1, 1), changed(3, 2))
    receiver.sets.forget(ORIGIN)
    assert receiver.held() == set()
    assert receiver.sets.standing(ORIGIN) is None
    assert receiver.sets.due(100.0) == []


# --- an origin and a receiver, and a network that loses


class LossyNetwork:
    """Messages on their way, lost, doubled, out of order, damaged."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.is_lossy = True
        self._queue: list[bytes] = []

    def send(self, message: Message) -> None:
        packed = encode(message)
        for _ in range(self.chance.choice((0, 1, 1, 1, 2)) if self.is_lossy else 1):
            if self.is_lossy and self.chance.random() < 0.1:
                damaged = bytearray(packed)
                damaged[self.chance.randrange(len(packed))] ^= 1 << self.chance.randrange(8)
                packed = bytes(damaged)
            self._queue.append(packed)

    def deliver(self, to: Callable[[Message], None]) -> None:
        """Delivers some; without losses, all."""
        if self.is_lossy:
            self.chance.shuffle(self._queue)
        some = self.chance.randrange(len(self._queue) + 1) if self.is_lossy else None
        for _ in range(len(self._queue) if some is None else some):
            try:
                message = decode(self._queue.pop(0))
            except Corrupt:
                continue
            to(message)


@pytest.mark.parametrize("round_", range(20 if LONG else 2))
def test_it_converges_whatever_is_lost(tmp_path: Path, round_: int) -> None:
    chance = random.Random(random.randrange(1 << 32))
    path = tmp_path / "own"

    def begin(boot: int) -> OwnSet:
        made = OwnSet.open(path, ORIGIN, boot, MOST_INTENTS + KEPT)
        made.mark_filled()
        return made

    own, receiver = begin(0), Receiver()
    there, back = LossyNetwork(chance), LossyNetwork(chance)
    told = 0

    def at_origin(message: Message) -> None:
        assert isinstance(message, HoldingsAsk)
        for each in answer(own, message):
            there.send(each)

    def at_receiver(message: Message) -> None:
        assert not isinstance(message, HoldingsAsk)
        for each in receiver.receive(message):
            back.send(each)

    def exchange() -> None:
        nonlocal told
        deltas = own.deltas_since(told)
        there.send(deltas or checksums(own))
        told = own.sequence
        receiver.now += 1
        there.deliver(at_receiver)
        for each in receiver.sets.due(receiver.now):
            back.send(each)
        back.deliver(at_origin)

    for step in range(120):
        some = u64(chance.randrange(3000) for _ in range(chance.randrange(chance.choice((9, 90)))))
        own.ensure(some)
        own.remove(u64(chance.randrange(3000) for _ in range(chance.randrange(9))))
        if chance.random() < 0.02:
            own = begin(step + 1)
            told = 0
        if chance.random() < 0.02:
            receiver.table.apply(ORIGIN, u64([chance.randrange(3000)]), some)
        exchange()
    there.is_lossy = back.is_lossy = False
    for _ in range(300):
        exchange()
    expected = {each for range_ in range(RANGES) for each in own.fingerprints(range_).tolist()}
    assert receiver.held() == expected, round_
    assert receiver.sets.standing(ORIGIN) == (own.epoch, own.sequence)
    assert receiver.sets.lagging == 0
    assert receiver.sets.counters.gaps
    assert np.array_equal(receiver.table.checksums(ORIGIN), own.checksums())


# --- homes of some ranges


def share_of(*ranges: int) -> Share:
    found = no_ranges()
    found[list(ranges)] = True
    return found


def home(*ranges: int) -> Receiver:
    receiver = Receiver()
    receiver.table = HolderTable(0, is_turned=True)
    receiver.sets = ReceivedSets(receiver.table)
    receiver.sets.set_share(share_of(*ranges))
    return receiver


def count(receiver: Receiver) -> int:
    return receiver.table.count(ORIGIN)


def test_a_home_applies_its_ranges_alone() -> None:
    receiver = home(1, 3)
    assert receiver.has(changed(1, 1, 2, 3), changed(4, RANGES + 1, removed=(3,))) == []
    assert receiver.table.probe(u64([1, 2, 3, RANGES + 1])) == {0: [ORIGIN], 3: [ORIGIN]}
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 5)


def test_a_home_asks_for_changes_that_may_have_been_left_out() -> None:
    receiver = home(1)
    receiver.has(changed(1, 1))
    partly = of_messages([changed(2, 2)])
    assert receiver.sets.receive_batch(partly, 1.0, is_whole=False) == [ask(1)]
    assert receiver.sets.standing(ORIGIN) == (EPOCH, 1)
    nothing_new = of_messages([Deltas(ORIGIN, EPOCH, 2, 1, NONE, NONE, None)])
    assert receiver.sets.receive_batch(nothing_new, 9.0, is_whole=False) == [ask(1)]
    assert receiver.sets.receive(changed(2, RANGES + 1), 10.0) == []
    assert receiver.sets.receive_batch(nothing_new, 11.0, is_whole=False) == []
    assert count(receiver) == 2


def test_a_range_that_is_gained_is_asked_for_and_one_that_is_lost_goes() -> None:
    receiver = home(1)
    receiver.has(changed(1, 1, 2, 3))
    receiver.sets.set_share(share_of(2))
    assert receiver.sets.due(1.0) == [ask()]
    while receiver.table.step():
        pass
    assert count(receiver) == 0
    assert receiver.has(sums(3, 1, 2, 3)) == [ask(None, 2)]
    assert receiver.has(contents(3, 1, 1)) == []  # nobody asked for it
    assert receiver.has(contents(3, 2, 2)) == []
    assert receiver.table.probe(u64([1, 2, 3])) == {1: [ORIGIN]}


def test_a_home_asks_for_checksums_in_place_of_very_many_changes() -> None:
    receiver = home(1)
    assert receiver.has(changed(1, 1)) == []
    assert receiver.receive(Deltas(ORIGIN, EPOCH, 9000, 9000, u64([5]), NONE, None)) == [ask()]


def test_a_home_compares_checksums_now_and_then() -> None:
    receiver = home(1)
    receiver.has(changed(1, 1))
    assert receiver.sets.due(1.0) == []
    assert receiver.sets.due(700.0) == [ask()]
    assert receiver.has(sums(1, 1)) == []
    assert receiver.sets.due(900.0) == []


def test_a_home_compares_the_checksums_of_all_origins_within_ten_minutes() -> None:
    receiver = home(1)
    origins = range(1, 301)
    batch = [Deltas(each, EPOCH, 1, 1, u64([1]), NONE, None) for each in origins]
    receiver.sets.receive_batch(of_messages(batch), 0.0)
    asked: set[int] = set()
    for second in range(602):
        asked |= {each.store for each in receiver.sets.due(float(second))}
        assert len(asked) <= second / 2
    assert asked == set(origins)
