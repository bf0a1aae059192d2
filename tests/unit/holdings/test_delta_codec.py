"""The wire form of messages about holdings: what is sent arrives, and nothing else is believed."""

import random
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvfs.base.errors import Corrupt, TooLarge
from kvfs.holdings import delta_codec
from kvfs.holdings.delta_codec import MOST_CHANGES, MOST_IN_RANGE, decode, encode
from kvfs.holdings.fingerprints import BITS, NONE, RANGES
from kvfs.holdings.messages import Checksums, Deltas, HoldingsAsk, Message, RangeContents
from tests.unit.holdings.claim_model import u64

wide = st.integers(0, (1 << 64) - 1)
numbers = st.integers(1, 1 << 40)
fingerprints = st.sets(st.integers(0, (1 << BITS) - 1), max_size=40)


@st.composite
def deltas(draw: st.DrawFn) -> Deltas:
    some = draw(fingerprints)
    added = {each for each in some if draw(st.booleans())}
    first = draw(numbers)
    last = first - 1 + len(some) + draw(st.integers(0, 50))
    digest = draw(st.none() | wide)
    removed = u64(sorted(some - added))
    return Deltas(draw(wide), draw(wide), first, last, u64(sorted(added)), removed, digest)


@st.composite
def range_contents(draw: st.DrawFn) -> RangeContents:
    range_ = draw(st.integers(0, RANGES - 1))
    some = {each & -RANGES | range_ for each in draw(fingerprints)}
    return RangeContents(draw(wide), draw(wide), draw(numbers), range_, u64(sorted(some)))


checksums = st.builds(
    lambda store, epoch, sequence, seed: Checksums(
        store,
        epoch,
        sequence,
        np.random.default_rng(seed).integers(0, 1 << 64, RANGES, dtype=np.uint64),
    ),
    wide,
    wide,
    numbers,
    st.integers(0, 1000),
)
asks = st.builds(HoldingsAsk, wide, wide, st.none() | numbers | st.just(0)) | st.builds(
    lambda store, epoch, ranges: HoldingsAsk(store, epoch, None, tuple(sorted(ranges))),
    wide,
    wide,
    st.sets(st.integers(0, RANGES - 1), max_size=50),
)
messages = st.one_of(deltas(), range_contents(), checksums, asks)


def fields(message: Message) -> list[object]:
    values = [getattr(message, name) for name in type(message).__slots__]
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in values]


def resigned(packed: bytes) -> bytes:
    """The message with a checksum that is right for what it says."""
    return packed[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed[:-8]))


@given(messages)
def test_what_is_sent_arrives(message: Message) -> None:
    packed = encode(message)
    assert len(packed) <= delta_codec.MOST_BYTES
    for form in (packed, memoryview(packed)):
        arrived = decode(form)
        assert type(arrived) is type(message)
        assert fields(arrived) == fields(message)


@given(messages, st.integers(0, 1 << 30), st.integers(1, 255))
def test_damage_is_seen(message: Message, at: int, flip: int) -> None:
    packed = bytearray(encode(message))
    packed[at % len(packed)] ^= flip
    with pytest.raises(Corrupt):
        decode(bytes(packed))


@given(messages, st.integers(0, 1 << 30), st.binary(max_size=20))
def test_a_message_that_is_cut_or_longer_is_refused(message: Message, at: int, more: bytes) -> None:
    packed = encode(message)
    for wrong in (packed[: at % len(packed)], packed + more + b"x"):
        with pytest.raises(Corrupt):
            decode(wrong)


@given(messages, st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), max_size=4))
def test_lies_under_a_right_checksum_are_refused_or_mean_what_they_say(
    message: Message, changes: list[tuple[int, int]]
) -> None:
    packed = bytearray(encode(message))
    for at, octet in changes:
        packed[at % len(packed)] = octet
    lie = resigned(bytes(packed))
    try:
        arrived = decode(lie)
    except Corrupt:
        return
    assert fields(decode(encode(arrived))) == fields(arrived)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(Corrupt):
        decode(noise)
    with pytest.raises(Corrupt):
        decode(resigned(b"KVHD\1" + noise + bytes(40)))


def test_counts_are_compared_before_memory_is_taken() -> None:
    packed = encode(RangeContents(1, 1, 1, 3, u64([3])))
    at = packed.index(struct.pack("<IB", 1, 1))
    tracemalloc.start()
    for count in (2, MOST_IN_RANGE, MOST_IN_RANGE + 1, (1 << 32) - 1):
        for width in (0, 1, 6, 255):
            lie = resigned(packed[:at] + struct.pack("<IB", count, width) + packed[at + 5 :])
            with pytest.raises(Corrupt):
                decode(lie)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_gaps_that_overflow_or_repeat_are_refused() -> None:
    widest = [(1 << 48) - 1] * 70_000
    for gaps in ([5, 0], [(1 << 38) - 1, 1], widest):
        octets = b"".join(each.to_bytes(6, "little") for each in gaps)
        body = struct.pack("<HIB", 3, len(gaps), 6) + octets
        head = struct.pack("<4sBBHQQQ", b"KVHD", 1, 2, 0, 1, 1, 1)
        with pytest.raises(Corrupt, match="order"):
            decode(resigned(head + body + bytes(8)))


def test_another_version_is_named() -> None:
    packed = bytearray(encode(HoldingsAsk(1, 1)))
    packed[4] = 2
    with pytest.raises(Corrupt, match="version 1"):
        decode(resigned(bytes(packed)))


def test_contradictions_are_refused() -> None:
    for message in (
        Deltas(1, 1, 1, 2, u64([5]), u64([5]), None),
        Deltas(1, 1, 1, 1, u64([5, 6]), NONE, None),
        Deltas(1, 1, 1, 1, u64([5]), u64([6]), None),
        Deltas(1, 1, 0, 1, NONE, NONE, None),
        HoldingsAsk(1, 1, 5, (1,)),
        HoldingsAsk(1, 1, None, (2, 1)),
        HoldingsAsk(1, 1, None, (RANGES,)),
        Deltas(1, 1, 1, 2, u64([6, 5]), NONE, None),
    ):
        with pytest.raises(Corrupt):
            decode(encode(message))


def test_too_much_for_a_message_is_refused_where_it_is_made() -> None:
    with pytest.raises(TooLarge):
        encode(Deltas(1, 1, 1, MOST_CHANGES + 1, NONE, NONE, None))
    many = np.arange(MOST_IN_RANGE + 1, dtype=np.uint64)
    with pytest.raises(TooLarge):
        encode(RangeContents(1, 1, 1, 0, many))


def test_a_delta_takes_seven_bytes_and_a_fingerprint_of_a_range_five() -> None:
    some = u64(sorted(random.Random(1).sample(range(1 << BITS), 1000)))
    assert len(encode(Deltas(1, 1, 1, 1000, some, NONE, 5))) < 7 * 1000
    upper = np.unique(some >> np.uint64(10))
    assert len(encode(RangeContents(1, 1, 1, 0, upper << np.uint64(10)))) < 5 * 1000 + 100


@pytest.mark.parametrize(
    ("message", "packed"),
    [
        (
            Deltas(1, 2, 3, 5, u64([4, 1 << 40]), u64([6]), 7),
            "4b564844010001000100000000000000020000000000000003000000000000000300000007000000"
            "0000000002000000050400000000fcffffffff0100000001068dcdb764e4b63037",
        ),
        (
            RangeContents(1, 2, 3, 4, u64([4, 1028])),
            "4b564844010200000100000000000000020000000000000003000000000000000400020000000100"
            "01244535a96d6e88f9",
        ),
        (
            HoldingsAsk(1, 2, None, (4, 5)),
            "4b564844010300000100000000000000020000000000000000000000000000000200040005"
            "00e5daae7105545fdb",
        ),
    ],
)
def test_the_wire_form_is_that_of_its_version(message: Message, packed: str) -> None:
    assert encode(message).hex() == packed, "raise VERSION with any change of the wire form"
    assert fields(decode(bytes.fromhex(packed))) == fields(message)
