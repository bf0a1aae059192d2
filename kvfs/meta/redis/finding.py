"""Finds the server of a node's metadata: that of the URL, the master that sentinels name, or the
one that has their slot in a cluster.

Invariant: a server that does not answer, or tells of one that does not, is asked last the next
time; so one that is cut off from the others keeps nobody from the right one.
"""

from collections.abc import Sequence
from typing import Any, Final

import trio

from kvfs.meta.redis.line import ErrorReply, ServerLost, connect
from kvfs.meta.redis.location import EngineLocation, Kind, ServerAddress
from kvfs.meta.redis.scripts import Item
from kvfs.meta.redis.slots import Range, ranges, slot_of

_ASK_S: Final = 1.0
"""Time after which the next one is asked."""


class Finder:
    """The finder of one caller."""

    def __init__(self, location: EngineLocation, shard: int) -> None:
        self._location = location
        self._plain = location._replace(username=None, password=None, db=0)
        """The location for sentinels, which have users of their own."""
        self._slot = slot_of(location.prefix, shard)
        self._servers = list(location.addresses)
        """Servers to be asked, in this order."""
        self._told: ServerAddress | None = None

    async def find(self) -> ServerAddress:
        """Returns the address of the metadata, as the first server that answers says. Raises
        ServerLost; ErrorReply, Invalid (by a server of a cluster that does not know or accept
        us)."""
        if self._location.kind is Kind.SERVER:
            return self._servers[0]
        if self._told is not None:
            address, self._told = self._told, None
            return address
        reason: Exception = ServerLost("there is nobody to ask")
        for server in list(self._servers):
            try:
                with trio.move_on_after(_ASK_S):
                    return await self._ask(server)
                reason = ServerLost(f"{server} does not answer")
            except (ServerLost, ErrorReply) as error:
                reason = error
            self.again()
        raise reason

    def again(self) -> None:
        """Notes that the server found is wrong, or does not answer: another one is asked next."""
        self._servers.append(self._servers.pop(0))

    def tell(self, address: ServerAddress) -> None:
        """Takes a server's word on who has them: `find` returns it next, once."""
        self._told = address

    async def _ask(self, server: ServerAddress) -> ServerAddress:
        """Returns the address that one server names."""
        if self._location.kind is Kind.CLUSTER:
            answer = await _answer(server, self._location, b"CLUSTER", b"SLOTS")
            return self._owner(server, answer)
        name = self._location.name
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.encode())
        try:
            found = await _answer(server, self._plain, *command)
        except ErrorReply as refused:
            raise ServerLost(str(refused)) from refused
        if not found:
            raise ServerLost(f"the sentinel {server} knows no master '{name}'")
        return ServerAddress(found[0].decode(), int(found[1]))

    def _owner(self, server: ServerAddress, answer: Sequence[Any]) -> ServerAddress:
        """Returns the owner of the slot, by the answer of `server`. Raises ServerLost."""
        try:
            found = list(ranges(answer, server))
        except ValueError as error:
            raise ServerLost(f"{server} does not say which slots there are: {error}") from error
        self._learn(found)
        for each in found:
            if each.first <= self._slot <= each.last:
                return each.master
        raise ServerLost(f"no server has the slot {self._slot}")

    def _learn(self, found: Sequence[Range]) -> None:
        """Learns which other servers can be asked, when those of the URL are gone."""
        named = {address for each in found for address in (each.master, *each.replicas)}
        kept = named.union(self._location.addresses)
        known = [each for each in self._servers if each in kept]
        self._servers = [*known, *sorted(named.difference(known))]


async def _answer(server: ServerAddress, location: EngineLocation, *command: Item) -> Any:
    """Asks over a connection for this alone. Raises ServerLost, ErrorReply, Invalid."""
    line = await connect(server, location, ())
    try:
        return await line.ask(*command)
    finally:
        line.close()
