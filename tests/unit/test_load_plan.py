"""Plans of loads: carried out on bytes, they give what cutting the tensors themselves gives."""

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds.load_plan import (
    READ_BYTES,
    STAGING_BYTES,
    InPlace,
    LoadPlan,
    Sliced,
    Span,
    Strategy,
    Strided,
    Wanted,
    make_plan,
)
from gds.pages import PAGE_BYTES
from gds.safetensors import BITS, TensorInfo
from gds.splits import TRANSFORMER, Part, part_of
from kvfs.errors import Invalid

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
        piece = lines.last - lines.first
        if isinstance(step, Span):
            alone[step.tensor][step.offset] = data[step.begin : step.end]
            continue
        for line in range(step.first_line, step.end_line):
            begin = lines.begin + line * lines.length + lines.first
            alone[step.tensor][line * piece] = data[begin : begin + piece]
    found = []
    for at, place in enumerate(plan.places):
        if place is None:
            found.append(b"".join(part for _, part in sorted(alone[at].items())))
        else:
            begin = plan.runs[place.run].start + place.offset
            found.append(bytes(rooms[place.run][begin : begin + plan.lines[at].length]))
    return found


def cut(data: bytes, shape: tuple[int, ...], part: Part | None) -> bytes:
    """The part's bytes of a tensor of single bytes, element by element."""
    if part is None:
        return data
    inner = math.prod(shape[part.dimension + 1 :])
    size = shape[part.dimension]
    return bytes(
        byte for at, byte in enumerate(data) if part.begin <= at // inner % size < part.end
    )


class Drawn(NamedTuple):
    files: list[bytes]
    wanted: list[Wanted]


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
                    bounds = draw(
                        st.lists(st.integers(0, shape[dimension]), min_size=2, max_size=2)
                    )
                    part = Part(dimension, min(bounds), max(bounds))
                wanted.append(Wanted(file, tensor, part, draw(st.booleans())))
        files.append(content)
    return Drawn(files, draw(st.permutations(wanted)))


@given(loads(), st.sampled_from(Strategy), st.sampled_from([None, 1, 20]))
def test_what_is_read_is_what_was_wanted(
    drawn: Drawn, strategy: Strategy, run_bytes: int | None
) -> None:
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
    for at, place in enumerate(plan.places):
        if place is None:
            continue
        begin = plan.runs[place.run].begin + place.offset
        named = [
            range(step.begin, step.end)
            for step in plan.steps
            if isinstance(step, InPlace) and step.run == place.run and at in step.tensors
        ]
        assert named
        for byte in range(begin, begin + plan.lines[at].length):
            assert any(byte in span for span in named)


def test_a_whole_file_is_one_run_and_read_in_large_pieces_that_end_together_with_blocks() -> None:
    begin, tensors = 1000, []
    for number in range(100):
        tensors.append(u8(str(number), (MIB // 2 + number,), begin))
        begin = tensors[-1].end
    plan = make_plan(Wanted(0, each) for each in tensors)
    assert len(plan.runs) == 1
    assert plan.runs[0].start == 1000
    assert plan.runs[0].room % PAGE_BYTES == 0
    assert [step.end % READ_BYTES for step in plan.steps[:-1] if isinstance(step, InPlace)] == [
        0
    ] * (len(plan.steps) - 1)
    assert plan.read_bytes == begin - 1000


def test_columns_are_read_by_what_costs_less() -> None:
    def kinds(shape: tuple[int, ...], ranks: int, strategy: Strategy = Strategy.AUTO) -> set[type]:
        part = Part(1, 0, shape[1] // ranks)
        plan = make_plan([Wanted(0, u8("a", shape, 0), part)], strategy)
        return {type(step) for step in plan.steps}

    assert kinds((4096, 8192), 4) == {Sliced}
    assert kinds((64, 1 << 20), 8) == {Strided}
    assert kinds((4096, 8192), 4, Strategy.STRIDED) == {Strided}
    assert kinds((64, 1 << 20), 8, Strategy.SLICE) == {Sliced}
    assert kinds((2, 1 << 30), 64, Strategy.SLICE) == {Strided}
    assert kinds((2, 1 << 30), 2, Strategy.SLICE) == {Span}


def test_no_step_is_larger_than_its_buffer() -> None:
    for shape, part, converted in [
        ((3, 100 * MIB), Part(1, 0, 50 * MIB), False),
        ((300, MIB), Part(1, 0, MIB // 2), True),
        ((3, 100 * MIB), Part(1, 0, 50 * MIB), True),
        ((300 * MIB,), None, True),
        ((5000, 100_000), Part(1, 0, 1000), False),
    ]:
        plan = make_plan([Wanted(0, u8("a", shape, 8), part, converted)])
        for step in plan.steps:
            alone = step if isinstance(step, Span) else None
            size = alone.end - alone.begin if alone else plan._bytes_of(step)
            assert size <= STAGING_BYTES


def test_ranks_of_a_transformer_have_all_of_it() -> None:
    for name, shape, whole in [
        ("model.layers.0.self_attn.q_proj.weight", (16, 8), 4),
        ("model.layers.0.self_attn.o_proj.weight", (16, 8), 4),
        ("model.layers.0.mlp.down_proj.weight", (8, 12), 4),
        ("model.layers.0.mlp.gate_proj.weight", (12, 8), 4),
        ("model.layers.0.self_attn.q_proj.bias", (16,), 4),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight", (8, 12), 4),
        ("model.embed_tokens.weight", (32, 8), 4),
        ("model.layers.0.input_layernorm.weight", (8,), 1),
        ("model.layers.3.block_sparse_moe.gate.weight", (8, 8), 1),
        ("model.layers.0.self_attn.o_proj.bias", (8,), 1),
    ]:
        tensor = u8(name, shape, 0)
        parts = [part_of(tensor, TRANSFORMER, rank, 4) for rank in range(4)]
        kept = [each for each in parts if each is not None]
        assert len(kept) == (4 if whole == 4 else 0), name
        if kept:
            assert [each.begin for each in kept[1:]] == [each.end for each in kept[:-1]]
            assert (kept[0].begin, kept[-1].end) == (0, shape[kept[0].dimension])


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    uneven = u8("model.layers.0.self_attn.q_proj.weight", (10, 8), 0)
    with pytest.raises(Invalid, match=r"q_proj.*divided among 4"):
        part_of(uneven, TRANSFORMER, 0, 4)
    with pytest.raises(Invalid, match="no dimension 1"):
        part_of(u8("x.down_proj.weight", (8,), 0), TRANSFORMER, 0, 2)
    with pytest.raises(Invalid, match="rank 4"):
        part_of(uneven, {}, 4, 4)
    for name in ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"):
        with pytest.raises(Invalid, match="stacked"):
            part_of(u8(f"model.layers.0.{name}", (12, 8), 0), TRANSFORMER, 0, 2)
    packed = TensorInfo("p", "F4", (4, 6), 0, 4 * 6 * BITS["F4"] // 8)
    with pytest.raises(Invalid, match="within a byte"):
        make_plan([Wanted(0, packed, Part(1, 0, 3))])
