"""KV blocks into and out of memory of a GPU: through two pinned buffers, one of which is copied
while the client reads into, or writes from, the other.

A block's bytes are in their place, or in the store, when the call returns. Work that is still
queued in the caller's stream on that memory is waited for on the device.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from gds.device.cuda import CudaDevice
from gds.device.devices import Device, Mark, Queue, Staging
from gds.device.double_buffer import DoubleBuffer
from kvfs.base.errors import Invalid

BATCH_BYTES: Final = 64 << 20
"""Size of one buffer, except for a block that is longer."""
Fetch = Callable[[slice, list[memoryview]], list[int]]
"""Reads the blocks of a slice of the keys into the views; returns the bytes read of each."""
Store = Callable[[slice, list[memoryview]], None]
"""Stores the views as the blocks of a slice of the keys."""


def raw_of(tensor: object) -> torch.Tensor:
    """Returns a tensor's bytes, without a copy. Raises Invalid."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda:
        raise Invalid(f"{type(tensor).__name__}: among buffers of a GPU all are its tensors")
    if not tensor.is_contiguous():
        raise Invalid("this tensor is not contiguous: make it so first, with tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8)


def device_of(parts: Sequence[torch.Tensor]) -> Device:
    """Returns the device of the parts. Raises Invalid if they lie on several."""
    if len({part.device for part in parts}) > 1:
        raise Invalid("the buffers lie on several GPUs: call once for each")
    return CudaDevice(parts[0].device)


def read_into(parts: Sequence[torch.Tensor], device: Device, fetch: Fetch) -> None:
    """Reads blocks into their parts. Raises what `fetch` raises, Unavailable if the device failed,
    NoSpace for pinned memory. No copy is under way then."""
    with _lane(parts, device) as lane:
        for batch in batches([len(part) for part in parts], BATCH_BYTES):
            staging, views = lane.take(batch)
            sizes = fetch(batch, [staging.memory[view] for view in views])
            copies = [
                (part[:size], staging.raw[view.start : view.start + size])
                for part, view, size in zip(parts[batch], views, sizes, strict=True)
                if size
            ]
            lane.submit(functools.partial(_copy, copies))


def write_from(parts: Sequence[torch.Tensor], device: Device, store: Store) -> None:
    """Stores the parts as blocks. Raises what `read_into` raises."""
    waiting: tuple[slice, list[memoryview], Mark] | None = None
    with _lane(parts, device) as lane:
        for batch in batches([len(part) for part in parts], BATCH_BYTES):
            staging, views = lane.take(batch)
            copies = [
                (staging.raw[view], part) for part, view in zip(parts[batch], views, strict=True)
            ]
            mark = lane.submit(functools.partial(_copy, copies))
            if waiting is not None:
                _store(*waiting, store)
            waiting = batch, [staging.memory[view] for view in views], mark
        if waiting is not None:
            _store(*waiting, store)


def _store(batch: slice, views: list[memoryview], mark: Mark, store: Store) -> None:
    mark.wait()
    store(batch, views)


def batches(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Yields batches of consecutive sizes that have at most so many bytes together, or are a single
    size. Pure."""
    first, held = 0, 0
    for at, size in enumerate(sizes):
        if held and held + size > most:
            yield slice(first, at)
            first, held = at, 0
        held += size
    if first < len(sizes):
        yield slice(first, len(sizes))


class _Lane:
    """The buffers and the queue of one call."""

    def __init__(self, parts: Sequence[torch.Tensor], device: Device) -> None:
        self._sizes = [len(part) for part in parts]
        self._queue: Queue = device.queue()
        self._ready = device.ready()
        held = (sum(self._sizes[batch]) for batch in batches(self._sizes, BATCH_BYTES))
        self._turns = DoubleBuffer(device, max(held, default=0) or 1)

    def take(self, batch: slice) -> tuple[Staging, list[slice]]:
        """Returns the next buffer, once no copy from or to it is under way, and the place of each
        block in it."""
        staging = self._turns.take()
        views, begin = [], 0
        for size in self._sizes[batch]:
            views.append(slice(begin, begin + size))
            begin += size
        return staging, views

    def submit(self, work: Callable[[], object]) -> Mark:
        mark = self._queue.submit(work, [self._ready])
        self._turns.copied_at(mark)
        return mark

    def close(self) -> None:
        self._turns.close()


def _lane(
    parts: Sequence[torch.Tensor], device: Device
) -> contextlib.AbstractContextManager[_Lane]:
    return contextlib.closing(_Lane(parts, device))


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Queues all copies by one call: thousands of small blocks take some microseconds each so."""
    if copies:
        targets, sources = map(list, zip(*copies, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
