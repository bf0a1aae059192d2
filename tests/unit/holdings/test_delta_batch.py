"""Changes of many origins in one message: what is told arrives, and nothing else is believed."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Corrupt
from kvfs.holdings.delta_batch import (
    MOST_OF_ORIGIN,
    DeltaBatch,
    decode,
    encode,
    of_messages,
    packed,
)
from kvfs.holdings.delta_codec import MOST_CHANGES
from kvfs.holdings.fingerprints import BITS
from kvfs.holdings.messages import Deltas
from tests.unit.holdings.claim_model import u64

HEAD, ROW = 20, 32
numbers = st.integers(1, 1 << 40)
fingerprints = st.sets(st.integers(0, (1 << BITS) - 1), max_size=20)


@st.composite
def deltas(draw: st.DrawFn) -> Deltas:
    some = draw(fingerprints)
    added = {each for each in some if draw(st.booleans())}
    first = draw(numbers)
    last = first - 1 + len(some) + draw(st.integers(0, 50))
    digest = draw(st.none() | st.integers(0, (1 << 64) - 1))
    removed = u64(sorted(some - added))
    store, epoch = draw(st.integers(0, (1 << 16) - 1)), draw(st.integers(0, (1 << 64) - 1))
    return Deltas(store, epoch, first, last, u64(sorted(added)), removed, digest)


def fields(message: Deltas) -> list[object]:
    values = [getattr(message, name) for name in Deltas.__slots__]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in values]


def told(batch: DeltaBatch) -> list[list[object]]:
    return [fields(each) for each in batch.messages()]


def resigned(message: bytes) -> bytes:
    """The message with a checksum that is right for what it says."""
    return message[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(message[:-8]))


def changed(store: int, *added: int, removed: tuple[int, ...] = ()) -> Deltas:
    count = len(added) + len(removed)
    return Deltas(store, 1, 7, 6 + count, u64(added), u64(removed), 99)


@given(st.lists(st.lists(deltas(), min_size=1, max_size=5), min_size=1, max_size=4))
def test_what_is_told_arrives_in_its_order(parts: list[list[Deltas]]) -> None:
    message = encode([packed(of_messages(each)) for each in parts])
    assert told(decode(message)) == [fields(each) for part in parts for each in part]


@given(st.lists(deltas(), min_size=1, max_size=8), st.data())
def test_rows_are_passed_on_as_they_came(messages: list[Deltas], data: st.DataObject) -> None:
    chosen = [data.draw(st.booleans()) for _ in messages]
    batch = decode(encode([packed(of_messages(messages))])).of(np.array(chosen))
    again = decode(encode([packed(batch)]))
    assert told(again) == [
        fields(each) for each, is_it in zip(messages, chosen, strict=True) if is_it
    ]


def test_damage_and_other_lengths_are_refused() -> None:
    message = encode([packed(of_messages([changed(3, 1, 2, removed=(9,)), changed(4, 5)]))])
    chance = random.Random(3)
    for _ in range(300):
        damaged = bytearray(message)
        damaged[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
        with pytest.raises(Corrupt):
            decode(bytes(damaged))
    for size in range(len(message)):
        with pytest.raises(Corrupt):
            decode(message[:size])
    with pytest.raises(Corrupt):
        decode(message + b"x")
    with pytest.raises(Corrupt, match="version 1"):
        decode(resigned(message[:4] + b"\2" + message[5:]))


@pytest.mark.parametrize(
    ("offset", "layout", "value"),
    [
        (HEAD + 2, "<H", 0),  # fewer changes than fingerprints
        (HEAD + 2, "<H", MOST_CHANGES + 1),
        (HEAD + 4, "<H", 3),  # more are added than there are
        (HEAD + 4, "<H", 1),
        (HEAD + 16, "<Q", 0),  # there is no change 0
        (HEAD + 16, "<Q", 1 << 48),
        (HEAD + 16, "<Q", (1 << 64) - 1),
        (HEAD + 2 * ROW, "<Q", 2),  # fingerprints that are there twice, or not in order
        (HEAD + 2 * ROW, "<Q", 3),
    ],
)
def test_a_message_that_no_origin_makes_is_refused(offset: int, layout: str, value: int) -> None:
    message = bytearray(encode([packed(of_messages([changed(3, 1, 2), changed(4, 1)]))]))
    size = 6 if offset == HEAD + 2 * ROW else struct.calcsize(layout)
    message[offset : offset + size] = struct.pack(layout, value)[:size]
    with pytest.raises(Corrupt):
        decode(resigned(bytes(message)))


def test_an_origin_has_not_more_rows_than_are_applied_in_a_moment() -> None:
    rows = [packed(of_messages([changed(3, 1)]))] * MOST_OF_ORIGIN
    assert len(decode(encode(rows))) == MOST_OF_ORIGIN
    with pytest.raises(Corrupt, match="rows of one origin"):
        decode(encode([*rows, rows[0]]))


def test_counts_that_are_huge_take_no_memory() -> None:
    message = bytearray(encode([packed(of_messages([changed(3, 1)]))]))
    for offset in (8, 12, 16):
        lying = bytearray(message)
        lying[offset : offset + 4] = b"\xff" * 4
        tracemalloc.start()
        with pytest.raises(Corrupt):
            decode(resigned(bytes(lying)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 16


def test_a_change_takes_few_bytes() -> None:
    """Fifteen of each of a thousand nodes take 8 bytes each."""
    chance = random.Random(1)
    some = [
        changed(store, *sorted(chance.sample(range(1 << BITS), 15))) for store in range(1, 1000)
    ]
    assert len(encode([packed(of_messages(some))])) / (999 * 15) < 8.2
