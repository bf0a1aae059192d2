"""Targets of tensors. The host's memory is here, that of devices in `gds.device.device_target`."""

import math
from abc import ABC, abstractmethod
from typing import Final

import torch

from gds.device.devices import Staging, first_line
from gds.io.memory import allocate
from gds.io.source import SourceFile
from gds.io.tensors import bytes_of, dtype_of, torch_shape, view_of
from gds.plan.load_plan import READ_BYTES, STAGING_BYTES, InPlace, LoadPlan, WantedTensor
from gds.plan.pages import PAGE_BYTES, page_down, page_up
from kvfs.base.errors import NoSpace

STAGE_BYTES: Final = max(READ_BYTES, STAGING_BYTES) + 2 * PAGE_BYTES
"""Bytes of a thread's staging buffer: a step, and the rest of its first and last page."""
_MAPPED_BYTES: Final = 1 << 20
"""The size from which on a tensor has a mapping of its own: malloc's arenas, one for each thread,
would keep the memory of dropped tensors."""


class Lane(ABC):
    """The way of one thread into the memory of a load."""

    @abstractmethod
    def read_in_place(self, source: SourceFile, step: InPlace) -> None:
        """Reads the step's bytes to their places. Raises what `SourceFile.read_into` raises, and
        Unavailable if the device failed."""

    @abstractmethod
    def staging(self) -> Staging:
        """Returns a buffer to read into, for one step. Raises NoSpace, Unavailable."""

    @abstractmethod
    def copy_table(self, at: int, staged: torch.Tensor, begin: int, end: int) -> None:
        """Copies the pieces of lines [begin, end) of a tensor, which lie whole in the buffer,
        `staged`, to their places. Raises NoSpace, Unavailable."""

    @abstractmethod
    def copy_span(self, at: int, staged: torch.Tensor, offset: int) -> None:
        """Copies contiguous bytes of a tensor to their place, from `offset` on of its wanted bytes.
        Raises NoSpace, Unavailable."""

    @abstractmethod
    def close(self) -> None:
        """Returns when nothing is under way any more."""


class Target(ABC):
    """The memory of one load. A run's memory is made when its first byte is about to arrive, and
    forgotten here when its last tensor was taken. Any thread may use it, one for each step."""

    def __init__(self, plan: LoadPlan, dtype: torch.dtype | None) -> None:
        """`dtype`: the dtype to which tensors are converted."""
        self._plan = plan
        self._dtype = dtype
        self._runs: dict[int, torch.Tensor] = {}
        self._alone: dict[int, torch.Tensor] = {}

    @abstractmethod
    def lane(self) -> Lane:
        """Returns a lane for the calling thread, which closes it. Raises Unavailable."""

    @abstractmethod
    def _make_run(self, number: int) -> torch.Tensor:
        """Makes memory for a run, as uint8. Raises MemoryError, RuntimeError, Unavailable."""

    @abstractmethod
    def _make_alone(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Makes memory for a tensor. Raises MemoryError, RuntimeError, Unavailable."""

    @abstractmethod
    def _start(self, number: int) -> int:
        """Returns the position of a run's first byte in its memory."""

    @abstractmethod
    def _aligned(self, raw: torch.Tensor, itemsize: int) -> torch.Tensor:
        """Returns `raw`, or a copy of it, that begins where elements of `itemsize` bytes may.
        Raises RuntimeError, Unavailable."""

    def open_run(self, number: int) -> None:
        """Makes a run's memory. Raises NoSpace, Unavailable."""
        try:
            self._runs[number] = self._make_run(number)
        except (MemoryError, RuntimeError) as error:
            first = self._plan.run_of.index(number)
            name = self._plan.wanted[first].tensor.name
            raise NoSpace(f"{first_line(error)} (tensor {name!r} and what follows it)") from None

    def open_alone(self, at: int) -> None:
        """Makes memory for a tensor that is not read in place. Raises NoSpace, Unavailable."""
        wanted = self._plan.wanted[at]
        try:
            self._alone[at] = self._make_alone(at, torch_shape(wanted), self._dtype_of(wanted))
        except (MemoryError, RuntimeError) as error:
            raise NoSpace(f"tensor {wanted.tensor.name!r}: {first_line(error)}") from None

    def alone_bytes(self, at: int) -> int:
        """Returns the bytes of a tensor that is not read in place."""
        wanted = self._plan.wanted[at]
        return math.prod(torch_shape(wanted)) * int(self._dtype_of(wanted).itemsize)

    def copy_table(self, at: int, staged: torch.Tensor, begin: int, end: int) -> None:
        """Does what `Lane.copy_table` does, at once."""
        lines = self._plan.lines[at]
        dtype = dtype_of(self._plan.wanted[at])
        table = view_of(staged, dtype, (end - begin, -1))
        wanted = self._alone[at].view(lines.number, -1)[begin:end]
        column = 0
        for first, last in lines.pieces:
            piece = table[:, first // dtype.itemsize : last // dtype.itemsize]
            wanted[:, column : column + piece.shape[1]].copy_(piece)
            column += piece.shape[1]

    def copy_span(self, at: int, staged: torch.Tensor, offset: int) -> None:
        """Does what `Lane.copy_span` does, at once."""
        dtype = dtype_of(self._plan.wanted[at])
        elements = view_of(staged, dtype, (-1,))
        first = offset // dtype.itemsize
        self._alone[at].view(-1)[first : first + len(elements)].copy_(elements)

    def take(self, at: int) -> torch.Tensor:
        """Returns the whole tensor; to be asked for once. Raises NoSpace, Unavailable."""
        wanted, run = self._plan.wanted[at], self._plan.run_of[at]
        if run is None:
            return self._alone.pop(at)
        lines, dtype = self._plan.lines[at], dtype_of(wanted)
        begin = self._start(run) + self._plan.offset(at, run)
        raw = self._runs[run][begin : begin + lines.length]
        try:
            raw = self._aligned(raw, dtype.itemsize)
        except RuntimeError as error:
            raise NoSpace(f"tensor {wanted.tensor.name!r}: {first_line(error)}") from None
        return view_of(raw, dtype, torch_shape(wanted)).to(self._dtype_of(wanted))

    def close_run(self, number: int) -> None:
        """Forgets a run whose tensors were taken: they keep its memory."""
        self._runs.pop(number, None)

    def _dtype_of(self, wanted: WantedTensor) -> torch.dtype:
        if wanted.converted and self._dtype is not None:
            return self._dtype
        return dtype_of(wanted)


class HostTarget(Target):
    """Memory of the host: files are read into it."""

    def __init__(self, plan: LoadPlan, dtype: torch.dtype | None) -> None:
        super().__init__(plan, dtype)
        self._rooms: dict[int, memoryview] = {}

    def lane(self) -> Lane:
        return HostLane(self)

    def pages(self, step: InPlace) -> memoryview:
        """Returns the memory of the pages of the file that hold the step's bytes."""
        run = self._plan.runs[step.run]
        room = page_down(run.begin)
        return self._rooms[step.run][page_down(step.begin) - room : page_up(step.end) - room]

    def _make_run(self, number: int) -> torch.Tensor:
        self._rooms[number] = allocate(self._plan.runs[number].room)
        return bytes_of(self._rooms[number])

    def _make_alone(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = self.alone_bytes(at)
        if size < _MAPPED_BYTES:
            return torch.empty(shape, dtype=dtype)
        return view_of(bytes_of(allocate(size)), dtype, shape)

    def _start(self, number: int) -> int:
        return self._plan.runs[number].start

    def _aligned(self, raw: torch.Tensor, itemsize: int) -> torch.Tensor:
        return raw.clone() if raw.data_ptr() % itemsize else raw

    def close_run(self, number: int) -> None:
        super().close_run(number)
        self._rooms.pop(number, None)


class HostLane(Lane):
    """Reads the bytes to their places; those that are not read in place, through one buffer."""

    def __init__(self, target: HostTarget) -> None:
        self._target = target
        self._staging: Staging | None = None

    def read_in_place(self, source: SourceFile, step: InPlace) -> None:
        source.read_into(self._target.pages(step), step.begin, step.end)

    def staging(self) -> Staging:
        if self._staging is None:
            try:
                memory = allocate(STAGE_BYTES)
            except MemoryError as error:
                raise NoSpace(f"a staging buffer: {error}") from None
            self._staging = Staging(memory, bytes_of(memory))
        return self._staging

    def copy_table(self, at: int, staged: torch.Tensor, begin: int, end: int) -> None:
        self._target.copy_table(at, staged, begin, end)

    def copy_span(self, at: int, staged: torch.Tensor, offset: int) -> None:
        self._target.copy_span(at, staged, offset)

    def close(self) -> None:
        self._staging = None
