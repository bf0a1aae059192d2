"""Makes a close wait for the copies that its namespace promises (`acknowledge = sync`).

Invariants
- It returns only when as many nodes as the namespace wants, this one included, have recorded that
  they have the present content, on their disks.
- A caller waits no longer than 10 seconds and a second for each 32 MiB; then it gets Unavailable:
  the file is published and the keeper goes on, but its copies were not promised. Until then it is
  tried again: a node that starts just now, or that frees space, is there in time.
- In a namespace that promises none it costs a look at its record.
"""

from collections.abc import Sequence
from typing import Final

import trio

from kvfs.base import detach
from kvfs.base.errors import Unavailable
from kvfs.meta.records import namespace_of
from kvfs.node.tasks.copier import Copies
from kvfs.policy import replica_repair
from kvfs.tree.copies.replica_counts import HeldFile

_WAIT_S: Final = 10.0
_AGAIN_S: Final = 0.5
_BYTES_PER_S: Final = 32 << 20


class Acknowledging:
    """The acknowledging of one node."""

    def __init__(self, made: Copies) -> None:
        self._copies = made
        self.counters = {"acknowledged_with_copies": 0, "copies_late": 0}

    async def acknowledge(self, inos: Sequence[int]) -> None:
        """Returns when these files, which were published here, have their copies. Raises
        Unavailable if they do not get them in time, or the engine cannot be read."""
        wanted = [ino for ino in inos if self._promises(ino)]
        if not wanted:
            return
        await detach.aside()
        late: list[Unavailable] = []
        async with trio.open_nursery() as nursery:
            for ino in wanted:
                nursery.start_soon(self._in_time, ino, late)
        if late:
            raise late[0]

    def _promises(self, ino: int) -> bool:
        """Returns whether a close promises the file's copies."""
        namespace = self._copies.engine.namespace(namespace_of(ino))
        return namespace is not None and namespace.acknowledge == "sync" and namespace.replicas > 0

    async def _in_time(self, ino: int, late: list[Unavailable]) -> None:
        try:
            await self._acknowledge(ino)
        except Unavailable as error:
            late.append(error)

    async def _acknowledge(self, ino: int) -> None:
        file = await self._copies.look(ino)
        if file is None:
            return  # removed meanwhile
        with trio.move_on_after(_WAIT_S + file.inode.size / _BYTES_PER_S):
            await self._until_made(file)
            self.counters["acknowledged_with_copies"] += 1
            return
        self.counters["copies_late"] += 1
        file = await self._copies.look(ino) or file
        name = file.inode.name.decode(errors="backslashreplace")
        raise Unavailable(
            f"{name}: {file.wanted} nodes are to have it before its close is done, and"
            f" {self._missing(file)} of them have it not yet; `kvfs node list` shows the nodes"
        )

    async def _until_made(self, file: HeldFile | None) -> None:
        """Has the missing copies of a file made, until it lacks none. Files published meanwhile
        contain the content to be acknowledged."""
        while file is not None and (missing := self._missing(file)):
            if len(await self._copies.make(file, missing)) >= missing:
                return
            before = file.inode.version
            file = await self._copies.look(file.ino)
            if file is not None and file.inode.version == before:
                await trio.sleep(_AGAIN_S)
                file = await self._copies.look(file.ino)

    def _missing(self, file: HeldFile) -> int:
        verdict = replica_repair.judge(self._copies.snapshot(), file.ino, file.holders, file.wanted)
        # Without its own lease this node knows of no holder of the file.
        return file.wanted if verdict.actor is None else verdict.missing
