"""Chunks that are lent to movers of others.

Invariants
- A lent chunk lies in the mover's memory from the promise until it is given back, LENT_S at most;
  then its piece is wiped before another is put there.
- A reader that cannot be served so is served over TCP: nobody waits for a piece.
"""

import ipaddress
import secrets
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import trio

from kvfs.base.errors import Invalid, Unavailable
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_protocol import CHUNK_BYTES, Ask, Lent
from kvfs.cluster.peer_server import Offer
from kvfs.transfer.rdma.transfer_process import Mover

LENT_S: Final = 30.0
"""Seconds of a loan. A reader that has not taken it by then has given up: see
`rdma_reader.TAKEN_S`."""
_LOOK_S: Final = 1.0
_TICKET_BITS: Final = 40
_THREADS: Final = 4


class _Loan(NamedTuple):
    node: int
    pieces: list[int]
    began: float
    """The beginning, by time.monotonic."""


class Lending:
    """A `peer_server.Lender`; `run` it."""

    most_chunks: Final = 4
    """Chunks for one request."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._memory = mover.memory
        self._loans: dict[int, _Loan] = {}
        self._ticket = secrets.randbits(_TICKET_BITS)
        """The last ticket. They begin anywhere: loans of a run before this one are none of its
        own."""
        self._threads = trio.CapacityLimiter(_THREADS)
        self.counters = {"lent_bytes": 0, "lent_refused": 0, "lent_expired": 0}

    def knows(self, kind: bytes) -> bool:
        return bool(kind) and kind == self._mover.kind

    async def lend(self, offer: Offer, ask: Ask, peer: int, host: str) -> Lent | None:
        """Like `Lender.lend`. Cancelled: nothing is lent."""
        pieces = self._memory.take(offer.chunks) if await self._admits(host) else []
        if not pieces:
            self.counters["lent_refused"] += 1
            return None
        self._ticket = ticket = self._ticket + 1
        loan = _Loan(peer, pieces, time.monotonic())
        try:
            await self._in_thread(self._fill, loan.pieces, offer, ask)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._end(loan)
            raise
        self._loans[ticket] = loan
        self.counters["lent_bytes"] += ask.length(offer.chunks)
        at = tuple(self._mover.base + piece for piece in pieces)
        return Lent(self._mover.port, ticket, at)

    async def taken(self, peer: Party, params: Any) -> None:
        """Answers the method TAKEN of peers: these tickets were taken. Raises Invalid."""
        if not isinstance(params, list) or not all(isinstance(each, int) for each in params):
            raise Invalid("tickets are numbers")
        for ticket in params:
            loan = self._loans.get(ticket)
            if loan is not None and loan.node == peer.node:
                del self._loans[ticket]
                await self._end(loan)

    async def run(self) -> None:
        """Ends loans that nobody gives back, until cancelled."""
        while True:
            await trio.sleep(_LOOK_S)
            before = time.monotonic() - LENT_S
            for ticket in [each for each, loan in self._loans.items() if loan.began <= before]:
                loan = self._loans.pop(ticket, None)
                if loan is not None:  # it was not given back while another one was wiped
                    self.counters["lent_expired"] += 1
                    await self._end(loan)

    async def _admits(self, host: str) -> bool:
        try:
            return await self._mover.admit(_plain(host))
        except Unavailable:
            return False

    def _fill(self, pieces: Sequence[int], offer: Offer, ask: Ask) -> None:
        for number, piece in enumerate(pieces):
            begin, end = ask.length(number), ask.length(number + 1)
            self._memory.fill(piece, offer.fd, ask.offset + begin, end - begin)

    async def _end(self, loan: _Loan) -> None:
        """Ends a loan. Cancelled: it has ended all the same."""
        with trio.CancelScope(shield=True):
            await self._in_thread(self._wipe, loan.pieces)
        self._memory.give_back(loan.pieces)

    def _wipe(self, pieces: Sequence[int]) -> None:
        for piece in pieces:
            self._memory.wipe(piece, CHUNK_BYTES)

    async def _in_thread(self, function: Any, *args: Any) -> None:
        await trio.to_thread.run_sync(function, *args, limiter=self._threads)


def _plain(host: str) -> str:
    """Returns an IPv4 address as such, if a socket for both families shows it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
