"""Plans the reads of the tensors of a checkpoint's files. Pure: no file is touched here.

A rank's part of a tensor is, seen as bytes, a table: a number of lines, from each of which it has
one piece, or several if tensors are stacked in one. One piece of one line (a whole tensor, or rows
of one) is contiguous in the file, and read straight to the tensor's memory. For several lines
(columns), either each piece is read alone (strided), or whole lines are read into a staging buffer
and the pieces copied from there (sliced), whichever costs less. Several pieces of one line, and a
tensor whose elements are converted (dtype), go through a staging buffer as well.

    file    | header | a a a a | b b b b | c c c c |          b: columns are wanted
    arena   | a a a a |                  | c c c c |          two runs, read in place
    staged                      b b b b -> b'                 whole lines, then copied

Runs
- Tensors that are read in place and contiguous in the file are contiguous in memory: a run, of
  which they are views. So reads are as large as the disk likes them, whatever the size of tensors.
- A run begins in memory at the same offset in a page as in the file, and has room for the rest of
  its first and last page: then O_DIRECT needs no copy.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from gds.format.excerpt import shown
from gds.format.safetensors import BITS, Header, TensorInfo
from gds.plan.pages import page_down, page_up
from gds.plan.tensor_parallel import Cutting, TensorPart
from kvfs.base.errors import Invalid

READ_BYTES: Final = 16 << 20
"""Bytes of one read in place: large enough for a disk, and for reads of one file by several threads
(measured: 8 threads of 16 MiB, 3 % more than of 8)."""
RUN_BYTES: Final = 64 << 20
"""Bytes of a run. A caller that drops a run's tensors gives its memory back; longer runs are read
no faster."""
STAGING_BYTES: Final = 16 << 20
"""Bytes of one thread's staging buffer."""
_PIECE_NS: Final = 14_000
"""The cost of one more piece to a disk, beside its bytes. Measured, like the next: a virtual NVMe
disk with 2 processors, cold, eight threads, pieces of 4 to 256 KiB; 12 to 16 µs."""
_PIECES_PER_NS: Final = 1.7
"""Bytes of pieces per ns: less than of lines, as nothing reads ahead of them."""
_LINES_PER_NS: Final = 2.9
"""Bytes of whole lines per ns."""
_WORTH: Final = 2
"""Ranks are usually together on a host, where whole lines come from the disk once for all of them,
and each rank's pieces separately: so pieces must cost that much less for one rank."""


class Strategy(Enum):
    """The way in which columns are read."""

    AUTO = "auto"
    """The way with the lower cost."""
    SLICE = "slice"
    """Whole lines are read and cut."""
    STRIDED = "strided"
    """Each piece is read alone."""


class WantedTensor(NamedTuple):
    """A tensor, or a part of one, of one file."""

    file: int
    tensor: TensorInfo
    part: TensorPart | None = None
    converted: bool = False
    """Whether its elements are converted: it is read through a staging buffer."""


class Run(NamedTuple):
    """A span of a file that lies in memory as it lies in the file."""

    file: int
    begin: int
    end: int

    @property
    def room(self) -> int:
        """Bytes of memory that it needs, in whole pages."""
        return page_up(self.end) - page_down(self.begin)

    @property
    def start(self) -> int:
        """The position of its first byte in that memory."""
        return self.begin - page_down(self.begin)


class Lines(NamedTuple):
    """The wanted lines of a tensor, as bytes of its file."""

    begin: int
    """The first line's first byte."""
    number: int
    length: int
    """Bytes of a line."""
    pieces: tuple[tuple[int, int], ...]
    """The wanted bytes of each line: [first, last), in the order of the tensor."""

    @property
    def wanted(self) -> int:
        """Bytes of all pieces of one line."""
        return sum(last - first for first, last in self.pieces)

    def behind(self, begin: int) -> "Lines":
        """Returns the same lines, so many bytes later."""
        return Lines(begin + self.begin if self.begin else begin, *self[1:])

    @property
    def is_one_span(self) -> bool:
        return len(self.pieces) == 1 and (self.number == 1 or self.wanted == self.length)


class InPlace(NamedTuple):
    """A step: read the bytes [begin, end) of a run's file to their places."""

    run: int
    begin: int
    end: int
    tensors: tuple[int, ...]
    """The tensors of which it has bytes."""


class Sliced(NamedTuple):
    """A step: read whole lines of a tensor into a staging buffer, and copy their pieces from
    there."""

    tensor: int
    first_line: int
    end_line: int


class StagedSpan(NamedTuple):
    """A step: read the bytes [begin, end) of a file into a staging buffer, and copy them from
    there, for a tensor that is converted, for one that has several pieces in one line, or for a
    piece that is longer than the buffer."""

    tensor: int
    begin: int
    end: int
    offset: int
    """The offset in the wanted bytes of the tensor, as they are in the file."""


class Strided(NamedTuple):
    """A step: read the piece of each line of a tensor alone."""

    tensor: int
    first_line: int
    end_line: int


Step = InPlace | Sliced | StagedSpan | Strided


class LoadPlan(NamedTuple):
    """The plan of a load. Tensors are numbered as they were asked for."""

    wanted: tuple[WantedTensor, ...]
    lines: tuple[Lines, ...]
    """The lines of each tensor."""
    runs: tuple[Run, ...]
    run_of: tuple[int | None, ...]
    """The run in which each tensor lies; None: it has memory of its own."""
    steps: tuple[Step, ...]
    """The steps in the order of the files and of their bytes."""

    def unit(self, tensor: int) -> int:
        """Returns the unit of memory that is made at once: the number of the run that has the
        tensor, or ~ of the tensor's own."""
        run = self.run_of[tensor]
        return ~tensor if run is None else run

    def offset(self, tensor: int, run: int) -> int:
        """Returns the offset of a tensor's first byte, counted from the first byte of its run."""
        return self.lines[tensor].begin - self.runs[run].begin

    @property
    def read_bytes(self) -> int:
        """Bytes that the steps ask the files for."""
        return sum(map(self.bytes_of, self.steps))

    def bytes_of(self, step: Step) -> int:
        """Returns the bytes that one step asks a file for."""
        if isinstance(step, InPlace | StagedSpan):
            return step.end - step.begin
        lines = self.lines[step.tensor]
        each = lines.length if isinstance(step, Sliced) else lines.wanted
        return (step.end_line - step.first_line) * each


def make_plan(
    wanted: Iterable[WantedTensor], strategy: Strategy = Strategy.AUTO, run_bytes: int = RUN_BYTES
) -> LoadPlan:
    """Plans the reads. `run_bytes`: a longer run ends with the tensor that exceeds it. Raises
    Invalid if a part begins or ends within a byte."""
    asked = tuple(wanted)
    lines = tuple(map(lines_of, asked))
    alone = [
        lines[at].length > 0 and (each.converted or not lines[at].is_one_span)
        for at, each in enumerate(asked)
    ]
    in_place = sorted(
        (at for at in range(len(asked)) if not alone[at]),
        key=lambda at: (asked[at].file, lines[at].begin, lines[at].number * lines[at].length),
    )
    runs, run_of = _runs(asked, lines, in_place, run_bytes)
    steps: list[Step] = list(_in_place(lines, runs, run_of, in_place))
    for at in range(len(asked)):
        if alone[at]:
            steps += _steps_alone(at, lines[at], strategy)

    def place(step: Step) -> tuple[int, int]:
        if isinstance(step, InPlace):
            return runs[step.run].file, step.begin
        return asked[step.tensor].file, _first_byte(step, lines[step.tensor])

    steps.sort(key=place)
    return LoadPlan(asked, lines, runs, run_of, tuple(steps))


def _first_byte(step: Sliced | StagedSpan | Strided, lines: Lines) -> int:
    if isinstance(step, StagedSpan):
        return step.begin
    return lines.begin + step.first_line * lines.length


def parts_of(headers: Iterable[Header], cutting: Cutting) -> Iterator[WantedTensor]:
    """Yields the parts of the tensors of several files that a rank has. Raises Invalid."""
    for file, header in enumerate(headers):
        for tensor in header.tensors:
            part = cutting.part(tensor)
            if part is None or part.spans:
                yield WantedTensor(file, tensor, part)


def shape_of(wanted: WantedTensor) -> tuple[int, ...]:
    """Returns the shape of the wanted part, in elements."""
    shape = list(wanted.tensor.shape)
    if wanted.part is not None:
        shape[wanted.part.dimension] = wanted.part.size
    return tuple(shape)


def lines_of(wanted: WantedTensor) -> Lines:
    """Returns the lines of the wanted part. Raises Invalid."""
    tensor, part = wanted.tensor, wanted.part
    if part is None or not math.prod(tensor.shape):
        return _one_line(tensor.end - tensor.begin).behind(tensor.begin)
    lines = _lines_of(tensor.shape, BITS[tensor.dtype], part)
    if lines is None:
        raise Invalid(
            f"tensor {shown(tensor.name)}: {tensor.dtype} cannot be cut at {part.spans} of "
            f"dimension {part.dimension}: that is within a byte"
        )
    return lines.behind(tensor.begin)


@functools.lru_cache(maxsize=4096)
def _lines_of(shape: tuple[int, ...], bits: int, part: TensorPart) -> Lines | None:
    """Returns the lines of a tensor that begins at 0 and has elements of so many bits: a checkpoint
    may have a million tensors, but only a few shapes of them. None: a part begins or ends within a
    byte."""
    inner = math.prod(shape[part.dimension + 1 :]) * bits
    count = math.prod(shape[: part.dimension])
    length = inner * shape[part.dimension]
    spans = [(inner * begin, inner * end) for begin, end in part.spans if begin < end]
    if length % 8 or any(first % 8 or last % 8 for first, last in spans):
        return None
    if not spans:
        return _one_line(0)
    pieces = tuple((first // 8, last // 8) for first, last in spans)
    return _as_span(Lines(0, count, length // 8, pieces))


def _as_span(lines: Lines) -> Lines:
    """Returns the lines as one line that is wanted whole, if the bytes are contiguous."""
    if not lines.is_one_span:
        return lines
    return _one_line(lines.wanted * lines.number).behind(lines.begin + lines.pieces[0][0])


@functools.lru_cache(maxsize=4096)
def _one_line(size: int) -> Lines:
    """Returns one line that begins at 0 and is wanted whole."""
    return Lines(0, 1, size, ((0, size),))


def _runs(
    asked: Sequence[WantedTensor], lines: Sequence[Lines], in_place: Iterable[int], most: int
) -> tuple[tuple[Run, ...], tuple[int | None, ...]]:
    """Returns the runs, and the run of each tensor, by a loop without calls: there may be a million
    tensors."""
    runs: list[tuple[int, int, int]] = []
    run_of: list[int | None] = [None] * len(asked)
    file, first, last = -1, 0, 0
    number = -1  # one object for all tensors of a run
    for at in in_place:
        begin, _, length, _ = lines[at]
        if asked[at].file != file or begin != last or begin - first >= most:
            runs.append((file, first, last))
            file, first, last = asked[at].file, begin, begin
            number += 1
        last += length
        run_of[at] = number
    runs.append((file, first, last))
    return tuple(Run(*each) for each in runs[1:]), tuple(run_of)


def _in_place(
    lines: Sequence[Lines],
    runs: Sequence[Run],
    run_of: Sequence[int | None],
    in_place: Sequence[int],
) -> Iterable[InPlace]:
    members: list[list[int]] = [[] for _ in runs]
    for at in in_place:
        run = run_of[at]
        assert run is not None
        members[run].append(at)
    for number, each in enumerate(runs):
        yield from _cut(number, each, [(lines[at], at) for at in members[number]])


def _cut(number: int, run: Run, members: Sequence[tuple[Lines, int]]) -> Iterable[InPlace]:
    """Cuts a run into reads that end at multiples of `READ_BYTES` of the file."""
    first = 0
    begin = run.begin
    while begin < run.end or first < len(members):
        end = min((begin // READ_BYTES + 1) * READ_BYTES, run.end)
        touched = []
        behind = first
        for lines, at in members[first:]:
            if lines.begin >= end and end < run.end:
                break
            touched.append(at)
            if lines.begin + lines.length <= end:
                behind += 1
        yield InPlace(number, begin, end, tuple(touched))
        first, begin = behind, end


def _steps_alone(at: int, lines: Lines, strategy: Strategy) -> Iterator[Step]:
    """Yields the steps of a tensor that is not read in place."""
    kind = _kind(lines, strategy)
    one = lines.length if kind is Sliced else lines.wanted
    if one > STAGING_BYTES or lines.number == 1:
        yield from _spans(at, lines)
        return
    each = max(1, STAGING_BYTES // one)
    for first in range(0, lines.number, each):
        yield kind(at, first, min(first + each, lines.number))


def _spans(at: int, lines: Lines) -> Iterator[StagedSpan]:
    offset = 0
    for line in range(lines.number):
        start = lines.begin + line * lines.length
        for first, last in lines.pieces:
            for begin in range(start + first, start + last, STAGING_BYTES):
                end = min(begin + STAGING_BYTES, start + last)
                yield StagedSpan(at, begin, end, offset)
                offset += end - begin


def _kind(lines: Lines, strategy: Strategy) -> type[Sliced] | type[Strided]:
    if strategy is Strategy.STRIDED or lines.length > STAGING_BYTES:
        return Strided
    if strategy is Strategy.SLICE:
        return Sliced
    strided = len(lines.pieces) * _PIECE_NS + lines.wanted / _PIECES_PER_NS
    return Strided if strided * _WORTH < lines.length / _LINES_PER_NS else Sliced
