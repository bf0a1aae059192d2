"""Where tensors go: memory of the host, or of a device behind pinned buffers."""

import math
from typing import Final, NamedTuple

import torch

from gds.load_plan import READ_BYTES, STAGING_BYTES, LoadPlan, Place, Wanted
from gds.memory import allocate
from gds.pages import PAGE_BYTES, page_down, page_up
from gds.tensors import bytes_of, dtype_of, torch_shape, view_of
from kvfs.errors import NoSpace

STAGE_BYTES: Final = max(READ_BYTES, STAGING_BYTES) + 2 * PAGE_BYTES
"""Of a thread's staging buffer: a step, and the rest of its first and last page."""


class Staging(NamedTuple):
    """One buffer of the host, for one thread."""

    memory: memoryview
    raw: torch.Tensor
    """The same bytes."""


class Target:
    """The memory of one load. A run's memory is made when its first byte is about to come, and
    forgotten here when its last tensor was taken. Any thread, one for each step."""

    def __init__(self, plan: LoadPlan, device: torch.device, dtype: torch.dtype | None) -> None:
        """`dtype`: of tensors that are converted."""
        self._plan = plan
        self._device = device
        self._dtype = dtype
        self._rooms: dict[int, memoryview] = {}
        self._runs: dict[int, torch.Tensor] = {}
        self._alone: dict[int, torch.Tensor] = {}

    def staging(self) -> Staging:
        """A buffer that copies to the device start from. Raises NoSpace."""
        try:
            memory = allocate(STAGE_BYTES)
        except MemoryError as error:
            raise NoSpace(f"a staging buffer: {error}") from None
        return Staging(memory, bytes_of(memory, torch.device("cpu")))

    def open_run(self, number: int) -> None:
        """Have memory for it. Raises NoSpace."""
        room = self._plan.runs[number].room
        try:
            memory = allocate(room)
        except MemoryError as error:
            first = self._plan.places.index(Place(number, 0))
            name = self._plan.wanted[first].tensor.name
            raise NoSpace(f"{error} (tensor {name!r} and what follows it)") from None
        self._rooms[number] = memory
        self._runs[number] = bytes_of(memory, self._device)

    def open_alone(self, at: int) -> None:
        """Have memory for a tensor that is not read in place. Raises NoSpace."""
        wanted = self._plan.wanted[at]
        try:
            self._alone[at] = torch.empty(
                torch_shape(wanted), dtype=self._dtype_of(wanted), device=self._device
            )
        except RuntimeError as error:
            raise NoSpace(f"tensor {wanted.tensor.name!r}: {error}") from None

    def alone_bytes(self, at: int) -> int:
        """What a tensor that is not read in place takes."""
        wanted = self._plan.wanted[at]
        return math.prod(torch_shape(wanted)) * int(self._dtype_of(wanted).itemsize)

    def pages(self, number: int, begin: int, end: int) -> memoryview:
        """Where the pages of a run's file that hold [begin, end) belong."""
        run = self._plan.runs[number]
        room = page_down(run.begin)
        return self._rooms[number][page_down(begin) - room : page_up(end) - room]

    def copy_table(
        self, at: int, staged: torch.Tensor, lines: tuple[int, int], piece: tuple[int, int]
    ) -> None:
        """Lines [lines[0], lines[1]) of a tensor came whole, `staged`; their pieces, the bytes
        [piece[0], piece[1]) of each, go where they belong."""
        wanted = self._plan.wanted[at]
        dtype = dtype_of(wanted)
        first, last = (byte // dtype.itemsize for byte in piece)
        table = view_of(staged, dtype, (lines[1] - lines[0], -1))[:, first:last]
        self._alone[at].view(self._plan.lines[at].number, -1)[lines[0] : lines[1]].copy_(table)

    def copy_span(self, at: int, staged: torch.Tensor, offset: int) -> None:
        """Bytes of a tensor came that lie together, from `offset` on of what is wanted of it."""
        dtype = dtype_of(self._plan.wanted[at])
        elements = view_of(staged, dtype, (-1,))
        first = offset // dtype.itemsize
        self._alone[at].view(-1)[first : first + len(elements)].copy_(elements)

    def take(self, at: int) -> torch.Tensor:
        """The tensor, whole; asked for once."""
        wanted, place = self._plan.wanted[at], self._plan.places[at]
        if place is None:
            return self._alone.pop(at)
        lines, run = self._plan.lines[at], self._plan.runs[place.run]
        begin = run.start + place.offset
        raw = self._runs[place.run][begin : begin + lines.length]
        found = view_of(raw, dtype_of(wanted), torch_shape(wanted))
        return found.to(self._dtype_of(wanted))

    def close_run(self, number: int) -> None:
        """Its tensors were taken: they keep its memory."""
        self._rooms.pop(number, None)
        self._runs.pop(number, None)

    def _dtype_of(self, wanted: Wanted) -> torch.dtype:
        if wanted.converted and self._dtype is not None:
            return self._dtype
        return dtype_of(wanted)
