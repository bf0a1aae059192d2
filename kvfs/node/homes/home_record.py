"""The engine's record of the homes of names (`kvfs.holdings.home_map`): all nodes of a cluster go
by it, from the entry of the log on that brings it."""

from typing import Final

import msgspec

from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import pack


class HomeRecord(msgspec.Struct, array_like=True, kw_only=True, frozen=True):
    """The homes."""

    number: int = 0
    """It grows with each change."""
    zones: dict[int, str] = {}
    """The nodes that are homes, with their zones; empty: each node knows all names."""


_unpack: Final = msgspec.msgpack.Decoder(HomeRecord).decode


def read(t: Transaction) -> HomeRecord:
    """Returns the record; without one, that each node knows all names."""
    value = t.get(keys.HOMES)
    return HomeRecord() if value is None else _unpack(value)


def replace(t: Transaction, zones: dict[int, str]) -> None:
    """Makes these nodes the homes."""
    t.put(keys.HOMES, pack(HomeRecord(number=read(t).number + 1, zones=zones)))
