"""Makes other nodes take copies of files, and takes them when asked.

Nobody sends a file: a node that is asked to take it fetches it, from any node that has it, as it
would for a reader, and records that it has it. The asking node checks that record, not the answer.

Invariants
- A copy counts once its node has recorded it: then its data are verified, and on that node's disk.
- A node takes no more than 64 files at once; a request for one more goes elsewhere.
- One that is asked to take content which others have replaced says so at once (Conflict).
- The asking node waits no longer than the file may take at 1 MiB per second, and a minute.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import trio

from kvfs.base.background import Background
from kvfs.base.errors import Busy, Conflict, Invalid, KvfsError, NotFound, Stale, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import Flag, Namespace, namespace_of
from kvfs.policy import placement, rendezvous
from kvfs.policy.cluster_snapshot import ClusterSnapshot
from kvfs.tree.copies import replica_counts
from kvfs.tree.copies.replica_counts import HeldFile
from kvfs.tree.inodes import read_inode

T = TypeVar("T")
log = logging.getLogger(__name__)
TAKE: Final = "take"
ADOPT: Final = "adopt"
"""The methods by which nodes ask each other."""
_ANSWER_S: Final = 2.0
"""Time for which the asked node waits for the file before it answers that it is on its way."""
_DEADLINE_S: Final = 3.0
"""Deadline of such an answer. A close may wait for copies, ten seconds in all: two nodes that are
stopped leave it time to find a third."""
_DOUBT_S: Final = 10.0
"""Time for which a node that did not answer is the last to be asked: a lease's length, after which
one that died has none."""
_AGAIN_S: Final = 0.5
_LOOK_S: Final = 0.01
_RECORDED_S: Final = 10.0
_LEAST_S: Final = 60.0
_BYTES_PER_S: Final = 1 << 20
_MOST: Final = 64
_MOST_HOT: Final = 65_536

Call = Callable[[int, str, Any, float], Awaitable[Any]]
"""Asks a node by number: method, parameters, deadline in seconds. Raises KvfsError."""


class Brings(Protocol):
    """The ways in which files come here, and go."""

    async def bring(self, ino: int) -> None:
        """Returns when the file's data are here. Raises KvfsError, OSError."""

    def record_now(self) -> None:
        """Has files that came a moment ago recorded at once."""

    async def let_go(self, ino: int) -> bool:
        """Drops this node's data of a file, unless they are the last. Raises KvfsError."""

    async def adopt(self, ino: int, version: int, giver: int) -> None:
        """Takes responsibility for a file in a shared store, in place of another node. Raises
        KvfsError, OSError."""

    def disown(self, ino: int) -> None:
        """Notes that another node is responsible for the file."""


class LocalReadEngine(Engine, Protocol):
    """An engine that can be read at once."""

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Like `read`."""

    def namespace(self, number: int) -> Namespace | None:
        """Returns the record of a namespace. Raises Unavailable."""


class _Taking:
    """A file that is asked for."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: KvfsError | None = None


class Copies:
    """The copies of one node. `call` asks others, `catch_up` waits for their knowledge."""

    def __init__(
        self,
        me: int,
        engine: LocalReadEngine,
        snapshot: Callable[[], ClusterSnapshot],
        brings: Brings,
        call: Call,
        catch_up: Callable[[int], Awaitable[None]],
    ) -> None:
        self.me = me
        self.engine = engine
        self.snapshot = snapshot
        self.brings = brings
        self.hot: dict[int, None] = {}
        """Files that were taken because they are hot, at most _MOST_HOT; `rebalancer` lets go of
        those that have cooled down."""
        self._call = call
        self._catch_up = catch_up
        self._doubts: dict[int, float] = {}
        """Times (trio.current_time) until which a node is the last to be asked."""
        self._takings: dict[tuple[int, int], _Taking] = {}
        """The files that are taken, by number and version."""
        self._tasks = Background()
        self.counters = {"copies_made": 0, "copies_refused": 0, "copies_taken": 0}

    async def run(self) -> None:
        """Takes the files that others ask it to, until cancelled."""
        await self._tasks.run()

    # ---- asking others

    async def look(self, ino: int) -> HeldFile | None:
        """Returns the file as this node knows it; None: it has no data that others could be
        given."""
        found = await self.engine.read(lambda t: replica_counts.look(t, [ino]))
        return found[0] if found else None

    async def make(
        self,
        file: HeldFile,
        count: int,
        *,
        hot: bool = False,
        refusals: dict[int, str] | None = None,
    ) -> list[int]:
        """Makes `count` more nodes take the file; returns those that have. Fewer if no more are
        there, or willing: `refusals` gets their reasons. Cancelled: some may take it all the
        same."""
        made: list[int] = []
        refused = {} if refusals is None else refusals
        while len(made) < count:
            chosen = self._choose(file, count - len(made), made, set(refused))
            if not chosen:
                break
            async with trio.open_nursery() as nursery:
                for node in chosen:
                    nursery.start_soon(self._try, node, file, hot, made, refused)
        return made

    def _choose(
        self, file: HeldFile, count: int, made: Sequence[int], refused: set[int]
    ) -> list[int]:
        now = trio.current_time()
        doubted = {node for node, until in self._doubts.items() if now < until} - refused
        for without in (refused | doubted, refused) if doubted else (refused,):
            chosen = placement.choose(
                self.snapshot(),
                file.ino,
                file.inode.size,
                count,
                holders=[*file.holders, *made],
                media=file.namespace.media,
                without=without,
            )
            if chosen:
                return chosen
        return []

    async def _try(
        self, node: int, file: HeldFile, hot: bool, made: list[int], refused: dict[int, str]
    ) -> None:
        try:
            await self.ask(node, file, hot=hot)
        except KvfsError as error:
            is_past = isinstance(error, Conflict | Stale)  # the next close is asked for anew
            level = logging.DEBUG if is_past else logging.INFO
            log.log(level, "node %d takes no copy of inode %#x: %s", node, file.ino, error)
            self.counters["copies_refused"] += 1
            refused[node] = str(error)
            if isinstance(error, Unavailable):
                self._doubts[node] = trio.current_time() + _DOUBT_S
        else:
            self._doubts.pop(node, None)
            made.append(node)

    async def ask(self, node: int, file: HeldFile, *, hot: bool = False) -> None:
        """Makes one node take the file; it has it when this returns. Raises KvfsError."""
        limit_s = _LEAST_S + file.inode.size / _BYTES_PER_S
        with trio.move_on_after(limit_s):
            while not await self._has(node, file):
                params = [file.ino, file.inode.version, hot]
                if await self._call(node, TAKE, params, _DEADLINE_S):
                    await self._catch_up(namespace_of(file.ino))
                    break
                await trio.sleep(_AGAIN_S)
            if await self._has(node, file):
                self.counters["copies_made"] += 1
                return
        raise Unavailable(f"node {node} did not take the file")

    async def _has(self, node: int, file: HeldFile) -> bool:
        version = file.inode.version
        return node in await self.engine.read(
            lambda t: replica_counts.whole_holders(t, file.ino, version)
        )

    async def _answers_for(self, ino: int) -> bool:
        """Returns whether this node is recorded as having the file, in any version."""
        mine = keys.placement(ino, keys.pack_node(self.me))
        return await self.engine.read(lambda t: t.get(mine)) is not None

    async def hand_over(self, file: HeldFile, refusals: dict[int, str]) -> bool:
        """Makes another node responsible for a file in a store that it shares with this one:
        nothing travels. Returns whether one is; `refusals` gets the reasons if not. Raises
        KvfsError."""
        medium = file.namespace.media[:1]
        sharing = [
            (host.number, 1.0)
            for host in self.snapshot().open
            if host.number != self.me and placement.lends(host, medium)
        ]
        for node in rendezvous.ranked(file.ino, sharing):
            try:
                await self._call(node, ADOPT, [file.ino, file.inode.version, self.me], _DEADLINE_S)
            except KvfsError as error:  # or its answer was lost
                refusals[node] = str(error)
            await self._catch_up(namespace_of(file.ino))
            if not await self._answers_for(file.ino):
                self.brings.disown(file.ino)
                return True
        return False

    # ---- taking

    async def adopt(self, _peer: object, params: Any) -> None:
        """Answers another node that asks this one to take responsibility for a file in a store that
        both share. Raises Invalid, and what `Brings.adopt` raises."""
        try:
            ino, version, giver = (int(each) for each in params)
        except (TypeError, ValueError):
            raise Invalid("a file to adopt is an inode number, a version and a node") from None
        try:
            await self.brings.adopt(ino, version, giver)
        except OSError as error:
            raise Unavailable(f"the file cannot be seen here: {error.strerror}") from error

    async def take(self, _peer: object, params: Any) -> bool:
        """Answers another node's request to take a file: returns whether it is here now, else it is
        on its way, and the caller asks again. Raises Busy, Invalid, and what `Brings.bring`
        raises."""
        try:
            ino, version, hot = int(params[0]), int(params[1]), bool(params[2])
        except (TypeError, ValueError, IndexError):
            raise Invalid(
                "a file to take is an inode number, a version, and whether it is hot"
            ) from None
        taking = self._takings.get((ino, version))
        if taking is None:
            taking = self._begin(ino, version, hot)
        with trio.move_on_after(_ANSWER_S):
            await taking.done.wait()
        if not taking.done.is_set():
            return False
        self._takings.pop((ino, version), None)
        if taking.error is not None:
            raise taking.error
        return True

    def _begin(self, ino: int, version: int, hot: bool) -> _Taking:
        if not self._tasks.runs:
            raise Unavailable("the node is not ready to take copies")
        for done in [each for each, taking in self._takings.items() if taking.done.is_set()]:
            del self._takings[done]  # nobody came back to ask
        if len(self._takings) >= _MOST:
            raise Busy("the node takes as many files as it can at a time")
        taking = self._takings[ino, version] = _Taking()
        self._tasks.begin(self._take, taking, ino, version, hot)
        return taking

    async def _take(self, taking: _Taking, ino: int, version: int, hot: bool) -> None:
        try:
            await self._bring(ino, version)
            self.brings.record_now()
            await self._recorded(ino, version)
            self.counters["copies_taken"] += 1
            if hot and len(self.hot) < _MOST_HOT:
                self.hot[ino] = None
        except KvfsError as error:
            taking.error = error
        except OSError as error:
            taking.error = Unavailable(f"the file cannot be written here: {error.strerror}")
        finally:
            taking.done.set()

    async def _bring(self, ino: int, version: int) -> None:
        try:
            is_known = await self._is_at(ino, version)
        except (NotFound, Stale):
            is_known = False
        if not is_known:  # published a moment ago: not heard of yet
            await self._catch_up(namespace_of(ino))
        await self.brings.bring(ino)

    async def _recorded(self, ino: int, version: int) -> None:
        with trio.move_on_after(_RECORDED_S):
            while self.me not in await self.engine.read(
                lambda t: replica_counts.whole_holders(t, ino, version)
            ):
                await self._is_at(ino, version)
                await trio.sleep(_LOOK_S)
            return
        raise Unavailable("the copy could not be recorded")

    async def _is_at(self, ino: int, version: int) -> bool:
        """Returns whether the file is known to have come to a version: a new one has its first
        before it is closed, too. Raises Conflict if it has a later one, Stale if it is gone, or has
        no name any more."""
        inode = await self.engine.read(lambda t: read_inode(t, ino))
        if inode.version > version:
            raise Conflict("others have replaced the content that was to be taken")
        if not inode.nlink:
            raise Stale("others have removed the file that was to be taken")
        return inode.version == version and bool(inode.flags & Flag.PUBLISHED)
