"""Which server has a shard: the one of the URL, the master that sentinels name, or a cluster's."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio
from coredis.exceptions import AskError, MovedError, RedisError
from coredis.exceptions import ConnectionError as LostError

from kvfs.meta.redis.location import Address, Kind, Location
from kvfs.meta.redis.nodes import Node
from kvfs.meta.redis.sharding import Layout
from kvfs.meta.redis.slots import SLOTS, ranges


class Topology(Protocol):
    """Finds servers; errors are RedisError, OSError, TimeoutError."""

    async def node_for(self, slot: int) -> Node:
        """The server that has the keys of a slot."""

    def redirected(self, slot: int, error: AskError) -> Node | None:
        """The server that has the slot as another one says (MOVED: for good; ASK: for one request);
        None where there are no slots."""

    def again(self) -> None:
        """What was known of the servers was wrong: ask anew before the next request."""

    def nodes(self) -> list[Node]:
        """All servers spoken to so far."""


class Single:
    """The one server of the URL."""

    def __init__(self, location: Location, nursery: trio.Nursery) -> None:
        self._node = Node(location.addresses[0], location, nursery)

    async def node_for(self, _slot: int) -> Node:
        return self._node

    def again(self) -> None:
        # Its name may stand for another server by now.
        self._node.disconnect()

    def redirected(self, _slot: int, _error: AskError) -> Node | None:
        return None

    def nodes(self) -> list[Node]:
        return [self._node]


class _Several:
    """Servers by address."""

    def __init__(self, location: Location, nursery: trio.Nursery) -> None:
        self._location = location
        self._nursery = nursery
        self._nodes: dict[Address, Node] = {}

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def redirected(self, _slot: int, _error: AskError) -> Node | None:
        return None

    def node_at(self, address: Address) -> Node:
        """The server there."""
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(address, self._location, self._nursery)
        return node

    async def _first(self, nodes: list[Node], ask: Callable[[Node], Awaitable[Any]]) -> Any:
        """What the first that answers says; then the error of the last."""
        error: Exception = LostError("there is nobody to ask")
        for node in nodes:
            try:
                return await ask(node)
            except (RedisError, OSError, TimeoutError) as refused:
                error = refused
        raise error


class Sentinels(_Several):
    """The master that sentinels name."""

    def __init__(self, location: Location, nursery: trio.Nursery) -> None:
        super().__init__(location, nursery)
        plain = location._replace(username=None, password=None, db=0)
        self._sentinels = [Node(address, plain, nursery) for address in location.addresses]
        self._master: Node | None = None

    async def node_for(self, _slot: int) -> Node:
        if self._master is None:
            self._master = self.node_at(await self._first(self._sentinels, self._ask))
        return self._master

    def again(self) -> None:
        if self._master is not None:
            self._master.disconnect()
        self._master = None

    async def _ask(self, sentinel: Node) -> Address:
        name = self._location.name
        found = await sentinel.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", name.encode())
        if not found:
            raise LostError(f"the sentinel {sentinel.address} knows no master '{name}'")
        return Address(found[0].decode(), int(found[1]))


class Cluster(_Several):
    """The servers of a cluster, by slots."""

    def __init__(self, location: Location, nursery: trio.Nursery) -> None:
        super().__init__(location, nursery)
        self._slots: list[Address] | None = None

    async def node_for(self, slot: int) -> Node:
        if self._slots is None:
            seeds = [self.node_at(address) for address in self._location.addresses]
            others = [node for node in self.nodes() if node not in seeds]
            self._slots = await self._first([*seeds, *others], self._ask)
        address = self._slots[slot]
        if not address.port:
            raise LostError(f"no server has the slot {slot}")
        return self.node_at(address)

    def again(self) -> None:
        self._slots = None

    def redirected(self, slot: int, error: AskError) -> Node | None:
        # No host: the one that was asked, which is known by another name here.
        host = error.host or self._location.addresses[0].host
        address = Address(host, error.port)
        if isinstance(error, MovedError) and self._slots is not None:
            self._slots[slot] = address
        return self.node_at(address)

    async def _ask(self, node: Node) -> list[Address]:
        slots = [Address("", 0)] * SLOTS
        for each in ranges(await node.call(b"CLUSTER", b"SLOTS"), node.address):
            slots[each.first : each.last + 1] = [each.master] * (each.last + 1 - each.first)
        return slots


def layout_of(location: Location) -> Layout:
    """How keys are spread over such servers, where nobody decided otherwise before."""
    return Layout.NAMESPACES if location.kind is Kind.CLUSTER else Layout.SINGLE


def topology(location: Location, nursery: trio.Nursery) -> Topology:
    """What finds the servers of a location."""
    makers: dict[Kind, Callable[[Location, trio.Nursery], Topology]] = {
        Kind.SERVER: Single,
        Kind.SENTINEL: Sentinels,
        Kind.CLUSTER: Cluster,
    }
    return makers[location.kind](location, nursery)
