"""Notices: names that another process changed, and that the node's mount may not have forgotten.

Written in the transaction that changes the names, removed once the node has said that its kernel
forgot them. So a process that is killed between the two leaves the notice, and the node, which
looks for notices that are older than any caller waits, makes its kernel forget after all.
"""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.tree.changes import Change

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, bytes, int]]).decode


class Notice(NamedTuple):
    """Changes that were made together."""

    key: bytes
    changes: list[Change]


def post(t: Transaction, changes: Sequence[Change], now: int) -> bytes:
    """Leaves a notice, made at `now` (ns since the epoch); returns the key to remove it by."""
    key = keys.NOTICE + keys.pack_u64(now) + os.urandom(8)
    t.put(key, _encode(changes))
    return key


def remove(t: Transaction, posted: Iterable[bytes]) -> None:
    """Removes notices that were acted on."""
    for key in posted:
        t.delete(key)


def waiting(t: Transaction, before_ns: int, limit: int) -> list[Notice]:
    """Returns up to `limit` notices made before `before_ns`, oldest first."""
    found: list[Notice] = []
    for key, value in t.scan(b"t", keys.notice(before_ns, b"")):
        found.append(Notice(key, [Change(*each) for each in _decode(value)]))
        if len(found) == limit:
            break
    return found
