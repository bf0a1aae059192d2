"""The members that `bench replay` plays tell what a node's own set would tell."""

from benchmarks._replayed_peers import PlayedSet
from benchmarks.replay import FULL, lacking_memory
from kvfs.holdings.delta_codec import decode, encode
from kvfs.holdings.fingerprints import NONE, gathered
from kvfs.holdings.holder_table import HolderTable
from kvfs.holdings.messages import HoldingsAsk
from kvfs.holdings.received_sets import ReceivedSets


def receive(received: ReceivedSets, played: PlayedSet, changes: int, now: float) -> int:
    """Returns how many questions it took."""
    message = decode(encode(played.grow(changes)))
    assert not isinstance(message, HoldingsAsk)
    asks, count = received.receive(message, now), 0
    while asks:
        count += 1
        for each in played.answer(asks.pop(0)):
            told = decode(encode(each))
            assert not isinstance(told, HoldingsAsk)
            asks += received.receive(told, now)
    return count


def test_a_receiver_gets_all_names_and_every_change_without_a_difference() -> None:
    table, played = HolderTable(), PlayedSet(5, 20_000)
    received = ReceivedSets(table)
    assert receive(received, played, 0, 0.0) == 1
    assert table.counters.claims == 20_000
    for step in range(1, 6):
        assert receive(received, played, 30, float(step)) == 0
    assert table.counters.claims == 20_000
    assert received.counters.differences == 0


def test_a_receiver_that_has_other_names_gets_the_ranges() -> None:
    table, played = HolderTable(), PlayedSet(5, 2_000)
    received = ReceivedSets(table)
    receive(received, played, 0, 0.0)
    table.apply(5, gathered([1, 2, 3]), NONE)
    receive(received, played, 2, 1.0)
    assert table.counters.claims == 2_000


def test_a_machine_without_the_memory_is_told_what_fits() -> None:
    assert lacking_memory(FULL, available=17 << 30) is None
    told = lacking_memory(FULL, available=9 * 10**9)
    assert told is not None
    assert "--blocks 529941 or fewer" in told
