"""A node's part in copies of blocks in namespaces that are kept by their nodes, put together."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import trio

from kvfs.cluster.membership import Membership
from kvfs.cluster.peer_server import Method
from kvfs.cluster.placement_view import PlacementView
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.records import Inode, namespace_of
from kvfs.meta.replica.local_transaction import LocalChange
from kvfs.meta.replica.replica_engine import ReplicaEngine
from kvfs.node.names.directory_paths import DirectoryPaths
from kvfs.node.names.name_protocol import Call
from kvfs.node.names.tombstones import Tombstones
from kvfs.node.siblings.block_events import BlockEvent, event_of
from kvfs.node.siblings.block_giving import BlockGiving
from kvfs.node.siblings.copy_offers import CopyOffers
from kvfs.node.siblings.copy_protocol import KEEP_COPIES, SIBLINGS, TAKE_COPIES
from kvfs.node.siblings.copy_taker import CopyBrings, CopyTaker
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.node.siblings.living_nodes import LivingNodes
from kvfs.node.siblings.peer_spares import PeerSpares
from kvfs.node.siblings.sibling_keeper import Claims, SiblingKeeper
from kvfs.node.siblings.sibling_news import SiblingTelling
from kvfs.tree.changes import Change
from kvfs.tree.copies import placements

_INODE: Final = keys.INODE[0]
_PLACEMENT: Final = keys.PLACEMENT[0]
_NODE: Final = 9
"""The offset of the node in the key of a placement."""


class KnownNames(Protocol):
    """The names that others are said to hold."""

    async def claims_of(
        self, names: Sequence[tuple[int, bytes]]
    ) -> list[tuple[int, list[int] | None]]:
        """Returns, of each path of a namespace, its fingerprint, and the living nodes that are said
        to hold it; None: that is not known now."""

    def fingerprints(self, names: Sequence[tuple[int, bytes]]) -> list[int]:
        """Returns the fingerprint of each path of a namespace."""

    def heard_at(self, node: int) -> float | None:
        """Returns when a node was heard last (trio.current_time); None: it was not yet."""

    def knows(self, node: int) -> bool:
        """Returns whether all is known here that a node says it holds."""


class BlockCopies:
    """The copies of one node."""

    def __init__(
        self,
        engine: ReplicaEngine,
        member: Membership,
        call: Call,
        files: DataFiles,
        is_changed: Callable[[int], bool],
        names: Callable[[], KnownNames | None],
        stones: Tombstones,
        fade: Callable[[Sequence[int]], None],
        differing: DifferingNames,
        is_in_use: Callable[[int], bool],
        forget: Callable[[Sequence[Change]], Awaitable[None]],
        brings: CopyBrings,
        touch: Callable[[int], None],
        paths: DirectoryPaths,
        bytes_per_s: int,
    ) -> None:
        """`names`: None while there is no such namespace. `stones`: the removals that are known.
        `fade` has records forgotten whose data did not come. `touch` notes that a file was used.
        `is_changed`: whether a file is open here, with other content than was published.
        `is_in_use`: whether it is open, or came just now. `forget` makes mounts forget names, and
        drops their files."""
        self._engine = engine
        self._me = member.node
        self._packed = keys.pack_node(member.node)
        self._differing = differing

        def heard_at(node: int) -> float | None:
            known = names()
            return None if known is None else known.heard_at(node)

        def claims() -> Claims | None:
            known = names()
            return None if known is None else known.claims_of

        def contents(those: Sequence[tuple[int, bytes]]) -> list[int]:
            known = names()
            return [0] * len(those) if known is None else known.fingerprints(those)

        async def claimed(
            those: Sequence[tuple[int, bytes]],
        ) -> list[tuple[int, list[int] | None]]:
            found = claims()
            return [(0, [])] * len(those) if found is None else await found(those)

        def is_whole(ino: int, inode: Inode) -> bool:
            return not is_changed(ino) and files.has(ino, inode.version)

        nodes = LivingNodes(
            member.node, PlacementView(member.roster).snapshot, heard_at, trio.current_time
        )
        self._offers = CopyOffers(call, stones.renews)
        self._telling = SiblingTelling(engine, member.node, call, self._lost)
        self._keeper = SiblingKeeper(
            *(engine, member.node, nodes, self._offers, differing),
            claimed,
            lambda node: (known := names()) is not None and known.knows(node),
            self._telling.tell,
            bytes_per_s,
        )
        self.give: Final = BlockGiving(engine, member.node, nodes, self._offers).give
        self._taker = CopyTaker(*(engine, brings, stones, fade, differing), is_in_use, forget)
        self.spares: Final = PeerSpares(
            *(engine, member.node, claims, contents, call, differing, is_whole, touch, paths)
        )
        self.acknowledge: Final[Callable[[Sequence[int]], Awaitable[None]]] = (
            self._keeper.acknowledge
        )
        self.methods: Final[Mapping[str, Method]] = {
            TAKE_COPIES: self._taker.take,
            KEEP_COPIES: self.spares.asked,
            SIBLINGS: self._telling.heard,
        }
        """The requests that peers may send it, by method."""

    async def run(self) -> None:
        """Keeps copies, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._taker.run)
            nursery.start_soon(self._telling.run)
            nursery.start_soon(self._keeper.run)

    def on_local(self, changes: Sequence[LocalChange]) -> None:
        """Notes a commit of this node's own keys; never waits."""
        events: dict[BlockEvent, list[int]] = {}
        for key, old, new in changes:
            if key[0] == _PLACEMENT:
                if new is not None and key[_NODE:] == self._packed:
                    self._taker.recorded(keys.unpack_u64(key, 1))
            elif key[0] == _INODE and new is not None:
                ino = keys.unpack_u64(key, 1)
                if self._keeper.keeps_copies(namespace_of(ino)):
                    events.setdefault(event_of(old, new), []).append(ino)
        if not events:
            return
        self._keeper.sealed(events.get(BlockEvent.SEALED, ()))
        self._keeper.renamed(events.get(BlockEvent.RENAMED, ()))
        for ino in events.get(BlockEvent.EVICTED, ()):
            others = self._engine.local.read_now(lambda t: placements.holders(t, ino))  # noqa: B023
            nodes = [keys.unpack_node(each.node) for each in others]
            self._telling.tell([(ino, 0)], [], nodes)

    def report(self) -> dict[str, Any]:
        """Returns the part of the node's status."""
        differing = {
            "names_differing": self._differing.count,
            "differing": self._differing.report(),
        }
        return {**self._keeper.report(), **differing}

    @property
    def counters(self) -> dict[str, int]:
        """Counters since the start."""
        parts = (self._keeper, self._offers, self._taker, self.spares)
        counted = {name: count for each in parts for name, count in each.counters.items()}
        return {**counted, "peer_names_differing": self._differing.count}

    def _lost(self, inos: Sequence[int]) -> None:
        self._keeper.lost_sibling(inos)
