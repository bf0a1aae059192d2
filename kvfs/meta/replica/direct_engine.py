"""Transactions on the server alone, for a process that has no metadata replica: a copy of the
metadata, their rebuilding.

The function runs in the caller's thread, and each read that it makes is a round trip. Its reads and
writes are then proposed as a node does it (`kvfs.meta.redis.log`), so replicas hear of it.

Invariants
- Everything that a run of the function reads existed at one moment after the call began. If another
  process commits between two reads, all of them are done again, together, and the function is run
  again.
- A transaction whose answer was lost is not committed twice: it has a number that grows.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

import trio

from kvfs.base.clock import now
from kvfs.base.errors import Conflict, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.redis.about import read_info
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.log import BEGIN, PROPOSE, Proposal, proposed, read_answer
from kvfs.meta.redis.scripts import COMMON, Item, Pair, Script
from kvfs.meta.replica.replica_view import View

T = TypeVar("T")
DEADLINE_S: Final = 10.0
_FIRST_KEYS: Final = 256
_MORE_KEYS: Final = 2_048
"""Keys of a range in one request: most are left early, or read to a page's end (`engine_copy`)."""
_DONE: Final = b"1"
_NOBODY: Final = (b"", b"")
"""Stands in for a node's number and incarnation."""

READ: Final = Script(
    COMMON
    + """
local state = redis.call('HMGET', s, 'position', 'token')
local first, last = list()
local found, ranges = values(ARGV, first, last), {}
first, last = list()
for i = first, last, 3 do
  local keys, those = range(i)
  ranges[#ranges + 1] = {keys, those}
end
return {state[1] or '', state[2] or '', found, ranges}
"""
)
"""ARGV: keys; start, end, limit of ranges. Returns position and token ('' where there never was a
log), values, and keys and values of each range: all as of one moment."""


class _Mark(NamedTuple):
    """A moment of the server, as PROPOSE takes it."""

    position: bytes
    token: bytes


class _Range(NamedTuple):
    """The first `limit` keys from `start` on, before `end`."""

    start: bytes
    end: bytes
    limit: int


class _Moved(BaseException):
    """Leaves a function between whose reads another process committed; not an Exception, so that no
    handler of the function's own takes it for an error."""


class DirectEngine:
    """The metadata at `url` (`location.HELP`), for threads without an event loop. `node`: as which
    node transactions run. `deadline_s` bounds each request, and how long a transaction is tried.
    Raises Unavailable, NotSupported, Invalid."""

    def __init__(
        self,
        url: str,
        *,
        node: bytes = b"",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._node = node
        self._location = locate(url)
        self._caller = RetryingClient(self._location, deadline_s)
        self._name = secrets.token_hex(8).encode()
        self._number = 0
        self._turn = trio.Lock()
        self._stop = trio.Event()
        started: Future[trio.lowlevel.TrioToken] = Future()
        self._thread = threading.Thread(
            target=trio.run, args=(self._serve, started), name="kvfs-engine", daemon=True
        )
        self._thread.start()
        self._token = started.result()
        try:
            self._call(self._caller.examine, None)
        except BaseException:
            self.close()
            raise

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` on a read-only view. Raises Unavailable; Conflict if others commit all the
        time."""
        result, _ = self._run(fn, self._end(), _Snapshot(self._read), writable=False)
        return result

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        """Runs `fn` and commits its writes. Raises Unavailable: then it may be committed or not;
        Conflict, NoSpace."""
        end = self._end()
        while True:
            snapshot = _Snapshot(self._read)
            result, view = self._run(fn, end, snapshot, writable=True)
            if not view.is_needed or self._call(self._propose, view.proposal(), snapshot.mark):
                return result
            _check(end)

    async def sync(self) -> None:
        """Makes everything committed before the call kept, as `promise` says. Raises
        Unavailable."""
        await trio.to_thread.run_sync(self.promise)

    def promise(self) -> str:
        """Makes the server keep the commits; returns which of them survive its death from now on.
        Raises Unavailable."""
        promise: str = self._call(self._caller.keep)
        return promise

    def place(self) -> tuple[str, int, str]:
        """Returns the server's identity, the database and the prefix: equal for two engines that
        are one, whatever their URLs. Raises Unavailable."""
        about = read_info(self._call(self._caller.call, b"INFO", b"server"))
        return about["run_id"], self._location.db, self._location.prefix

    def close(self) -> None:
        """Ends the thread, and the waits of others; idempotent."""
        if self._thread.is_alive():
            self._token.run_sync_soon(self._caller.stop)
            self._token.run_sync_soon(self._stop.set)
            self._thread.join()

    def _end(self) -> float:
        return now() + self._caller.deadline_s

    def _run(
        self, fn: Callable[[Transaction], T], end: float, snapshot: "_Snapshot", *, writable: bool
    ) -> tuple[T, View]:
        """Runs `fn`; returns its result, and the view with its reads and writes."""
        while True:
            view = _DirectView(snapshot, self._node, writable=writable)
            try:
                return fn(view), view
            except _Moved:
                _check(end)

    def _read(self, keys: Sequence[bytes], ranges: Sequence[_Range]) -> list[Any]:
        arguments: list[Item] = [len(keys), *keys, 3 * len(ranges)]
        for each in ranges:
            arguments += each
        found: list[Any] = self._call(self._caller.script, READ, *arguments)
        return found

    async def _propose(self, proposal: Proposal, mark: _Mark | None) -> bool:
        """Returns whether it is committed; else it has to be run again."""
        if mark is None or not mark.position:
            # `HSETNX` leaves a log as it is.
            mark = _Mark(*map(_text, await self._caller.script(BEGIN)))
        self._number += 1
        head: list[Item] = [*_NOBODY, self._name, self._number, *mark, b"before", b""]
        answer = read_answer(await self._caller.script(PROPOSE, *head, *proposed(proposal)))
        return answer.results == _DONE

    def _call(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Does a step in the engine's loop, one after the other."""

        async def run() -> Any:
            async with self._turn:
                return await step(*arguments)

        try:
            return trio.from_thread.run(run, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable("the engine is closed") from None

    async def _serve(self, started: "Future[trio.lowlevel.TrioToken]") -> None:
        started.set_result(trio.lowlevel.current_trio_token())
        await self._stop.wait()


class _Snapshot:
    """Answers of the server, all as of one moment."""

    def __init__(self, read: Callable[[Sequence[bytes], Sequence[_Range]], list[Any]]) -> None:
        self._read = read
        self.mark: _Mark | None = None
        """None: nothing was asked yet."""
        self._values: dict[bytes, bytes | None] = {}
        self._ranges: dict[_Range, list[Pair]] = {}

    def get(self, key: bytes, /) -> bytes | None:
        self.ask([key])
        return self._values[key]

    def scan(self, start: bytes, end: bytes, /) -> Iterator[Pair]:
        limit = _FIRST_KEYS
        while start < end:
            asked = _Range(start, end, limit)
            self.ask((), [asked])
            pairs = self._ranges[asked]
            yield from pairs
            if len(pairs) < limit:
                return
            start, limit = pairs[-1][0] + b"\0", _MORE_KEYS

    def ask(self, keys: Sequence[bytes], ranges: Sequence[_Range] = ()) -> None:
        """Makes them known. Raises _Moved: then everything ever asked for is known anew."""
        new_keys = [key for key in dict.fromkeys(keys) if key not in self._values]
        new_ranges = [each for each in ranges if each not in self._ranges]
        if not new_keys and not new_ranges:
            return
        mark = self._learn(new_keys, new_ranges)
        if self.mark in (None, mark):
            self.mark = mark
            return
        self.mark = self._learn(list(self._values), list(self._ranges))
        raise _Moved

    def _learn(self, keys: Sequence[bytes], ranges: Sequence[_Range]) -> _Mark:
        position, token, values, found = self._read(keys, ranges)
        self._values.update(zip(keys, values, strict=True))
        for each, (names, those) in zip(ranges, found, strict=True):
            self._ranges[each] = list(zip(names, those, strict=True))
        return _Mark(position, token)


class _DirectView(View):
    """A view whose base is a snapshot: keys that are asked for together cost one round trip."""

    def __init__(self, snapshot: _Snapshot, node: bytes, *, writable: bool) -> None:
        super().__init__(snapshot, node, writable=writable)
        self._snapshot = snapshot

    def get_many(self, names: Sequence[bytes], /) -> list[bytes | None]:
        self._snapshot.ask([key for key in names if key not in self.writes])
        return super().get_many(names)


def _check(end: float) -> None:
    if now() >= end:
        raise Conflict("others committed first until the deadline: try again")


def _text(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else b"%d" % value
