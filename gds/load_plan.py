"""From the tensors of a checkpoint's files to reads. Pure: no file is touched here.

What a rank has of a tensor is, seen as bytes, a table: so many lines, of each of which it has one
piece. One line (a whole tensor, or rows of one) is contiguous in the file, and read straight to
where the tensor lies. Of several lines (columns) either each piece is read alone (strided), or
whole lines are read into a staging buffer and the pieces copied from there (sliced), whichever
costs less. A tensor whose elements become others (dtype) goes through a staging buffer as well.

    file    | header | a a a a | b b b b | c c c c |          b: columns are wanted
    arena   | a a a a |                  | c c c c |          two runs, read in place
    staged                      b b b b -> b'                 whole lines, then copied

Runs
- What is read in place and lies together in the file lies together in memory: a run, which tensors
  are views of. So reads are as large as the disk likes them, whatever size tensors have.
- A run begins in memory at the same place of a page as in the file, and has room for the rest of
  its first and last page: then O_DIRECT needs no copy.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from gds.pages import PAGE_BYTES, page_down, page_up
from gds.safetensors import BITS, TensorInfo
from gds.splits import Part
from kvfs.errors import Invalid

READ_BYTES: Final = 8 << 20
"""Of one read in place: large enough for a disk, and for reads of one file by several threads."""
STAGING_BYTES: Final = 16 << 20
"""Of one thread's staging buffer."""
_READ_NS: Final = 20_000
"""What one more read costs, beside its bytes: measured on NVMe, 16 to 30 µs."""
_BYTES_PER_NS: Final = 2.0


class Strategy(Enum):
    """How columns are read."""

    AUTO = "auto"
    """By their cost."""
    SLICE = "slice"
    """Whole lines are read and cut."""
    STRIDED = "strided"
    """Each piece is read alone."""


class Wanted(NamedTuple):
    """A tensor, or a part of one, of one file."""

    file: int
    tensor: TensorInfo
    part: Part | None = None
    converted: bool = False
    """Its elements become others: it is read through a staging buffer."""


class Run(NamedTuple):
    """A span of a file that lies in memory as it lies there."""

    file: int
    begin: int
    end: int

    @property
    def room(self) -> int:
        """Bytes of memory it needs, whole pages."""
        return page_up(self.end) - page_down(self.begin)

    @property
    def start(self) -> int:
        """Where its first byte lies in that memory."""
        return self.begin - page_down(self.begin)


class Place(NamedTuple):
    """Where a tensor lies that is read in place."""

    run: int
    offset: int
    """Of its first byte, counted from the run's first byte."""


class Lines(NamedTuple):
    """What is wanted of a tensor, as bytes of its file."""

    begin: int
    """The first line's first byte."""
    number: int
    length: int
    """Of a line."""
    first: int
    """The piece's first byte in its line."""
    last: int
    """Behind its last one."""

    @property
    def is_one_span(self) -> bool:
        return self.number == 1 or (self.first == 0 and self.last == self.length)


class InPlace(NamedTuple):
    """Read the bytes [begin, end) of a run's file to where they belong."""

    run: int
    begin: int
    end: int
    tensors: tuple[int, ...]
    """Of which it has bytes."""


class Sliced(NamedTuple):
    """Read whole lines of a tensor into a staging buffer, and copy their pieces from there."""

    tensor: int
    first_line: int
    end_line: int


class Span(NamedTuple):
    """Read the bytes [begin, end) of a file into a staging buffer, and copy them from there: of a
    tensor that is converted, or of a piece that is longer than the buffer."""

    tensor: int
    begin: int
    end: int
    offset: int
    """In the bytes that are wanted of the tensor, as they are in the file."""


class Strided(NamedTuple):
    """Read the piece of each line of a tensor alone."""

    tensor: int
    first_line: int
    end_line: int


Step = InPlace | Sliced | Span | Strided


class LoadPlan(NamedTuple):
    """What to do. Tensors are numbered as they were asked for."""

    wanted: tuple[Wanted, ...]
    lines: tuple[Lines, ...]
    """Of each tensor."""
    runs: tuple[Run, ...]
    places: tuple[Place | None, ...]
    """Of each tensor; None: it has memory of its own."""
    steps: tuple[Step, ...]
    """In the order of the files and of their bytes."""

    def unit(self, tensor: int) -> int:
        """What memory is made for at once: the number of the run that has the tensor, or ~ of the
        tensor's own."""
        place = self.places[tensor]
        return ~tensor if place is None else place.run

    @property
    def read_bytes(self) -> int:
        """That the steps ask the files for."""
        return sum(map(self._bytes_of, self.steps))

    def _bytes_of(self, step: Step) -> int:
        if isinstance(step, InPlace | Span):
            return step.end - step.begin
        lines = self.lines[step.tensor]
        each = lines.length if isinstance(step, Sliced) else lines.last - lines.first
        return (step.end_line - step.first_line) * each


def make_plan(
    wanted: Iterable[Wanted], strategy: Strategy = Strategy.AUTO, run_bytes: int | None = None
) -> LoadPlan:
    """How to read them. `run_bytes`: a run that is longer ends with the tensor in which it becomes
    so; None: runs are as long as they can be. Raises Invalid, where a part begins or ends within a
    byte."""
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
    runs, places = _runs(asked, lines, in_place, run_bytes or math.inf)
    steps: list[tuple[int, int, Step]] = [
        (runs[step.run].file, step.begin, step) for step in _in_place(lines, runs, places, in_place)
    ]
    for at, each in enumerate(asked):
        if alone[at]:
            steps += (
                (each.file, begin, step)
                for begin, step in _steps_alone(at, lines[at], each.converted, strategy)
            )
    steps.sort(key=lambda step: step[:2])
    return LoadPlan(asked, lines, runs, places, tuple(step for _, _, step in steps))


def shape_of(wanted: Wanted) -> tuple[int, ...]:
    """Of what is wanted, in elements."""
    shape = list(wanted.tensor.shape)
    if wanted.part is not None:
        shape[wanted.part.dimension] = wanted.part.end - wanted.part.begin
    return tuple(shape)


def lines_of(wanted: Wanted) -> Lines:
    """Where its bytes lie. Raises Invalid."""
    tensor, part = wanted.tensor, wanted.part
    if part is None or not math.prod(tensor.shape):
        whole = tensor.end - tensor.begin
        return Lines(tensor.begin, 1, whole, 0, whole)
    inner = math.prod(tensor.shape[part.dimension + 1 :]) * BITS[tensor.dtype]
    count = math.prod(tensor.shape[: part.dimension])
    spans = (inner * tensor.shape[part.dimension], inner * part.begin, inner * part.end)
    if any(bits % 8 for bits in spans):
        raise Invalid(
            f"tensor {tensor.name!r}: {tensor.dtype} cannot be cut at {part.begin} and {part.end} "
            f"of dimension {part.dimension}: that is within a byte"
        )
    length, first, last = (bits // 8 for bits in spans)
    if first == last:
        return Lines(tensor.begin, 1, 0, 0, 0)
    return _as_span(Lines(tensor.begin, count, length, first, last))


def _as_span(lines: Lines) -> Lines:
    """As one line that is wanted whole, where the bytes lie together."""
    if not lines.is_one_span:
        return lines
    size = (lines.last - lines.first) * lines.number
    return Lines(lines.begin + lines.first, 1, size, 0, size)


def _runs(
    asked: Sequence[Wanted], lines: Sequence[Lines], in_place: Iterable[int], most: float
) -> tuple[tuple[Run, ...], tuple[Place | None, ...]]:
    runs: list[Run] = []
    places: list[Place | None] = [None] * len(asked)
    for at in in_place:
        file, begin, end = asked[at].file, lines[at].begin, lines[at].begin + lines[at].length
        if not runs or runs[-1][::2] != (file, begin) or begin - runs[-1].begin >= most:
            runs.append(Run(file, begin, end))
        runs[-1] = runs[-1]._replace(end=max(end, runs[-1].end))
        places[at] = Place(len(runs) - 1, begin - runs[-1].begin)
    return tuple(runs), tuple(places)


def _in_place(
    lines: Sequence[Lines],
    runs: Sequence[Run],
    places: Sequence[Place | None],
    in_place: Sequence[int],
) -> Iterable[InPlace]:
    members: list[list[int]] = [[] for _ in runs]
    for at in in_place:
        place = places[at]
        assert place is not None
        members[place.run].append(at)
    for number, run in enumerate(runs):
        yield from _cut(number, run, [(lines[at], at) for at in members[number]])


def _cut(number: int, run: Run, members: Sequence[tuple[Lines, int]]) -> Iterable[InPlace]:
    """Reads of a run: they end at multiples of `READ_BYTES` of the file."""
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


def _steps_alone(
    at: int, lines: Lines, converted: bool, strategy: Strategy
) -> Iterator[tuple[int, Step]]:
    """Steps of a tensor that is not read in place, each with its first byte."""
    kind = Sliced if converted and lines.number > 1 else _kind(lines, strategy)
    one = lines.length if kind is Sliced else lines.last - lines.first
    if one > STAGING_BYTES or (converted and lines.is_one_span):
        yield from _spans(at, lines)
        return
    each = max(1, STAGING_BYTES // one)
    for first in range(0, lines.number, each):
        yield (
            lines.begin + first * lines.length,
            kind(at, first, min(first + each, lines.number)),
        )


def _spans(at: int, lines: Lines) -> Iterator[tuple[int, Step]]:
    piece = lines.last - lines.first
    for line in range(lines.number):
        start = lines.begin + line * lines.length + lines.first
        for first in range(0, piece, STAGING_BYTES):
            end = min(first + STAGING_BYTES, piece)
            yield start + first, Span(at, start + first, start + end, line * piece + first)


def _kind(lines: Lines, strategy: Strategy) -> type[Sliced] | type[Strided]:
    if strategy is Strategy.STRIDED or lines.length > STAGING_BYTES:
        return Strided
    if strategy is Strategy.SLICE:
        return Sliced
    # The disk moves whole pages.
    piece = page_up(lines.last - lines.first + PAGE_BYTES)
    is_cheaper = _READ_NS + piece / _BYTES_PER_NS < lines.length / _BYTES_PER_NS
    return Strided if is_cheaper else Sliced
