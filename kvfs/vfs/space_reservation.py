"""The space for what a client is about to write.

Space is reserved in the transaction that makes a file's record, before its first byte: usage counts
it from then on, in every process. Only the node knows the files that its mount has open for
writing; so as long as one runs, a client that has not asked it stays away from a limit by half of
the headroom that the node keeps ahead of its writers. When it is asked, the node evicts, and says
how much of the usage other nodes of its cluster have: that takes no space here.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvfs.base import config
from kvfs.base.errors import NoSpace
from kvfs.base.units import Capacity, format_size
from kvfs.meta.engine import Transaction
from kvfs.policy.eviction import headroom
from kvfs.vfs.node_client import NodeClient
from kvfs.vfs.space_accounting import STORE, Accounting, Census, Space

_VALID_S: Final = 10.0
"""Time for which a capacity is believed."""
_ATTEMPTS: Final = 5

Sizes = Mapping[int, int]
"""Bytes wanted, by namespace id."""


class ReservationRefused(NamedTuple):
    """The refusal of space that may not be taken before the node was asked, or at all."""

    wanted: Sizes
    full: str
    """The part that is full."""


class SpaceReservation:
    """The space that one client asks for, from any thread."""

    def __init__(self, root: str, node: NodeClient, before_asking: Callable[[], None]) -> None:
        """`before_asking` tells the node of freed space that it does not know yet."""
        self._root = root
        self._node = node
        self._before_asking = before_asking
        self._accounting = Accounting(root, Capacity(), list)
        self._guarded = False
        """Whether a node runs, which knows more than we."""
        self._valid_until = 0.0

    def refuse(self, t: Transaction, wanted: Sizes, attempt: int) -> ReservationRefused | None:
        """Returns None if this much may be reserved in this transaction. `attempt` counts from 0;
        before the next one, `demand` what was refused."""
        if time.monotonic() >= self._valid_until and not attempt:
            return ReservationRefused(wanted, "")
        census = self._accounting.census(t)
        spared = self._guarded and not attempt
        if not _has(census.store, sum(wanted.values()), spared):
            return ReservationRefused(wanted, _what_is_full(census, STORE))
        for number, size in wanted.items():
            holding = census.namespaces.get(number)
            if holding is not None and holding.limited and not _has(holding.space, size, spared):
                return ReservationRefused(wanted, _what_is_full(census, number))
        return None

    def spare(self, t: Transaction, namespace_id: int) -> int:
        """Returns the bytes that a process may take beyond what it needs now: a quarter of the
        headroom that is kept free anyway, so that nothing is evicted for them."""
        census = self._accounting.census(t)
        holding = census.namespaces.get(namespace_id)
        if holding is None or not holding.limited:
            return headroom(census.store.capacity) // 4
        return headroom(holding.space.capacity) // 4

    def demand(self, refused: ReservationRefused, attempt: int) -> None:
        """Asks the node for the space, which evicts. Raises NoSpace when there is none, Unavailable
        when the node does not answer."""
        if attempt == _ATTEMPTS or (attempt and not self._guarded):
            raise NoSpace(refused.full)
        answer = None
        self._before_asking()
        for number, size in refused.wanted.items():
            answer = self._node.ask_for_room(number, size)
        self._guarded = answer is not None
        limit = Capacity(size_bytes=answer.capacity_bytes) if answer else config.load()[0].capacity
        self._accounting = Accounting(self._root, limit, list)
        self._accounting.others = answer.others_bytes if answer else 0
        self._valid_until = time.monotonic() + _VALID_S


def _has(space: Space, size: int, spared: bool) -> bool:
    spare = headroom(space.capacity) // 2 if spared else 0
    return space.used + size <= space.capacity - spare


def _what_is_full(census: Census, number: int) -> str:
    holding = census.namespaces.get(number)
    if holding is None:
        size = format_size(census.store.capacity)
        return f"the store is full ({size}): remove files, raise its capacity or free its disk"
    name = holding.name.decode(errors="backslashreplace")
    return (
        f"the namespace {name} is full ({format_size(holding.space.capacity)}): remove files from "
        f"it, or raise its capacity with `kvfs namespace set {name} --capacity`"
    )
