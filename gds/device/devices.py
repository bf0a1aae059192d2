"""The interface of a device beside the CPU, so that `gds.device.device_target` knows neither CUDA
nor that it runs on one.

Work for a device is queued, and done later: a `Mark` tells when. Memory for tensors belongs to the
receiver of the load (with CUDA: to its stream), so it may be written once `ready` is reached.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

Work = Callable[[], object]


class Staging(NamedTuple):
    """One buffer of the host."""

    memory: memoryview
    raw: torch.Tensor
    """The same bytes as a tensor."""
    refused: str = ""
    """The reason why a device copies from it through the driver's own buffers; empty if it copies
    directly."""


class Mark(Protocol):
    """A moment in a queue."""

    def wait(self) -> None:
        """Waits until all work queued before the mark is done. Any thread may call it, any number
        of times. Raises Unavailable if the device failed."""


class Queue(Protocol):
    """The queue of one thread."""

    def submit(self, work: Work, after: Sequence[Mark] = ()) -> Mark:
        """Queues `work` behind all earlier work, and behind marks of the same device. `work` calls
        torch on this device's tensors and on lent buffers; those that it uses must live, and stay
        as they are, until the mark is reached. Raises Unavailable, NoSpace, and what `work` raises;
        nothing of it is under way then."""

    def copy(self, to: torch.Tensor, staged: torch.Tensor, after: Sequence[Mark] = ()) -> Mark:
        """Queues a copy of bytes of a lent buffer, a pinned one, to as many of this device's
        memory, as `submit` queues work, in fewer calls. The calling thread has entered the device.
        Raises Unavailable."""


class Device(Protocol):
    """One device, for one load. Any thread may use it."""

    def enter(self) -> None:
        """Makes this device the calling thread's: called once by each reading thread, before
        anything else. Raises Unavailable."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory of the device. Raises RuntimeError if there is too little, Unavailable if
        the device failed."""

    def ready(self) -> Mark:
        """Returns the mark at which memory that `empty` gave so far may be written. Raises
        Unavailable."""

    def queue(self) -> Queue:
        """Returns a new queue, in which copies overlap with those of others. Raises Unavailable."""

    def lend(self, size: int) -> Staging:
        """Returns a buffer that begins at a page, to copy from. Raises NoSpace, Unavailable."""

    def give_back(self, staging: Staging) -> None:
        """Takes back a buffer from which nothing copies any more."""


def first_line(error: BaseException) -> str:
    """Returns the first line of a message of torch, which may have many."""
    return str(error).partition("\n")[0]
