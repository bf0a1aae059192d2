"""Sums of removals: what is told arrives, and nothing else is believed."""

import random

import pytest

from kvfs.base.errors import Corrupt
from kvfs.node.names.removal_sums import RemovalSum, decode, encode, pack

TOLD = [RemovalSum(1, 2, 3, 4, (1 << 64) - 1), RemovalSum(65535, 65535, 1 << 31, 1 << 31, 0)]


def test_what_is_told_arrives() -> None:
    assert decode(encode(map(pack, TOLD))) == TOLD
    assert decode(encode([])) == []


def test_what_is_damaged_or_cut_is_refused() -> None:
    message, chance = encode(map(pack, TOLD)), random.Random(5)
    for size in range(len(message)):
        with pytest.raises(Corrupt):
            decode(message[:size])
    for _ in range(200):
        damaged = bytearray(message)
        damaged[chance.randrange(len(message))] ^= 1 << chance.randrange(8)
        with pytest.raises(Corrupt):
            decode(bytes(damaged))
