"""Keys that are read at the servers of shards of which a replica does not have all.

All keys of one request are as of one moment. A shard has one connection for it, made when it is
first asked. One that is ended serves those who use it or wait for it, and is closed by the last.
"""

from collections.abc import Sequence
from typing import Any

import trio

from kvfs.base.clock import now
from kvfs.base.errors import Unavailable
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.location import EngineLocation
from kvfs.meta.redis.scripts import Item, Script
from kvfs.meta.shards.log_tail import FETCH


class _Line:
    """The connection to the server of one shard."""

    def __init__(self, location: EngineLocation, deadline_s: float, shard: int) -> None:
        self.caller = RetryingClient(location, deadline_s, shard)
        self.lock = trio.Lock()
        self.heard_at = now()
        """When it was last answered, or made."""
        self.users = 0


class RemoteReads:
    """The reads of one replica."""

    def __init__(self, location: EngineLocation, deadline_s: float) -> None:
        self._location = location
        self._deadline_s = deadline_s
        self._lines: dict[int, _Line] = {}
        self._ended: set[_Line] = set()
        """Ended lines that have users."""

    async def fetch(self, shard: int, names: Sequence[bytes]) -> dict[bytes, bytes | None]:
        """Returns the values of these keys at one moment after the call. Raises Unavailable, also
        if that takes longer than the deadline."""
        *values, position = await self.script(shard, FETCH, *names)
        if position is None:
            raise Unavailable(
                f"the engine {self._location.shown} lost the metadata of a namespace, by"
                f" {self.server(shard)}: restore what that server had"
            )
        return dict(zip(names, values, strict=True))

    async def script(self, shard: int, script: Script, *arguments: Item) -> Any:
        """Does what `RetryingClient.script` does, with a shard's server, in turn. Raises
        Unavailable, also if that takes longer than the deadline."""
        line = self._line(shard)
        line.users += 1
        try:
            with trio.move_on_after(self._deadline_s):
                async with line.lock:
                    sent_at = now()
                    answer = await line.caller.script(script, *arguments)
                    line.heard_at = sent_at
                    return answer
        finally:
            line.users -= 1
            if line in self._ended and not line.users:
                self._ended.discard(line)
                line.caller.stop()
        raise Unavailable(f"the engine {self._location.shown} has much to answer: try again")

    def server(self, shard: int) -> str:
        """Returns the server that was asked last of a shard."""
        return str(self._line(shard).caller.at)

    def heard_at(self, shard: int) -> float:
        """Returns when the shard's server last answered, or was first asked, by `clock.now`."""
        return self._line(shard).heard_at

    @property
    def requests(self) -> int:
        """Requests sent so far to shards that are still read so."""
        return sum(each.caller.requests for each in self._lines.values())

    @property
    def asked(self) -> list[int]:
        """The shards to whose servers there are connections."""
        return list(self._lines)

    def end(self, shard: int) -> None:
        """Closes the connection to a shard's server once nobody uses it; idempotent."""
        if (line := self._lines.pop(shard, None)) is None:
            return
        if line.users:
            self._ended.add(line)
        else:
            line.caller.stop()

    def close(self) -> None:
        """Closes all, and ends the requests under way; idempotent."""
        for line in (*self._lines.values(), *self._ended):
            line.caller.stop()
        self._lines.clear()
        self._ended.clear()

    def _line(self, shard: int) -> _Line:
        if shard not in self._lines:
            self._lines[shard] = _Line(self._location, self._deadline_s, shard)
        return self._lines[shard]
