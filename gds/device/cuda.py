"""Devices of CUDA, by torch.

Whose memory
- Tensors are made in the caller's stream: the one that is current when the load is asked for. They
  are the caller's as if made there; no other stream has to wait, as they are whole when they are
  handed over.
- Memory from the allocator may be in use by work that is still queued in that stream, so copies
  wait for that (`ready`) on the device.

Whose context
- A context on a GPU takes some 500 MB of it, and many calls make one on the thread's current
  device, which for a new thread is GPU 0. So reading threads enter their device, and work in the
  caller's thread is guarded by `torch.cuda.device`, which makes no context when it goes back, as
  `torch.cuda.stream` alone does.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from gds.device.cuda_driver import copy_async, pin, unpin
from gds.device.devices import Mark, Queue, Staging, Work, first_line
from gds.device.pinned import PinnedPool
from kvfs.base.errors import NoSpace, Unavailable


class CudaDevice:
    """One GPU, for one load; see `gds.device.devices.Device`."""

    def __init__(
        self,
        device: torch.device,
        pageable: Callable[[str], object] = lambda _why: None,
    ) -> None:
        """`device`: with its index. To be made in the thread that asked for the load. `pageable` is
        called once, with the reason, by a reading thread if buffers cannot be pinned. Raises
        Unavailable."""
        self.device = device
        self._pool = _pool(device.index)
        self._pageable = pageable
        self._telling = threading.Lock()
        self._is_told = False
        with _translated(device):
            self._caller = torch.cuda.current_stream(device)

    def enter(self) -> None:
        with _translated(self.device):
            torch.cuda.set_device(self.device)
            torch.cuda.mem_get_info(self.device)  # see `_bound`: cuFile goes by the driver

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._caller):
                return torch.empty(shape, dtype=dtype, device=self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _failed(self.device, error) from None

    def ready(self) -> Mark:
        with _translated(self.device):
            return CudaMark(self._caller)

    def queue(self) -> Queue:
        with _translated(self.device):
            return CudaQueue(self.device)

    def lend(self, size: int) -> Staging:
        staging = self._pool.lend(size)
        if staging.refused:
            with self._telling:
                is_told, self._is_told = self._is_told, True
            if not is_told:
                self._pageable(staging.refused)
        return staging

    def give_back(self, staging: Staging) -> None:
        self._pool.give_back(staging)


class CudaQueue:
    """A stream of its own; see `gds.device.devices.Queue`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Work, after: Sequence[Mark] = ()) -> Mark:
        with self._settled():
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._wait_for(after)
                work()
            return CudaMark(self._stream)

    def copy(self, to: torch.Tensor, staged: torch.Tensor, after: Sequence[Mark] = ()) -> Mark:
        with self._settled():
            self._wait_for(after)
            handle = self._stream.cuda_stream
            refused = copy_async(to.data_ptr(), staged.data_ptr(), len(staged), handle)
            if refused:
                raise Unavailable(f"{self._device}: {refused}")
            return CudaMark(self._stream)

    def _wait_for(self, after: Sequence[Mark]) -> None:
        for mark in after:
            assert isinstance(mark, CudaMark)
            self._stream.wait_event(mark.event)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Waits for what the block queued if it fails: that has no mark, and its memory is about to
        go."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()
            if isinstance(error, RuntimeError):
                raise _failed(self._device, error) from None
            raise


class CudaMark:
    """An event; see `gds.device.devices.Mark`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        # A thread that waits leaves its processor to those that read.
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    def wait(self) -> None:
        with _translated(self._device), torch.cuda.device(self._device):
            if not self.event.query():  # who waits is woken late
                self.event.synchronize()


@contextlib.contextmanager
def _translated(device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _failed(device, error) from None


def _failed(device: torch.device, error: RuntimeError) -> Unavailable | NoSpace:
    what = f"{device}: {first_line(error)}"
    return NoSpace(what) if isinstance(error, torch.OutOfMemoryError) else Unavailable(what)


_making = threading.Lock()


def _pool(index: int) -> PinnedPool:
    with _making:
        return _made_pool(index)


@functools.cache
def _made_pool(index: int) -> PinnedPool:
    """Returns the process's own pool for each GPU: a load is short, and pinning memory slow; and a
    GPU's buffers lie on its NUMA node."""
    device = torch.device("cuda", index)
    return PinnedPool(functools.partial(_pin, device), functools.partial(_unpin, device))


def _pin(device: torch.device, address: int, size: int) -> str:
    with _bound(device):
        return pin(address, size)


def _unpin(device: torch.device, address: int) -> None:
    with contextlib.suppress(Unavailable), _bound(device):
        unpin(address)


@contextlib.contextmanager
def _bound(device: torch.device) -> Iterator[None]:
    """Makes the driver's own calls find the thread's context, which torch binds only when needed:
    entering the GPU where a thread already is (GPU 0 for a new one) does nothing."""
    with _translated(device), torch.cuda.device(device):
        torch.cuda.mem_get_info(device)
        yield
