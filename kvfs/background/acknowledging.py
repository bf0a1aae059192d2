"""Lets a close wait for the copies that its namespace promises (`acknowledge = sync`).

Invariants
- It returns only when as many nodes as the namespace wants, this one included, have recorded that
  they have the present content, on their disks.
- Who waits, waits no longer than 10 seconds and a second for each 32 MiB; then it gets Unavailable:
  the file is published and the keeper goes on, but nobody was promised its copies.
- In a namespace that promises none it costs a look at its record.
"""

from collections.abc import Sequence
from typing import Final

import trio

from kvfs import stepping
from kvfs.background.copies import Copies
from kvfs.errors import Unavailable
from kvfs.meta.records import namespace_of
from kvfs.namespace.copies import Copied
from kvfs.policy import repair

_WAIT_S: Final = 10.0
_BYTES_PER_S: Final = 32 << 20


class Acknowledging:
    """For one node."""

    def __init__(self, made: Copies) -> None:
        self._copies = made
        self.counters = {"acknowledged_with_copies": 0, "copies_late": 0}

    async def acknowledge(self, inos: Sequence[int]) -> None:
        """These files were published here: returns when they have their copies. Raises Unavailable
        where they do not get them in time, or the engine cannot be read."""
        wanted = [ino for ino in inos if self._promises(ino)]
        if not wanted:
            return
        await stepping.aside()
        late: list[Unavailable] = []
        async with trio.open_nursery() as nursery:
            for ino in wanted:
                nursery.start_soon(self._acknowledge, ino, late)
        if late:
            raise late[0]

    def _promises(self, ino: int) -> bool:
        """Whether a close promises the file's copies."""
        namespace = self._copies.engine.namespace(namespace_of(ino))
        return namespace is not None and namespace.acknowledge == "sync" and namespace.replicas > 0

    async def _acknowledge(self, ino: int, late: list[Unavailable]) -> None:
        file = await self._copies.look(ino)
        if file is None:
            return  # removed meanwhile
        missing = file.wanted
        with trio.move_on_after(_WAIT_S + file.inode.size / _BYTES_PER_S):
            missing = await self._make(file)
        if not missing:
            self.counters["acknowledged_with_copies"] += 1
            return
        self.counters["copies_late"] += 1
        name = file.inode.name.decode(errors="backslashreplace")
        late.append(
            Unavailable(
                f"{name}: {file.wanted} nodes are to have it before its close is done, and"
                f" {missing} of them have it not yet; `kvfs node list` shows the nodes"
            )
        )

    async def _make(self, file: Copied) -> int:
        """How many copies are missing in the end."""
        snapshot = self._copies.snapshot()
        missing = repair.judge(snapshot, file.ino, file.holders, file.wanted).missing
        return missing - len(await self._copies.make(file, missing)) if missing else 0
