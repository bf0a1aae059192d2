"""The interface of a device beside the CPU, so that the way there (`gds.device.device_target`)
knows neither CUDA nor that it runs on one.

Work for a device is queued, and done later: a `Mark` tells when. Memory for tensors belongs to whom
the load is for (to CUDA: to his stream), so it may be written once `ready` is reached.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

Work = Callable[[], object]


class Staging(NamedTuple):
    """One buffer of the host."""

    memory: memoryview
    raw: torch.Tensor
    """The same bytes."""
    refused: str = ""
    """Why a device copies from it by the driver's own buffers; empty where it does so itself."""


class Mark(Protocol):
    """A moment in a queue."""

    def wait(self) -> None:
        """Until all that was queued before it is done. Any thread, any number of times. Raises
        Unavailable, where the device failed."""


class Queue(Protocol):
    """The queue of one thread."""

    def submit(self, work: Work, after: Sequence[Mark] = ()) -> Mark:
        """Have `work` done behind what was submitted before, and behind marks of the same device.
        `work` calls torch on this device's tensors and on buffers that were lent; those that it
        uses must live, and stay as they are, until the mark is reached. Raises Unavailable,
        NoSpace, and what `work` raises; then nothing of it is under way."""


class Device(Protocol):
    """One device, for one load. Any thread."""

    def enter(self) -> None:
        """The calling thread is at this device from now on: called once by each thread that reads,
        before all else. Raises Unavailable."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device. Raises RuntimeError where there is not so much, Unavailable where
        the device failed."""

    def ready(self) -> Mark:
        """When what `empty` gave so far may be written. Raises Unavailable."""

    def queue(self) -> Queue:
        """A new one, in which copies overlap with those of others. Raises Unavailable."""

    def lend(self, size: int) -> Staging:
        """A buffer that begins at a page, to copy from. Raises NoSpace, Unavailable."""

    def give_back(self, staging: Staging) -> None:
        """Nothing copies from it any more."""


def first_line(error: BaseException) -> str:
    """The first line of a message of torch, which can have many."""
    return str(error).partition("\n")[0]
