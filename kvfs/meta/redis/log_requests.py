"""Asks the server to commit what was run on a replica, and chooses the script for that.

| script | when |
|---|---|
| APPEND, of the writes alone | others did not commit first of late, nor since the replica's state |
| PROPOSE, of all that was read too | else |
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kvfs.meta.redis.append import APPEND, MOST_ITEMS, appended
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import PROPOSE, LogEntry, LogReply, Packed, done_by, read_answer
from kvfs.meta.redis.scripts import Item

_CONTENDED: Final = (8, 64)
"""Requests that have all checked at the server after one in which others had committed first: at
first, and at most where it is so again and again; doubled each time."""


class Request(NamedTuple):
    """Transactions that are to be committed together."""

    packed: Sequence[Packed]
    whole: Mapping[bytes, bytes | None]
    """All that they write, with its values, where they can be appended; else nothing."""
    run: bytes
    takes: bytes
    """These two as PROPOSE has them."""
    end: float
    """The time at which it is given up, by trio's clock."""


class LogEnd(Protocol):
    """The last entry of the log that a replica has."""

    @property
    def position(self) -> int: ...

    @property
    def token(self) -> bytes: ...


class LogRequests:
    """The requests of one proposer. `head`: the node, its incarnation, and a name for this process
    at the server."""

    def __init__(self, caller: RetryingClient, head: tuple[int, int, bytes]) -> None:
        self._caller = caller
        self._head = head
        self._number = 0
        self._appends_from = 2  # the first one makes its name known there
        """The number of the next request for which it may be that nobody else commits."""
        self._contended = _CONTENDED[0]

    @property
    def token(self) -> bytes:
        """The token of the last request, which may be under way."""
        return b"%b:%d" % (self._head[2], self._number)

    @property
    def following(self) -> tuple[bytes, int]:
        """The name of this process at the server, and the number of its next request."""
        return self._head[2], self._number + 1

    @property
    def may_append(self) -> bool:
        """Whether the next one is worth APPEND."""
        return self._number + 1 >= self._appends_from

    async def send(self, mark: LogEnd, request: Request) -> LogReply:
        """Returns the answer, with the entry that it made as the last. Raises what
        `RetryingClient.call` raises."""
        self._number += 1
        if request.whole and 2 * len(request.whole) <= MOST_ITEMS:
            answer = await self._append(mark, request)
            if answer is not None:
                return answer
        return await self._propose(mark, request)

    async def _append(self, mark: LogEnd, request: Request) -> LogReply | None:
        """Returns None if nothing was done: the replica's last entry may not be the last there."""
        arguments, entry = appended(request.whole)
        position = mark.position + 1
        state = (self._number, mark.position, mark.token, position)
        end = request.end
        if not await self._caller.script(APPEND, *self._head, *state, *arguments, end=end):
            self._appends_from = self._number + self._contended
            self._contended = min(2 * self._contended, _CONTENDED[1])
            return None
        self._contended = _CONTENDED[0]
        done = LogEntry(position, self.token, mark.token, entry)
        return LogReply("ok", [done], b"1" * len(request.packed), self.token)

    async def _propose(self, mark: LogEnd, request: Request) -> LogReply:
        run, takes = request.run, request.takes
        state: list[Item] = [self._number, mark.position, mark.token, run, takes]
        arguments = [item for each in request.packed for item in each.items]
        end = request.end
        found = await self._caller.script(PROPOSE, *self._head, *state, *arguments, end=end)
        answer = read_answer(found)
        if answer.entries:
            self._appends_from = self._number + self._contended
        return done_by(answer, mark.token, mark.position, request.packed)
