"""The ways of chunks' bytes from a holder into the arriving file.

Requests, redirects, checksums and deadlines are the same for all: they stay on the authenticated
connections between nodes. Over TCP, the default, the bytes are the answer's body;
`rdma.rdma_reader` has the other transport.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from kvfs.cluster.peer_client import IncomingChunks
from kvfs.cluster.peer_protocol import Ask, PeerAddress
from kvfs.transfer.chunk_receiver import Arrived, ChunkBuffers, Receiving, Taking
from kvfs.transfer.sink import Sink


class Transport(Protocol):
    """The transport of one node; for its event loop."""

    def mover(self, address: PeerAddress, ask: Ask) -> bytes:
        """Returns the field of a request that names the way, other than its answer's body, by which
        the bytes may come; empty: none."""

    def taking(
        self, address: PeerAddress, incoming: IncomingChunks, sink: Sink, arrived: Arrived
    ) -> AbstractContextManager[Taking]:
        """Takes the answer of that node into the file; its resources are held until the block
        ends."""


class OverTcp:
    """The transport whose bytes follow the answer's head."""

    def __init__(self) -> None:
        self._buffers = ChunkBuffers()

    def mover(self, _address: PeerAddress, _ask: Ask) -> bytes:
        return b""

    @contextmanager
    def taking(
        self, _address: PeerAddress, incoming: IncomingChunks, sink: Sink, arrived: Arrived
    ) -> Iterator[Taking]:
        with self._buffers.lent() as buffer:
            yield Receiving(incoming, sink, buffer, arrived)
