"""Whether a new file may be made now: credit between samples of the used space, and a queue when
there is none.

Passthrough writes are not seen, so used space is sampled: every 50 ms while it changes, every
second when nothing is written, and by creates themselves when they have used up the credit of the
last sample. A create asks `pressed` (a dictionary look-up); only if that is true does it go through
`make_room`.

Invariants
- A used-space figure comes from `Accounting` alone.
- Creates that wait for one namespace go on in the order in which they came, each after a sample of
  its own: the file of the one before counts already.
- A durable namespace, and a store without evictable files, is refused at once; nobody waits without
  hope.
"""

import time
from typing import Final

import trio

from kvfs.base.errors import NoSpace
from kvfs.base.units import format_size
from kvfs.meta.engine import Engine
from kvfs.policy import eviction
from kvfs.vfs.space_accounting import STORE, Accounting, Census, Space

_CREDIT_BYTES: Final = 64 << 20
_SHORTEST_PERIOD_S: Final = 0.005
_BUSY_PERIOD_S: Final = 0.05
_QUIET_PERIOD_S: Final = 0.25
_IDLE_PERIOD_S: Final = 1.0
_COST_FACTOR: Final = 20
"""A census may take at most this part of the time, however many namespaces there are."""
DEADLINE_S: Final = 10.0


class Admission:
    """Decides who may make files; the evictor reports to it after each of its rounds."""

    def __init__(self, engine: Engine, accounting: Accounting) -> None:
        self._engine = engine
        self._accounting = accounting
        self._pressed: frozenset[int] = frozenset()
        self._stuck: frozenset[int] = frozenset()
        self._credit: dict[int, int] = {}
        self._demands: list[tuple[int, int]] = []
        self._turns: dict[int, trio.StrictFIFOLock] = {}
        self._census: Census | None = None
        self._cost_s = 0.0
        self._period_s = _BUSY_PERIOD_S
        self._used = -1
        self._idle = False
        self._wake = trio.Event()
        self._round = trio.Event()
        self.refused = 0
        """Files that were refused for lack of space since the start."""

    def must_wait(self, namespace_id: int) -> bool:
        """Returns whether `pressed` would be true now; asking costs nothing."""
        return self._credit.get(namespace_id, 0) <= 0

    def pressed(self, namespace_id: int) -> bool:
        """Returns whether a create or an open for writing in the namespace must go through
        `make_room`.

        Asked by each of them, so cheap: between two samples a namespace has credit for as many as
        fit in its free space at 64 MiB each.
        """
        if self._idle:
            # What is made may have nothing in it yet: it is looked at more often for a while, and
            # not once for each file.
            self._idle = False
            self._period_s = _BUSY_PERIOD_S
            self._wake.set()
        credit = self._credit.get(namespace_id, 0)
        if credit <= 0:
            return True
        self._credit[namespace_id] = credit - 1
        return False

    async def make_room(self, namespace_id: int, deadline_s: float = DEADLINE_S) -> None:
        """Waits until the namespace has space for a new file.

        Raises NoSpace, naming what is full, when nothing can be evicted or the deadline has passed.
        Cancelled: nothing happened.
        """
        turn = self._turns.setdefault(namespace_id, trio.StrictFIFOLock())
        with trio.move_on_after(deadline_s):
            async with turn:
                await self._wait_for_room(namespace_id)
        if self._is_full(namespace_id):
            self.refused += 1
            raise NoSpace(self._what_is_full(namespace_id))

    async def room_for(self, namespace_id: int, size: int) -> None:
        """Waits until `size` bytes are free in the namespace, which the evictor brings about. A
        file as large as a credit takes one, as a new file does.

        Raises NoSpace, naming what is full, when so much is not available or the deadline has
        passed. Cancelled: nothing happened.
        """
        if size <= _CREDIT_BYTES and not self.pressed(namespace_id):
            return
        census = await self.sample()
        demand = (namespace_id, size)
        if size <= census.attainable(namespace_id):
            self._demands.append(demand)
            try:
                with trio.move_on_after(DEADLINE_S):
                    census = await self._wait_for_bytes(namespace_id, size, census)
            finally:
                self._demands.remove(demand)
        if census.space(namespace_id).free < size:
            self.refused += 1
            raise NoSpace(self._what_is_full(namespace_id))

    def lacking(self, number: int, space: Space) -> int:
        """Returns the bytes that callers of `room_for` lack in a namespace, or in the store as a
        whole."""
        wanted = sum(size for each, size in self._demands if number in (each, STORE))
        return space.used + wanted - space.capacity if wanted else 0

    async def sample(self) -> Census:
        """Takes the census, and gives credit to creators of files accordingly."""
        began = time.perf_counter()
        census = await self._engine.read(self._accounting.census)
        self._cost_s = time.perf_counter() - began
        coming = sum(each.coming for each in census.namespaces.values())
        pressed = set()
        self._credit[STORE] = census.store.free // _CREDIT_BYTES
        for number, holding in census.namespaces.items():
            free = census.store.free
            if holding.is_cache:
                free -= eviction.reserve(coming, census.store.capacity)
            if holding.limited:
                own = eviction.reserve(holding.coming, holding.space.capacity)
                free = min(free, holding.space.free - (own if holding.is_cache else 0))
            self._credit[number] = free // _CREDIT_BYTES
            if free <= 0:
                pressed.add(number)
        self._pressed = frozenset(pressed)
        self._census = census
        if pressed:
            self._wake.set()
        return census

    def round_ended(self, stuck: set[int]) -> None:
        """Notes that the evictor has done what it could; `stuck` are the limits (namespaces, or
        STORE) that are exceeded though nothing could be evicted."""
        self._stuck = frozenset(stuck)
        self._round.set()
        self._round = trio.Event()

    async def pause(self) -> None:
        """Waits until the next sample is due, something is full, or, when idle, a file is made."""
        assert self._census is not None
        writing = any(each.writers for each in self._census.namespaces.values())
        if self._census.store.used != self._used:
            self._period_s = _BUSY_PERIOD_S
        else:
            slowest = _QUIET_PERIOD_S if writing else _IDLE_PERIOD_S
            self._period_s = min(self._period_s * 1.5, slowest)
        self._used = self._census.store.used
        period_s = max(self._period_s, self._cost_s * _COST_FACTOR)
        self._idle = period_s >= _QUIET_PERIOD_S
        self._wake = trio.Event()
        await trio.sleep(_SHORTEST_PERIOD_S)
        with trio.move_on_after(period_s - _SHORTEST_PERIOD_S):
            await self._wake.wait()

    async def _wait_for_room(self, namespace_id: int) -> None:
        """Waits until there is space, or no hope of it. The first round whose end we see may have
        begun before files became evictable that are now."""
        await self.sample()
        rounds = 0
        while namespace_id in self._pressed:
            if await self._round_in_vain(namespace_id) and rounds:
                return
            rounds += 1

    async def _wait_for_bytes(self, namespace_id: int, size: int, census: Census) -> Census:
        rounds = 0
        while census.space(namespace_id).free < size:
            self._wake.set()
            in_vain = await self._round_in_vain(namespace_id)
            assert self._census is not None
            census = self._census
            if in_vain and rounds:
                break
            rounds += 1
        return census

    async def _round_in_vain(self, namespace_id: int) -> bool:
        """Returns, after the next end of a round and another sample, whether waiting cannot help,
        by the state before that round and the present one."""
        await self._round.wait()
        hopeless = self._hopeless(namespace_id)
        await self.sample()
        return hopeless and self._hopeless(namespace_id)

    def _is_full(self, namespace_id: int) -> bool:
        """Returns whether nothing more fits, as of the last sample."""
        assert self._census is not None
        return not self._census.space(namespace_id).free

    def _hopeless(self, namespace_id: int) -> bool:
        """Returns whether waiting cannot help: the full limit holds nothing evictable, nor anything
        that soon will be."""
        census = self._census
        assert census is not None
        holding = census.namespaces.get(namespace_id)
        if holding is not None and holding.limited and census.store.free:
            if not holding.gives_way:
                return True
            return namespace_id in self._stuck and not holding.writers and not census.settles
        writers = any(each.writers for each in census.namespaces.values() if each.gives_way)
        return STORE in self._stuck and not writers and not census.settles

    def _what_is_full(self, namespace_id: int) -> str:
        census = self._census
        assert census is not None
        holding = census.namespaces.get(namespace_id)
        if holding is not None and holding.limited and census.store.free:
            name = holding.name.decode(errors="backslashreplace")
            size = format_size(holding.space.capacity)
            return (
                f"the namespace {name} is full ({size}): remove files from it, or raise its "
                f"capacity with `kvfs namespace set {name} --capacity`"
            )
        size = format_size(census.store.capacity)
        return f"the store is full ({size}): remove files, raise its capacity or free its disk"
