"""The places of files' data, and their moves on request: requests about single files.

| method | params | answer |
|---|---|---|
| `where` | `inodes` | for each: what `describe` shows; null if it is gone |
| `prefetch` | `inode`, `nodes` (numbers) | by node: 'done', 'coming', or the obstacle |
| `replicate` | `inode`, `copies` | the nodes that have it, and its state |

A caller that asks for a move asks again until it is done; the work goes on in between, and when
nobody asks any more.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import trio

from kvfs.base.background import Background
from kvfs.base.control import Handler
from kvfs.base.errors import Busy, Invalid, KvfsError, NotFound, Unavailable
from kvfs.datastore.files import DataFiles
from kvfs.meta import keys
from kvfs.meta.engine import Engine, Transaction
from kvfs.meta.records import BLOCK_BYTES, Flag, Inode
from kvfs.tree.copies import placements
from kvfs.tree.inodes import read_inodes

WHERE: Final = "where"
"""The method by which nodes ask each other for their parts of files."""
_MOST: Final = 1_000
_AT_ONCE: Final = 64
_WAIT_S: Final = 2.0
_PEER_S: Final = 2.0


class LocalCopy(msgspec.Struct, array_like=True):
    """A node's share of a file."""

    medium: str = ""
    """The medium on which it lies; empty: it is not here."""
    arriving: float = -1.0
    """The share of an arriving file that is here; negative: it is not arriving."""


class ClusterNodes(Protocol):
    """The other nodes of a cluster."""

    def name(self, node: int) -> str:
        """Returns the name of a node."""

    def lives(self, node: int) -> bool:
        """Returns whether it holds its lease."""

    async def ask(self, node: int, method: str, params: Any, deadline_s: float) -> Any:
        """Returns the answer of the node's method. Raises KvfsError."""

    async def send(self, ino: int, node: int) -> None:
        """Makes a node take a file; it has it when this returns. Raises KvfsError."""

    async def spread(self, ino: int, copies: int) -> list[int]:
        """Makes more nodes take a file, until so many have it; returns those that do. Raises
        KvfsError."""


class _Inodes(msgspec.Struct):
    inodes: list[int]


class _Prefetch(msgspec.Struct):
    inode: int
    nodes: list[int]


class _Replicate(msgspec.Struct):
    inode: int
    copies: int


class _Job:
    """Work that is being done, or was."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.result: Any = None
        self.error = ""


class Whereabouts:
    """The places of files, as one node knows them. `arriving` gives the share of a data file that
    is here, negative if it is not arriving; `bring` fetches a file's data here. `cold`: the cold
    tier's location, to be shown."""

    def __init__(
        self,
        engine: Engine,
        files: DataFiles,
        arriving: Callable[[int, int], float],
        bring: Callable[[int], Awaitable[None]],
        cold: str,
    ) -> None:
        self._me = 0
        self._engine = engine
        self._files = files
        self._arriving = arriving
        self._bring = bring
        self._cold = cold
        self._others: ClusterNodes | None = None
        self._jobs: dict[tuple[str, int, int], _Job] = {}
        self._tasks = Background()

    def join(self, me: int, others: ClusterNodes) -> None:
        """Makes this one node of several, from here on."""
        self._me = me
        self._others = others

    def handlers(self) -> dict[str, Handler]:
        """Returns the handlers by method, for a ControlServer."""
        return {
            "where": self._on_where,
            "prefetch": self._on_prefetch,
            "replicate": self._on_replicate,
        }

    async def run(self) -> None:
        """Does the requested work, until cancelled."""
        await self._tasks.run()

    async def tell(self, _peer: object, params: Any) -> list[Any]:
        """Answers another node that asks for this node's parts of these (inode, version)."""
        try:
            names = [(int(ino), int(version)) for ino, version in params][:_MOST]
        except (TypeError, ValueError):
            raise Invalid("what is asked for are pairs of inode number and version") from None
        return [msgspec.to_builtins(self._local(*name)) for name in names]

    def _local(self, ino: int, version: int) -> LocalCopy:
        return LocalCopy(self._files.medium(ino, version), self._arriving(ino, version))

    # ---- where

    async def _on_where(self, params: dict[str, Any]) -> list[dict[str, Any] | None]:
        inos = msgspec.convert(params, _Inodes).inodes[:_MOST]
        found = await self._engine.read(lambda t: _look(t, inos))
        wanted: dict[int, list[tuple[int, int]]] = {self._me: []}
        for ino, inode, nodes in found:
            for node in {self._me, *nodes}:
                if inode is not None:
                    wanted.setdefault(node, []).append((ino, inode.version))
        told: dict[tuple[int, int], LocalCopy] = {}
        async with trio.open_nursery() as nursery:
            for node, names in wanted.items():
                nursery.start_soon(self._ask_one, node, names, told)
        return [self._describe(ino, inode, nodes, told) for ino, inode, nodes in found]

    async def _ask_one(
        self, node: int, names: list[tuple[int, int]], told: dict[tuple[int, int], LocalCopy]
    ) -> None:
        if node == self._me:
            told.update({(node, ino): self._local(ino, version) for ino, version in names})
            return
        assert self._others is not None
        try:
            answer = await self._others.ask(node, WHERE, names, _PEER_S)
            for (ino, _), each in zip(names, msgspec.convert(answer, list[LocalCopy]), strict=True):
                told[node, ino] = each
        except (KvfsError, msgspec.ValidationError, ValueError):
            pass  # it is shown without what only it knows

    def _describe(
        self,
        ino: int,
        inode: Inode | None,
        nodes: list[int],
        told: dict[tuple[int, int], LocalCopy],
    ) -> dict[str, Any] | None:
        """Returns one file, in JSON's types."""
        if inode is None:
            return None
        copies = []
        for node in sorted({self._me, *nodes}):
            local = told.get((node, ino))
            if node in nodes or (local is not None and (local.medium or local.arriving >= 0)):
                copies.append(self._copy(node, local))
        is_cold = bool(inode.flags & Flag.COLD)
        return {
            "size_bytes": inode.size,
            "blocks": -(-inode.size // BLOCK_BYTES),
            "block_bytes": BLOCK_BYTES,
            "version": inode.version,
            "sealed": bool(inode.flags & Flag.SEALED),
            "copies": copies,
            "cold": (self._cold or "a cold tier that this node does not know") if is_cold else None,
        }

    def _copy(self, node: int, local: LocalCopy | None) -> dict[str, Any]:
        """Returns one node's copy: all blocks of the file, unless they are arriving."""
        is_arriving = local is not None and not local.medium and local.arriving >= 0
        return {
            "node": node,
            "name": self._others.name(node) if self._others else "",
            "alive": node == self._me or (self._others is not None and self._others.lives(node)),
            "medium": (local.medium or None) if local else None,
            "arriving": local.arriving if local and is_arriving else None,
        }

    # ---- having them elsewhere

    async def _on_prefetch(self, params: dict[str, Any]) -> dict[str, str]:
        asked = msgspec.convert(params, _Prefetch)
        jobs = {
            node: self._job("prefetch", asked.inode, node, self._sender(asked.inode, node))
            for node in asked.nodes or [self._me]
        }
        await self._wait(list(jobs.values()))
        answers = {str(node): _state(job) for node, job in jobs.items()}
        self._forget()
        return answers

    def _sender(self, ino: int, node: int) -> Callable[[], Awaitable[None]]:
        async def send() -> None:
            if node == self._me:
                await self._bring(ino)
            elif self._others is None:
                raise NotFound(f"there is no node {node}: this one is alone")
            else:
                await self._others.send(ino, node)

        return send

    async def _on_replicate(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = msgspec.convert(params, _Replicate)
        others = self._others
        if others is None:
            raise Invalid("copies are on other nodes, and this one is alone")
        job = self._job(
            "replicate", asked.inode, asked.copies, lambda: others.spread(asked.inode, asked.copies)
        )
        await self._wait([job])
        state = _state(job)
        answer = {"state": state, "nodes": job.result or []}
        self._forget()
        return answer

    def _job(self, kind: str, ino: int, number: int, step: Callable[[], Awaitable[Any]]) -> _Job:
        """Returns the job that does this, begun if none does."""
        name = kind, ino, number
        job = self._jobs.get(name)
        if job is None:
            if not self._tasks.runs:
                raise Unavailable("the node is not ready")
            if len(self._jobs) >= _AT_ONCE:
                raise Busy("the node moves as many files as it can at a time: ask again")
            job = self._jobs[name] = _Job()
            self._tasks.begin(self._do, job, step)
        return job

    async def _do(self, job: _Job, step: Callable[[], Awaitable[Any]]) -> None:
        try:
            job.result = await step()
        except (KvfsError, OSError) as error:
            job.error = str(error)
        finally:
            job.done.set()

    async def _wait(self, jobs: Sequence[_Job]) -> None:
        with trio.move_on_after(_WAIT_S):
            for job in jobs:
                await job.done.wait()

    def _forget(self) -> None:
        """Forgets finished jobs, so that a later request examines the file again."""
        for name in [name for name, job in self._jobs.items() if job.done.is_set()]:
            del self._jobs[name]


def _state(job: _Job) -> str:
    if not job.done.is_set():
        return "coming"
    return job.error or "done"


def _look(t: Transaction, inos: Sequence[int]) -> list[tuple[int, Inode | None, list[int]]]:
    """Returns records, and the nodes that have their data by the engine."""
    return [
        (
            ino,
            inode,
            [
                keys.unpack_node(each.node)
                for each in placements.holders(t, ino)
                if inode is not None and each.holding.version == inode.version
            ],
        )
        for ino, inode in zip(inos, read_inodes(t, inos), strict=True)
    ]
