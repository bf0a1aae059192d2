"""A node's part in the transport, put together."""

import sys
from typing import Final

import trio

from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import TAKEN
from kvfs.cluster.peer_server import Method
from kvfs.transfer.rdma.exporter import Lending
from kvfs.transfer.rdma.rdma_reader import OverMover
from kvfs.transfer.rdma.transfer_process import Mover


class Rdma:
    """The transport for one event loop; `run` it."""

    def __init__(self, host: str, peers: PeerClient, interpreter: str = sys.executable) -> None:
        """Takes the arguments of `Mover`."""
        self.mover: Final = Mover(host, interpreter)
        self.lending: Final = Lending(self.mover)
        self.taking: Final = OverMover(self.mover, peers)

    @property
    def counters(self) -> dict[str, int]:
        return {
            **self.taking.counters,
            **self.lending.counters,
            "mover_restarts": self.mover.restarts,
        }

    def report(self) -> dict[str, object]:
        """Returns the part of the node's status."""
        mover = self.mover
        return {"over": mover.kind.decode(), "reason": mover.reason, "process": mover.pid}

    @property
    def methods(self) -> dict[str, Method]:
        """The requests that peers may send it, by method."""
        return {TAKEN: self.lending.taken}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled; started when the mover runs. Raises what `Mover.run` raises."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.mover.run)
            nursery.start_soon(self.lending.run)
            nursery.start_soon(self.taking.run)
            task_status.started()
