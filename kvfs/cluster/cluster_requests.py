"""Requests about the cluster, which people make to one of its nodes over the control socket.

| method | params | answer |
|---|---|---|
| `nodes` | | all nodes, as `describe` shows them |
| `drain` | `node`, a number or a name; `stop` | its name |
| `remove` | `node`; `force` | its name |
| `finish-upgrade` | | whether there was anything to do |
| `secret` | `change`: `rotate` or `retire`, or none | the secrets, as text |
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal

import msgspec
import trio

from kvfs.base.control import Handler
from kvfs.base.encryption import KEY_NAME
from kvfs.base.errors import Busy, Invalid
from kvfs.cluster import decommission, schema_upgrade
from kvfs.cluster.membership import Membership
from kvfs.cluster.node_records import NodeRecord, find_node, set_state
from kvfs.cluster.roster import Member
from kvfs.cluster.shared_key import share_key
from kvfs.meta import keys
from kvfs.meta.engine import Engine

_PAGE: Final = 1000
_FILES_NAMED: Final = 10


class _Node(msgspec.Struct):
    node: str
    stop: bool = False
    force: bool = False


class _Secret(msgspec.Struct):
    change: Literal["rotate", "retire"] | None = None


class ClusterRequests:
    """Answers these requests for one node."""

    def __init__(
        self,
        member: Membership,
        engine: Engine,
        raise_layout: Callable[[], Awaitable[bool]],
        fence: Callable[[Sequence[NodeRecord]], Awaitable[None]],
        follow_all: Callable[[], Awaitable[None]],
    ) -> None:
        """`raise_layout` and `follow_all` are those of `ReplicaEngine`, `fence` that of
        `ClusterNode`."""
        self._fence = fence
        self._follow_all = follow_all
        self._member = member
        self._engine = engine
        self._raise_layout = raise_layout

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers by method."""
        return {
            "nodes": self._on_nodes,
            "drain": self._on_drain,
            "remove": self._on_remove,
            "finish-upgrade": self._on_finish_upgrade,
            "secret": self._on_secret,
        }

    async def report(self) -> dict[str, Any]:
        """Returns the cluster's part of the node's status."""
        member = self._member
        return {
            "cluster": member.cluster,
            "node": member.node,
            "name": member.about.name,
            "incarnation": member.incarnation,
            "holds_lease": member.holds_lease,
            "secrets": len(member.secrets),
            "nodes": [
                describe(each, is_current=member.holds_lease) for each in member.roster.all()
            ],
        }

    async def _on_nodes(self, _params: dict[str, Any]) -> object:
        return await self.report()

    async def _on_drain(self, params: dict[str, Any]) -> str:
        asked = msgspec.convert(params, _Node)
        record = await self._engine.read(lambda t: find_node(t, asked.node))
        state: Literal["active", "draining"] = "active" if asked.stop else "draining"
        await self._engine.transact(
            lambda t: set_state(t, record.number, lambda old: old != "removed", state)
        )
        return record.name

    async def _on_remove(self, params: dict[str, Any]) -> str:
        asked = msgspec.convert(params, _Node)
        record = await self._engine.read(lambda t: find_node(t, asked.node))
        if record.number == self._member.node:
            raise Invalid("a node does not remove itself: ask another one")
        if not asked.force:
            await self._refuse_loss(record)
        await self._engine.transact(
            lambda t: set_state(t, record.number, lambda _old: True, "removed")
        )
        await self._fence([record])
        return record.name

    async def _refuse_loss(self, record: NodeRecord) -> None:
        """Raises Busy if the node lives and was not drained, or has durable files that no other
        node has."""
        named, number = f"node {record.number} ({record.name})", record.number
        await self._member.renew()  # which tells who lives now
        if self._member.roster.lives(number) and record.state != "drained":
            raise Busy(
                f"{named} lives: have it emptied with `kvfs node drain {number}`, or stop it; with"
                " --force it goes with all that it has"
            )
        await self._follow_all()  # its files may lie in any namespace
        count = after = 0
        first: list[int] = []
        while True:
            found, after = await self._engine.read(
                lambda t, after=after: decommission.alone(t, keys.pack_node(number), after, _PAGE)  # type: ignore[misc]
            )
            count += len(found)
            first += found[: _FILES_NAMED - len(first)]
            if not after:
                break
            await trio.lowlevel.checkpoint()
        if count:
            paths = await self._engine.read(lambda t: decommission.shown_paths(t, first))
            raise Busy(
                f"{named} has {count} files of durable namespaces that no other node has ({paths}"
                f"{', ...' if count > len(first) else ''}): start it and have it emptied with `kvfs"
                f" node drain {number}`; with --force they are lost"
            )

    async def _on_finish_upgrade(self, _params: dict[str, Any]) -> bool:
        return await schema_upgrade.finish(self._engine, self._member.earlier, self._raise_layout)

    async def _on_secret(self, params: dict[str, Any]) -> str:
        change = msgspec.convert(params, _Secret).change
        if change == "rotate":
            await self._member.rotate_secret()
        elif change == "retire":
            # With the old secret goes whoever could read what it encrypted.
            key = self._member.store.root / KEY_NAME
            await share_key(self._engine, key, self._member.secrets)
            await self._member.retire_secrets()
        return self._member.secrets.as_text()


def describe(member: Member, *, is_current: bool) -> dict[str, Any]:
    """Returns the member in JSON's types; sizes in bytes. `is_current`: whether the engine tells of
    leases just now."""
    lease = "held" if member.alive else "left" if member.left else "lost"
    return {
        "number": member.number,
        "name": member.name,
        "state": member.state,
        "lease": lease if is_current else "unknown",
        "silent_s": member.silent_s,
        "peer": member.peer,
        "zone": member.zone,
        "rack": member.rack,
        "media": list(member.media),
        "capacity_bytes": member.capacity_bytes,
        "free_bytes": member.free_bytes,
        "load": member.load,
        "lacking_files": member.lacking,
        "obstacle": member.obstacle,
        "incarnation": member.incarnation,
        "version": member.version,
        "protocol": member.protocol,
        "tls": member.tls,
    }
