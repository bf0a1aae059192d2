"""Which keys are a node's own, by their beginnings."""

import random

from kvfs.meta import keys
from kvfs.meta.local_keys import ROOT, is_local_key, local_beginnings

SPACE = keys.pack_u16(258)
"""Its bytes differ, and neither is a class of keys that begins with a node."""


def test_a_key_that_begins_like_a_local_one_is_local() -> None:
    beginnings = set(local_beginnings(SPACE))
    chance = random.Random(7)
    for kind in range(256):
        for space in (SPACE, keys.pack_u16(259), b""):
            for tail in (b"", keys.pack_node(1), ROOT, ROOT + b"name", chance.randbytes(14)):
                key = bytes([kind]) + space + tail
                if key[:3] in beginnings and key[3:9] != ROOT:
                    assert is_local_key(key, {SPACE}), key


def test_the_keys_of_a_block_begin_like_local_ones() -> None:
    beginnings = set(local_beginnings(SPACE))
    ino = 258 << 48 | 4711
    of_block = (keys.inode(ino), keys.file_entry(ino, b"a"), keys.unsealed(ino), keys.times(ino))
    others = (keys.unpublished(ino), keys.placement(ino, b"\0\1"), keys.usage(258))
    assert all(key[:3] in beginnings for key in (*of_block, *others))
