"""Plans of loads: carried out on bytes, they give what cutting the tensors themselves gives."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds.format.safetensors import BITS, TensorInfo
from gds.plan.load_plan import (
    READ_BYTES,
    RUN_BYTES,
    STAGING_BYTES,
    InPlace,
    LoadPlan,
    Sliced,
    StagedSpan,
    Strategy,
    Strided,
    WantedTensor,
    make_plan,
)
from gds.plan.pages import PAGE_BYTES
from gds.plan.tensor_parallel import TensorPart
from kvfs.base.errors import Invalid

MIB = 1 << 20


def u8(name: str, shape: tuple[int, ...], begin: int) -> TensorInfo:
    return TensorInfo(name, "U8", shape, begin, begin + math.prod(shape))


def carried_out(plan: LoadPlan, files: list[bytes]) -> list[bytes]:
    """The bytes of each tensor, by a plain reading of what steps and places mean."""
    rooms = [bytearray(run.room) for run in plan.runs]
    alone: list[dict[int, bytes]] = [{} for _ in plan.wanted]
    for step in plan.steps:
        if isinstance(step, InPlace):
            run = plan.runs[step.run]
            at = run.start + step.begin - run.begin
            rooms[step.run][at : at + step.end - step.begin] = files[run.file][
                step.begin : step.end
            ]
            continue
        lines, data = plan.lines[step.tensor], files[plan.wanted[step.tensor].file]
        if isinstance(step, StagedSpan):
            alone[step.tensor][step.offset] = data[step.begin : step.end]
            continue
        for line in range(step.first_line, step.end_line):
            begin = lines.begin + line * lines.length
            alone[step.tensor][line * lines.wanted] = b"".join(
                data[begin + first : begin + last] for first, last in lines.pieces
            )
    found: list[bytes] = []
    for at, of in enumerate(plan.run_of):
        if of is None:
            found.append(b"".join(part for _, part in sorted(alone[at].items())))
        else:
            begin = plan.runs[of].start + plan.offset(at, of)
            found.append(bytes(rooms[of][begin : begin + plan.lines[at].length]))
    return found


def cut(data: bytes, shape: tuple[int, ...], part: TensorPart | None) -> bytes:
    """The part's bytes of a tensor of single bytes, cut from the whole."""
    if part is None:
        return data
    whole = np.frombuffer(data, np.uint8).reshape(shape)
    before = (slice(None),) * part.dimension
    return np.concatenate(
        [whole[*before, slice(0, 0)], *(whole[*before, slice(*span)] for span in part.spans)],
        axis=part.dimension,
    ).tobytes()


class Drawn(NamedTuple):
    files: list[bytes]
    wanted: list[WantedTensor]


@st.composite
def loads(draw: st.DrawFn) -> Drawn:
    files, wanted = [], []
    for file in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, 20))
        content = bytes(at)
        for number in range(draw(st.integers(0, 6))):
            shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
            tensor = u8(f"{file}.{number}", shape, at)
            size = tensor.end - tensor.begin
            content += bytes((each * 7 + number * 31 + file) % 251 for each in range(size))
            at = tensor.end
            if draw(st.booleans()):
                part = None
                if shape:
                    dimension = draw(st.integers(0, len(shape) - 1))
                    bounds = sorted(draw(st.lists(st.integers(0, shape[dimension]), max_size=6)))
                    spans = zip(bounds[::2], bounds[1::2], strict=False)
                    part = TensorPart(dimension, tuple(spans))
                wanted.append(WantedTensor(file, tensor, part, draw(st.booleans())))
        files.append(content)
    return Drawn(files, draw(st.permutations(wanted)))


@given(loads(), st.sampled_from(Strategy), st.sampled_from([1, 20, RUN_BYTES]))
def test_what_is_read_is_what_was_wanted(drawn: Drawn, strategy: Strategy, run_bytes: int) -> None:
    plan = make_plan(drawn.wanted, strategy, run_bytes)
    assert carried_out(plan, drawn.files) == [
        cut(
            drawn.files[each.file][each.tensor.begin : each.tensor.end],
            each.tensor.shape,
            each.part,
        )
        for each in drawn.wanted
    ]


@given(loads(), st.sampled_from(Strategy))
def test_a_tensor_is_whole_when_its_steps_are_done(drawn: Drawn, strategy: Strategy) -> None:
    """Each byte that a tensor has in place is in a step that names it."""
    plan = make_plan(drawn.wanted, strategy)
    for at, of in enumerate(plan.run_of):
        if of is None:
            continue
        begin = plan.runs[of].begin + plan.offset(at, of)
        named = [
            range(step.begin, step.end)
            for step in plan.steps
            if isinstance(step, InPlace) and step.run == of and at in step.tensors
        ]
        assert named
        for byte in range(begin, begin + plan.lines[at].length):
            assert any(byte in span for span in named)


def test_a_whole_file_is_one_run_and_read_in_large_pieces_that_end_together_with_blocks() -> None:
    begin, tensors = 1000, []
    for number in range(100):
        tensors.append(u8(str(number), (MIB // 2 + number,), begin))
        begin = tensors[-1].end
    plan = make_plan(WantedTensor(0, each) for each in tensors)
    assert len(plan.runs) == 1
    assert plan.runs[0].start == 1000
    assert plan.runs[0].room % PAGE_BYTES == 0
    assert [step.end % READ_BYTES for step in plan.steps[:-1] if isinstance(step, InPlace)] == [
        0
    ] * (len(plan.steps) - 1)
    assert plan.read_bytes == begin - 1000


def test_columns_are_read_by_what_costs_less() -> None:
    def kinds(shape: tuple[int, ...], ranks: int, strategy: Strategy = Strategy.AUTO) -> set[type]:
        part = TensorPart(1, ((0, shape[1] // ranks),))
        plan = make_plan([WantedTensor(0, u8("a", shape, 0), part)], strategy)
        return {type(step) for step in plan.steps}

    assert kinds((4096, 8192), 4) == {Sliced}
    assert kinds((64, 1 << 20), 8) == {Strided}
    assert kinds((4096, 8192), 4, Strategy.STRIDED) == {Strided}
    assert kinds((64, 1 << 20), 8, Strategy.SLICE) == {Sliced}
    assert kinds((2, 1 << 30), 64, Strategy.SLICE) == {Strided}
    assert kinds((2, 1 << 30), 2, Strategy.SLICE) == {StagedSpan}


def test_no_step_is_larger_than_its_buffer() -> None:
    for shape, part, converted in [
        ((3, 100 * MIB), TensorPart(1, ((0, 50 * MIB),)), False),
        ((300, MIB), TensorPart(1, ((0, MIB // 2),)), True),
        ((3, 100 * MIB), TensorPart(1, ((0, 50 * MIB),)), True),
        ((300 * MIB,), None, True),
        ((5000, 100_000), TensorPart(1, ((0, 1000),)), False),
    ]:
        plan = make_plan([WantedTensor(0, u8("a", shape, 8), part, converted)])
        for step in plan.steps:
            alone = step if isinstance(step, StagedSpan) else None
            size = alone.end - alone.begin if alone else plan.bytes_of(step)
            assert size <= STAGING_BYTES


def test_what_is_cut_within_a_byte_is_refused() -> None:
    packed = TensorInfo("p", "F4", (4, 6), 0, 4 * 6 * BITS["F4"] // 8)
    with pytest.raises(Invalid, match="within a byte"):
        make_plan([WantedTensor(0, packed, TensorPart(1, ((0, 3),)))])
