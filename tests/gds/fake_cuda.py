"""CUDA as `gds.device.cuda` uses it, on memory of the host: what is queued is done at once. It
keeps which GPUs have a context and which threads do, by the rules of CUDA 12 and torch 2.11:

- a thread begins at GPU 0, without a context; going to the GPU where a thread is does nothing;
- going to another, and waiting for an event, make a context there;
- `torch.cuda.device` goes back without making one, `torch.cuda.stream` as if for good.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class _Thread(threading.local):
    def __init__(self) -> None:
        self.at = 0
        self.bound: int | None = None


class Stream:
    def __init__(self, cuda: "Cuda", device: torch.device) -> None:
        self._cuda = cuda
        self.device = device
        self.cuda_stream = id(self)

    def wait_event(self, event: "Event") -> None:
        assert event.recorded

    def synchronize(self) -> None:
        self._cuda.synchronized.append(self)


class Event:
    def __init__(self, cuda: "Cuda") -> None:
        self._cuda = cuda
        self.recorded = False

    def record(self, stream: Stream) -> None:
        self._cuda.contexts.add(stream.device.index)
        self.recorded = True

    def query(self) -> bool:
        self._cuda.bind()
        return False

    def synchronize(self) -> None:
        self._cuda.bind()


class Cuda:
    """`torch.cuda`, of two GPUs."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.synchronized: list[Stream] = []
        self.fails: Callable[[], None] = lambda: None
        """Called where memory is asked for."""
        self._thread = _Thread()

    @property
    def bound(self) -> int | None:
        """The GPU whose context this thread has, as the driver sees it."""
        return self._thread.bound

    def bind(self) -> None:
        self._thread.bound = self._thread.at
        self.contexts.add(self._thread.at)

    def set_device(self, device: torch.device) -> None:
        if device.index != self._thread.at:
            self._thread.at = device.index
            self.bind()

    def mem_get_info(self, device: torch.device) -> None:
        with self.device(device):
            self.bind()

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self._thread.at
        self.set_device(device)
        try:
            yield
        finally:
            self._thread.at = before

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = torch.device("cuda", self._thread.at)
        self.set_device(stream.device)
        try:
            yield
        finally:
            self.set_device(before)

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, device)

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, device)

    def Event(self, blocking: bool) -> Event:
        assert blocking, "a thread that waits takes no CPU"
        return Event(self)


class Torch(NamedTuple):
    """What `gds.device.cuda` takes of torch."""

    cuda: Cuda
    OutOfMemoryError: type[RuntimeError] = torch.OutOfMemoryError
    device: type[torch.device] = torch.device

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.cuda.fails()
        self.cuda.contexts.add(device.index)
        return torch.empty(shape, dtype=dtype)
