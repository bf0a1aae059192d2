"""Chooses the readers that get a file from this node, and those that are sent to others that have
it or are getting it. Pure: no clock, no I/O.

A holder gives a large file to few nodes at a time. Any other node that asks gets the names of nodes
that asked before it, the last one first: so the first reads from the holder, the second from the
first, and each link carries the file about once, however many readers there are.

Invariants
- No node is sent to one that asked for the file after it: among the readers of one holder, waits
  have no cycle.
- A node that insists is served.
- The memory is bounded, and files that nobody asks for are forgotten.
"""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

Address = TypeVar("Address")
SMALL_BYTES: Final = 16 << 20
"""A redirect takes a round trip: files up to here are given to more at a time."""
_SMALL_READERS: Final = 8
_LARGE_READERS: Final = 1
"""Nodes to which a file of more bytes is given at a time."""
_ACTIVE_S: Final = 2.0
"""Time after its last request for which a reader counts as being served."""
_KNOWN_S: Final = 60.0
"""Time for which a reader is named to others."""
_MOST_FILES: Final = 1024
_MOST_READERS: Final = 256
_MOST_NAMED: Final = 4


class _Reader(Generic[Address]):
    __slots__ = ("address", "asked", "served", "turn")

    def __init__(self, address: Address, turn: int) -> None:
        self.address = address
        self.turn = turn
        self.asked = 0.0
        self.served = False
        """Whether this node served it when it last asked."""


class Spreading(Generic[Address]):
    """The readers of this node's files."""

    def __init__(self) -> None:
        self._turn = 0
        self._files: OrderedDict[tuple[int, int], dict[int, _Reader[Address]]] = OrderedDict()
        self.redirected = 0

    def __len__(self) -> int:
        """Returns how many readers of files are remembered."""
        return sum(map(len, self._files.values()))

    def ask(
        self,
        file: tuple[int, int],
        size: int,
        node: int,
        address: Address | None,
        now: float,
        insist: bool = False,
    ) -> list[Address]:
        """Decides on the request of `node` for a part of the file. Returns no address if it is to
        be served, else those to which it is sent.

        A node without a known address is served and named to nobody."""
        if address is None:
            return []
        readers = self._readers(file, now)
        reader = readers.get(node)
        if reader is None:
            reader = readers[node] = _Reader(address, self._turn)
            self._turn += 1
        reader.address, reader.asked = address, now
        limit = _SMALL_READERS if size <= SMALL_BYTES else _LARGE_READERS
        served = sum(
            each.served and now - each.asked < _ACTIVE_S
            for each in readers.values()
            if each is not reader
        )
        before = sorted(
            (each for each in readers.values() if each.turn < reader.turn),
            key=lambda each: -each.turn,
        )
        reader.served = insist or served < limit or not before
        if reader.served:
            return []
        self.redirected += 1
        return [each.address for each in before[:_MOST_NAMED]]

    def _readers(self, file: tuple[int, int], now: float) -> dict[int, _Reader[Address]]:
        readers = self._files.setdefault(file, {})
        self._files.move_to_end(file)
        if len(self._files) > _MOST_FILES:
            self._files.popitem(last=False)
        for node, reader in tuple(readers.items()):
            if now - reader.asked > _KNOWN_S:
                del readers[node]
        if len(readers) >= _MOST_READERS:
            del readers[next(iter(readers))]
        return readers
