"""Locks that reach beyond one host, and the host's locks that a mount with such must keep itself.

A kernel that leaves locks to its filesystem leaves it all of them. In a namespace whose locks reach
as far as the host they stand in this process's memory; in one with `locks = cluster` in the engine,
under the file's inode number, where every node sees them.

Invariants
- A lock in the engine counts while its owner's node is alive in the run that took it: nobody waits
  for a host that has gone, or was started again.
- A lock is granted by the transaction that finds nothing in its way: of several that ask at once,
  one has it.
- A node without a lease for long may find its locks gone, if others asked for them meanwhile. This
  is logged and counted, and the next call of their owner fails once (ENOLCK).
- A waiting request is made again when the file's locks have changed, and at least once in
  RECHECK_S, since the death of a node changes nothing in the engine.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import trio

from kvfs.base.errors import Conflict, NoLocks, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Namespace, namespace_of, pack
from kvfs.policy.byte_range_locks import LAST, ByteRangeLock, LockOwner, granted, obstacle, released
from kvfs.policy.lock_journal import LockJournal, LockNotes
from kvfs.tree import namespaces

log = logging.getLogger(__name__)
T = TypeVar("T")
RECHECK_S: Final = 1.0
_CLOSES_S: Final = 10.0


class LockTarget(NamedTuple):
    """The file that is locked, and the kind of lock."""

    ino: int
    whole: bool
    """Whether it means flock's locks rather than fcntl's: they do not see each other."""


Change = Callable[[Sequence[ByteRangeLock]], list[ByteRangeLock] | None]
"""Returns the locks held after it; None: something is in the way."""
IsAlive = Callable[[int, int], bool]
"""Returns whether a node, by number and incarnation, still has what it had locked."""


class LockEngine(Engine, Protocol):
    """An engine that can also be read at once."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read`, without ever suspending."""

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace. Raises Unavailable."""


_unpack = msgspec.msgpack.Decoder(list[ByteRangeLock]).decode


class Locks:
    """The locks of one mount's processes. `catch_up` returns when the engine here knows everything
    that any node was granted before in a namespace."""

    def __init__(
        self,
        engine: LockEngine,
        node: int,
        incarnation: int,
        is_alive: IsAlive,
        catch_up: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._catch_up = catch_up
        self._node = node
        self._incarnation = incarnation
        self._is_alive = is_alive
        self._here: dict[LockTarget, list[ByteRangeLock]] = {}
        self._reached: dict[LockTarget, set[LockOwner]] = {}
        """Owners of this mount that have had locks in the engine."""
        self._waiting: dict[LockTarget, trio.Event] = {}
        self._believed: dict[LockTarget, set[LockOwner]] = {}
        """Owners of this mount that have locks in the engine, unless they were lost."""
        self._lost: set[tuple[LockTarget, LockOwner]] = set()
        """Owners that are known to have lost their locks, and were not told."""
        self._asking: Counter[tuple[LockTarget, LockOwner]] = Counter()
        """Requests under way: recorded locks may be theirs already."""
        self.counters = {"locks_lost": 0}
        self._closing: dict[tuple[LockTarget, LockOwner], trio.Event] = {}
        """Owners that have closed the file, and still have locks in the engine."""
        self._journal = LockNotes(None)

    def owner(self, number: int) -> LockOwner:
        """Returns an owner of this mount, as its kernel names it."""
        return LockOwner(self._node, self._incarnation, number)

    def keep_journal(self, journal: LockJournal | None) -> None:
        """Says in a mount's journal from now on what the next daemon must know; None: the mount
        ends with this daemon."""
        self._journal = LockNotes(journal)

    async def go_on(self) -> None:
        """Goes on with the locks of programs whose daemon before has ended, as its journal and the
        engine have them. Comes before any request is served. Raises Unavailable."""
        spaces = set()
        for each in self._journal.all():
            place, owner = LockTarget(each.ino, each.whole), self.owner(each.owner)
            if not each.is_there:
                lock = ByteRangeLock(owner, each.exclusive, each.start, each.end, each.pid)
                self._here[place] = granted(self._here.get(place, ()), lock)
                continue
            self._reached.setdefault(place, set()).add(owner)
            if each.is_held:
                self._believed.setdefault(place, set()).add(owner)
                spaces.add(namespace_of(each.ino))
        for number in spaces:
            await self._catch_up(number)
        for place, owner in await self._engine.read(self._ours):
            if owner not in self._reached.setdefault(place, set()):
                self._reached[place].add(owner)
                self._closing[place, owner] = trio.Event()
        self._tell_lost(sum(self._look_for_lost(place) for place in list(self._believed)))

    def _ours(self, t: Transaction) -> list[tuple[LockTarget, LockOwner]]:
        """Returns the owners of this mount that have locks in the engine."""
        found = []
        for key, value in t.scan(keys.LOCKS, keys.after(keys.LOCKS)):
            if not keys.is_append_lease(key):
                place = _target(key)
                owners = {each.owner for each in _unpack(value)}
                found += [(place, each) for each in owners if each == self.owner(each.number)]
        return found

    async def run(self) -> None:
        """Gives back locks that could not be given back when their owner closed, until
        cancelled."""
        while True:
            await trio.sleep(RECHECK_S)
            for place, owner in list(self._closing):
                with contextlib.suppress(NoLocks):
                    await self._give_back(place, owner)

    async def acquire(self, place: LockTarget, wish: ByteRangeLock, *, wait: bool) -> None:
        """Takes the lock. Raises Conflict if another's is in the way and `wait` is not set, NoLocks
        if the engine cannot be asked, or its owner has lost its locks. Cancelled: as if it had not
        been asked for, unless it was granted already."""
        await self._after_closes(place)
        while True:
            changed = self._waiting.setdefault(place, trio.Event())
            if await self._change(place, wish.owner, lambda held: _take(held, wish)):
                return
            if not wait:
                raise Conflict("somebody else has locked this")
            with trio.move_on_after(RECHECK_S):
                await changed.wait()

    async def release(
        self, place: LockTarget, owner: LockOwner, start: int = 0, end: int = LAST
    ) -> None:
        """Gives these bytes back; does nothing if they are not held. Raises NoLocks, also if they
        were lost."""
        try:
            await self._change(place, owner, lambda held: released(held, owner, start, end))
        except NoLocks:
            self._believe(place, owner, ())  # who gave them back misses none
            raise

    async def closed(self, place: LockTarget, owner: LockOwner) -> None:
        """Drops all locks of the owner on the file. Locks that cannot be given back now are given
        back soon: a close does not fail because of them."""
        here = self._here.get(place)
        if here and any(each.owner == owner for each in here):
            self._change_here(place, lambda held: released(held, owner))
            self._wake(place)
        self._believe(place, owner, ())
        self._journal.closed(place, owner)
        if owner in self._reached.get(place, ()):
            # Seen by who asks from now on.
            self._closing.setdefault((place, owner), trio.Event())
            with contextlib.suppress(NoLocks):
                await self._give_back(place, owner)

    async def _give_back(self, place: LockTarget, owner: LockOwner) -> None:
        await self.release(place, owner)
        reached = self._reached.get(place)
        if reached is not None:
            reached.discard(owner)
            if not reached:
                del self._reached[place]
        event = self._closing.pop((place, owner), None)
        if event is not None:
            event.set()

    async def _after_closes(self, place: LockTarget) -> None:
        """Waits for locks whose close has already returned: a request after the close finds them
        gone. Raises NoLocks."""
        closing = [event for (each, _), event in self._closing.items() if each == place]
        with trio.move_on_after(_CLOSES_S) as deadline:
            for event in closing:
                await event.wait()
        if deadline.cancelled_caught:
            raise NoLocks("locks of a file that was closed cannot be given back")

    async def obstacle(self, place: LockTarget, wish: ByteRangeLock) -> ByteRangeLock | None:
        """Returns the lock that keeps this one from being granted now. Raises NoLocks."""
        await self._after_closes(place)
        if not self.reaches_cluster(place.ino):
            return obstacle(self._here.get(place, ()), wish)
        return await self._asked(self._seen(place, wish))

    async def _seen(self, place: LockTarget, wish: ByteRangeLock) -> ByteRangeLock | None:
        await self._catch_up(namespace_of(place.ino))
        return await self._engine.read(lambda t: obstacle(self._alive(t, place), wish))

    def applied(self, changed: Iterable[bytes]) -> None:
        """Repeats requests that wait for locks, if these are among the keys that others changed in
        the engine."""
        lost = 0
        for key in changed:
            if key[:1] == keys.LOCKS and not keys.is_append_lease(key):
                place = _target(key)
                lost += self._look_for_lost(place)
                self._wake(place)
        self._tell_lost(lost)

    def _tell_lost(self, lost: int) -> None:
        if lost:
            log.error(
                "%d locks of programs here went to other nodes while this one had lost touch with"
                " its cluster: the next lock call of each fails (ENOLCK)",
                lost,
            )

    def _look_for_lost(self, place: LockTarget) -> int:
        """Returns how many owners have lost their locks of a file since the last look."""
        believed = self._believed.get(place)
        if not believed:
            return 0
        try:
            held = {each.owner for each in self._engine.read_now(lambda t: _held(t, place))}
        except Unavailable:  # the next lock call of each looks anyway
            return 0
        lost = {(place, owner) for owner in believed - held} - self._lost - self._asking.keys()
        self._lost |= lost
        self.counters["locks_lost"] += len(lost)
        return len(lost)

    def reaches_cluster(self, ino: int) -> bool:
        """Returns whether the locks of this inode are the cluster's."""
        namespace = self._engine.namespace(namespace_of(ino))
        return namespace is not None and namespace.locks == "cluster"

    def any_reaches_cluster(self) -> bool:
        """Returns whether any namespace has cluster locks."""
        listed = self._engine.read_now(namespaces.list_all)
        return any(each.namespace.locks == "cluster" for each in listed)

    async def _change(self, place: LockTarget, owner: LockOwner, change: Change) -> bool:
        """Makes the change; returns whether nothing was in the way."""
        if not self.reaches_cluster(place.ino):
            done = self._change_here(place, change)
        else:
            reached = self._reached.setdefault(place, set())
            if owner not in reached:
                self._journal.asked(place, owner)
            reached.add(owner)
            done = await self._change_in_cluster(place, owner, change)
        if done:
            self._wake(place)
        return done

    async def _change_in_cluster(self, place: LockTarget, owner: LockOwner, change: Change) -> bool:
        """Makes the change where all locks are; a lock that seems to be in the way may have
        gone."""

        def fn(t: Transaction) -> list[ByteRangeLock] | None:
            # Where it asks for several at once, one may end what another one believed.
            is_alone = self._asking[place, owner] == 1
            believed = is_alone and owner in self._believed.get(place, ())
            if believed and not _has(_held(t, place), owner):
                raise _Lost
            held = self._change_there(t, place, change)
            if believed and held is not None and not _has(held, owner):
                self._journal_held(place, owner, is_held=False)
            return held

        self._asking[place, owner] += 1
        try:
            held = await self._asked(self._engine.transact(fn))
            if held is None:
                await self._asked(self._catch_up(namespace_of(place.ino)))
                held = await self._asked(self._engine.transact(fn))
        except _Lost:
            self.counters["locks_lost"] += (place, owner) not in self._lost
            self._believe(place, owner, ())
            raise NoLocks(
                "the node had lost touch with its cluster, and the lock went to another one"
            ) from None
        finally:
            self._asking[place, owner] -= 1
            if not self._asking[place, owner]:
                del self._asking[place, owner]
        if held is not None:
            self._believe(place, owner, held)
        return held is not None

    def _believe(self, place: LockTarget, owner: LockOwner, held: Sequence[ByteRangeLock]) -> None:
        """Notes that these are the locks of a file, and that its owner may have some."""
        believed = self._believed.setdefault(place, set())
        is_held = _has(held, owner)
        if is_held:
            believed.add(owner)
        else:
            believed.discard(owner)
        if owner in self._reached.get(place, ()):
            self._journal_held(place, owner, is_held=is_held)
        self._lost.discard((place, owner))
        if not believed:
            del self._believed[place]

    def _journal_held(self, place: LockTarget, owner: LockOwner, *, is_held: bool) -> None:
        if (place, owner) not in self._closing:
            self._journal.asked(place, owner, is_held=is_held)

    def _change_here(self, place: LockTarget, change: Change) -> bool:
        before = self._here.get(place, ())
        held = change(before)
        if held is not None:
            self._journal.changed_here(place, before, held)
        if held:
            self._here[place] = held
        elif held is not None:
            self._here.pop(place, None)
        return held is not None

    def _change_there(
        self, t: Transaction, place: LockTarget, change: Change
    ) -> list[ByteRangeLock] | None:
        before = self._alive(t, place)
        held = change(before)
        key = keys.locks(*place)
        if held:
            t.put(key, pack(held))
        elif held is not None:
            t.delete(key)
        return held

    def _alive(self, t: Transaction, place: LockTarget) -> list[ByteRangeLock]:
        return [each for each in _held(t, place) if self._counts(each.owner)]

    def _counts(self, owner: LockOwner) -> bool:
        if (owner.node, owner.incarnation) == (self._node, self._incarnation):
            return True
        return self._is_alive(owner.node, owner.incarnation)

    async def _asked(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except Unavailable as error:
            raise NoLocks(f"the cluster cannot be asked about locks: {error}") from error

    def _wake(self, place: LockTarget) -> None:
        event = self._waiting.pop(place, None)
        if event is not None:
            event.set()


class _Lost(Exception):
    """The owner had locks of the file, and has none any more."""


def _held(t: Transaction, place: LockTarget) -> list[ByteRangeLock]:
    """Returns the locks as recorded, those of dead nodes too."""
    value = t.get(keys.locks(*place))
    return [] if value is None else _unpack(value)


def _has(held: Iterable[ByteRangeLock], owner: LockOwner) -> bool:
    return any(each.owner == owner for each in held)


def _target(key: bytes) -> LockTarget:
    return LockTarget(keys.unpack_u64(key, 1), key[9:] == b"f")


def _take(held: Sequence[ByteRangeLock], wish: ByteRangeLock) -> list[ByteRangeLock] | None:
    return None if obstacle(held, wish) else granted(held, wish)
