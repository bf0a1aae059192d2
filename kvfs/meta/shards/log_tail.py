"""The log of a shard, of which a copy is made while nodes go on writing: followed, and compared
with the copy."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvfs.base.errors import Unavailable
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import POSITION, read_answer
from kvfs.meta.redis.scripts import COMMON, Script

Written = dict[bytes, bytes | None]
"""Keys and their values; None: deleted."""
PAGE: Final = 2_000
_SCANNED: Final = b"0"

FETCH: Final = Script(
    COMMON
    + """
local found = values(ARGV, 1, #ARGV)
found[#found + 1] = redis.call('HGET', s, 'position')
return found
"""
)
"""ARGV: keys. Returns their values, and the position of the log: none if the server lost it."""


async def each_page(caller: RetryingClient, step: Callable[[list[bytes]], Awaitable[None]]) -> None:
    """Does a step with all keys and values of a shard, in turn, a page at a time. Raises
    Unavailable too where its server changed: the cursor means nothing to another one."""
    cursor, connections = b"", None
    while cursor != _SCANNED:
        options = (cursor or _SCANNED, b"COUNT", PAGE)
        cursor, found = await caller.call(b"HSCAN", caller.values, *options)
        if connections not in (None, caller.connections):
            raise Unavailable("the engine's server changed while its keys were read: begin anew")
        connections = caller.connections
        await step(found)


class LogTail:
    """The log from a position on. All methods raise Unavailable, NoSpace."""

    def __init__(self, source: RetryingClient, give: Callable[[Written], Awaitable[None]]) -> None:
        """`give` writes to the copy."""
        self._source = source
        self._give = give
        self._position, self._token = 0, b""

    def begin(self, position: bytes, token: bytes) -> None:
        """Follows from this entry on."""
        self._position, self._token = int(position), token

    async def follow(self, since: int = 0) -> set[bytes]:
        """Copies what the log brings; returns the keys that entries beyond `since` wrote. Raises
        Unavailable too where the log does not reach back: begin anew."""
        later = set[bytes]()
        while True:
            packed = await self._source.script(POSITION, self._position, self._token)
            answer = read_answer(packed)
            if answer.status not in ("ok", "behind"):
                raise Unavailable("the engine's log has passed the copy by: begin anew")
            written: Written = {}
            for entry in answer.entries:
                for writes in entry.writes:
                    for key, value in zip(writes[::2], writes[1::2], strict=True):
                        assert key is not None, "it is a key"
                        written[key] = value
                        if entry.number > since:
                            later.add(key)
                self._position, self._token = entry.number, entry.token
            await self._give(written)
            if answer.status == "ok":
                return later

    async def differing(
        self, names: Sequence[bytes], copied: Callable[[Sequence[bytes]], Awaitable[list[bytes]]]
    ) -> list[bytes]:
        """Returns those of these keys of which the copy has other values than the shard, both as of
        one position, however often they are written meanwhile; `copied` reads the copy."""
        if not names:
            return []
        *here, position = await self._source.script(FETCH, *names)
        # The copy is as of here, or later: then what was written in between is no sign.
        later = await self.follow(int(position or 0))
        there = await copied(names)
        both = zip(names, here, there, strict=True)
        return [key for key, one, other in both if one != other and key not in later]
