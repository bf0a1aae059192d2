"""What ranks have of tensors: compared with putting it together from the heads and halves
themselves."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gds.format.safetensors import BITS, TensorInfo
from gds.plan.architecture import cutting_of, splits_of
from gds.plan.tensor_parallel import (
    TRANSFORMER,
    Cutting,
    Experts,
    Heads,
    Refused,
    Splits,
    Stacked,
    TensorPart,
)
from kvfs.base.errors import Invalid

Array = npt.NDArray[np.int64]
HEAD = 4
COLUMNS = 3


def info(name: str, shape: Sequence[int], dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, dtype, tuple(shape), 0, math.prod(shape) * BITS[dtype] // 8)


def part_of(tensor: TensorInfo, splits: Splits, rank: int, ranks: int) -> TensorPart | None:
    return Cutting(splits, rank, ranks).part(tensor)


def cut(whole: Array, name: str, splits: Splits, rank: int, ranks: int) -> Array:
    """What `part_of` gives the rank, cut by numpy."""
    part = part_of(info(name, whole.shape), splits, rank, ranks)
    if part is None:
        return whole
    pieces = [np.take(whole, range(begin, end), axis=part.dimension) for begin, end in part.spans]
    return np.concatenate(pieces, axis=part.dimension)


def heads(kind: int, number: int) -> list[Array]:
    """Rows of so many heads, no two of them the same."""
    size = HEAD * COLUMNS
    return [
        (np.arange(size) + size * (head + 1000 * kind)).reshape(HEAD, COLUMNS)
        for head in range(number)
    ]


def mine(of: Sequence[Array], rank: int, ranks: int) -> list[Array]:
    """The rank's heads: as many as others have, or the one that it has together with others."""
    if len(of) < ranks:
        return [of[rank * len(of) // ranks]]
    each = len(of) // ranks
    return list(of[rank * each : (rank + 1) * each])


@st.composite
def attentions(draw: st.DrawFn) -> tuple[int, int, int]:
    """Ranks, heads of queries, heads of keys."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    keys = draw(st.sampled_from([ranks, 2 * ranks, *(n for n in (1, 2, 4) if ranks % n == 0)]))
    queries = math.lcm(ranks, keys) * draw(st.integers(1, 3))
    return ranks, queries, keys


def config_of(queries: int, keys: int, **others: Any) -> dict[str, Any]:
    return {
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": HEAD,
        "hidden_size": queries * HEAD,
    } | others


@given(attentions())
def test_heads_are_cut_whole_and_those_of_keys_are_on_several_ranks_where_there_are_fewer(
    drawn: tuple[int, int, int],
) -> None:
    ranks, queries, keys = drawn
    q, k, v = heads(1, queries), heads(2, keys), heads(3, keys)
    splits = splits_of(config_of(queries, keys))
    for rank in range(ranks):
        parts = [mine(q, rank, ranks), mine(k, rank, ranks), mine(v, rank, ranks)]

        def same(name: str, whole: list[Array], part: list[Array], rank: int = rank) -> None:
            found = cut(np.concatenate(whole), f"m.0.self_attn.{name}.weight", splits, rank, ranks)
            assert np.array_equal(found, np.concatenate(part)), name

        same("q_proj", q, parts[0])
        same("k_proj", k, parts[1])
        same("v_proj", v, parts[2])
        same("qkv_proj", q + k + v, [*parts[0], *parts[1], *parts[2]])
        same("W_pack", q + k + v, [*parts[0], *parts[1], *parts[2]])


@given(attentions())
def test_stacks_of_groups_are_cut_by_group(drawn: tuple[int, int, int]) -> None:
    """Each key stands with its own queries; the rank has the same heads as of separate tensors."""
    ranks, queries, keys = drawn
    q, k, v = heads(1, queries), heads(2, keys), heads(3, keys)
    each = queries // keys
    whole = np.concatenate(
        [row for n in range(keys) for row in (*q[n * each : (n + 1) * each], k[n], v[n])]
    )
    splits = splits_of(config_of(queries, keys, model_type="internlm2"))
    for rank in range(ranks):
        qs, ks, vs = mine(q, rank, ranks), mine(k, rank, ranks), mine(v, rank, ranks)
        some = len(qs) // len(ks)
        expected = [
            row for n in range(len(ks)) for row in (*qs[n * some : (n + 1) * some], ks[n], vs[n])
        ]
        found = cut(whole, "model.layers.0.attention.wqkv.weight", splits, rank, ranks)
        assert np.array_equal(found, np.concatenate(expected))


@given(st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_gates_and_what_they_gate_are_cut_apart(ranks: int, each: int) -> None:
    gate, up = (np.arange(ranks * each * 2).reshape(-1, 2) + 1000 * n for n in range(2))
    whole = np.concatenate([gate, up])
    for rank in range(ranks):
        expected = np.concatenate([np.split(gate, ranks)[rank], np.split(up, ranks)[rank]])
        found = cut(whole, "m.0.mlp.gate_up_proj.weight", TRANSFORMER, rank, ranks)
        assert np.array_equal(found, expected)
        turned = cut(whole.T, "x", {"x": Stacked((1, 1), 1)}, rank, ranks)
        assert np.array_equal(turned, expected.T)


MODELS: Mapping[str, tuple[dict[str, Any], dict[str, Callable[[int, int], TensorPart | None]]]] = {
    "gpt_neox": (
        {"num_attention_heads": 4, "hidden_size": 16},
        {
            "gpt_neox.layers.0.attention.query_key_value.weight": lambda r, n: TensorPart(
                0, ((r * 48 // n, (r + 1) * 48 // n),)
            ),
            "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": lambda r, n: TensorPart(
                0, ((r * 48 // n, (r + 1) * 48 // n),)
            ),
            "gpt_neox.layers.0.attention.dense.weight": lambda r, n: TensorPart(
                1, ((r * 16 // n, (r + 1) * 16 // n),)
            ),
            "gpt_neox.layers.0.attention.dense.bias": lambda _r, _n: None,
        },
    ),
    "chatglm": (
        {
            "num_attention_heads": 8,
            "kv_channels": 4,
            "hidden_size": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        {
            "transformer.encoder.layers.0.self_attention.query_key_value.weight": lambda r, n: (
                TensorPart(
                    0,
                    (
                        (r * 32 // n, (r + 1) * 32 // n),
                        (32 + r * 2 // n * 4, 36 + r * 2 // n * 4),
                        (40 + r * 2 // n * 4, 44 + r * 2 // n * 4),
                    ),
                )
            ),
            "transformer.encoder.layers.0.mlp.dense_h_to_4h.weight": lambda r, n: TensorPart(
                0, ((r * 24 // n, (r + 1) * 24 // n), (24 + r * 24 // n, 24 + (r + 1) * 24 // n))
            ),
            "transformer.encoder.layers.0.self_attention.dense.weight": lambda r, n: TensorPart(
                1, ((r * 16 // n, (r + 1) * 16 // n),)
            ),
        },
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_names_mean_what_the_models_kind_means_by_them(kind: str) -> None:
    config, wanted = MODELS[kind]
    splits = splits_of(config | {"model_type": kind})
    for name, part in wanted.items():
        shape = (48, 16)
        for rank in range(4):
            assert part_of(info(name, shape), splits, rank, 4) == part(rank, 4), name


@given(
    st.sampled_from(["awq", "gptq"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(["o_proj", "up_proj", "gate_up_proj"]),
)
def test_packed_weights_multiply_to_the_same(
    method: str, ranks: int, groups: int, module: str
) -> None:
    """A rank's packed weights, unpacked with its scales, are its part of the unpacked weights."""
    size, inputs, outputs = 8, 8 * ranks * groups, 16 * ranks
    rng = np.random.default_rng(ranks)
    codes, scales = (
        rng.integers(0, 16, (inputs, outputs)),
        rng.integers(1, 99, (inputs // size, outputs)),
    )
    along = 0 if method == "gptq" else 1
    whole = unpacked(packed(codes, along), scales, along, size)
    splits = splits_of(
        {"quantization_config": {"quant_method": method, "desc_act": False, "group_size": size}}
    )
    for rank in range(ranks):

        def part(kind: str, tensor: Array, rank: int = rank) -> Array:
            return cut(tensor, f"m.0.{module}.{kind}", splits, rank, ranks)

        found = unpacked(part("qweight", packed(codes, along)), part("scales", scales), along, size)
        rows = "m.down_proj.weight" if module == "o_proj" else f"m.{module}.weight"
        assert np.array_equal(found, cut(whole.T, rows, splits, rank, ranks).T)


def packed(codes: Array, along: int) -> Array:
    """Eight codes in a number."""
    shifts = 4 * np.arange(8)
    if along == 0:
        return np.asarray((codes.reshape(-1, 8, codes.shape[1]) << shifts[:, None]).sum(1))
    return np.asarray((codes.reshape(len(codes), -1, 8) << shifts).sum(2))


def unpacked(numbers: Array, scales: Array, along: int, size: int) -> Array:
    codes = numbers[..., None] >> (4 * np.arange(8)) & 15
    if along == 0:
        codes = codes.transpose(0, 2, 1).reshape(-1, numbers.shape[1])
    else:
        codes = codes.reshape(len(numbers), -1)
    return np.asarray(codes * np.repeat(scales, size, axis=0))


def test_a_permutation_of_inputs_leaves_all_groups_on_all_ranks() -> None:
    splits = splits_of({"quantization_config": {"quant_method": "gptq", "desc_act": True}})
    rows = "m.0.down_proj."
    assert part_of(info(rows + "scales", (8, 8)), splits, 1, 2) is None
    assert part_of(info(rows + "qweight", (8, 8)), splits, 1, 2) == TensorPart(0, ((4, 8),))
    assert part_of(info(rows + "g_idx", (64,)), splits, 1, 2) == TensorPart(0, ((32, 64),))
    assert part_of(info("m.0.up_proj.g_idx", (64,)), splits, 1, 2) is None
    assert part_of(info("m.0.up_proj.scales", (8, 8)), splits, 1, 2) == TensorPart(1, ((4, 8),))


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
        ("model.layers.0.self_attn.q_norm.weight", (8,), 1),
        ("model.layers.0.self_attn.k_proj.k_scale", (), 1),
        ("model.layers.3.block_sparse_moe.gate.weight", (8, 8), 1),
        ("model.layers.0.self_attn.o_proj.bias", (8,), 1),
    ]:
        parts = [part_of(info(name, shape), TRANSFORMER, rank, 4) for rank in range(4)]
        kept = [each for each in parts if each is not None]
        assert len(kept) == (4 if whole == 4 else 0), name
        if kept:
            spans = [span for each in kept for span in each.spans]
            assert [each[0] for each in spans[1:]] == [each[1] for each in spans[:-1]]
            assert (spans[0][0], spans[-1][1]) == (0, shape[kept[0].dimension])


def test_experts_are_dealt_out_where_the_plan_says_so() -> None:
    plan: Splits = {r"\.experts\.(\d+)\.": Experts(8), **TRANSFORMER}
    name = "m.0.mlp.experts.{}.up_proj.weight"
    for rank in range(4):
        parts = [part_of(info(name.format(n), (8, 8)), plan, rank, 4) for n in range(8)]
        assert [n for n, part in enumerate(parts) if part is None] == [2 * rank, 2 * rank + 1]
        assert all(part is None or part.spans == () for part in parts)
    stacked: Splits = {r"\.experts\.\w+$": 0}
    part = part_of(info("m.0.mlp.experts.gate_up_proj", (8, 4, 6)), stacked, 1, 4)
    assert part == TensorPart(0, ((2, 4),))


def test_heads_of_another_size_than_the_config_says_are_cut_as_if_it_said_nothing() -> None:
    splits = splits_of({"text_config": config_of(8, 2)})
    assert part_of(info("m.k_proj.weight", (8, 8)), splits, 3, 4) == TensorPart(0, ((4, 8),))
    assert part_of(info("vision.k_proj.weight", (48, 8)), splits, 3, 4) == TensorPart(
        0, ((36, 48),)
    )
    with pytest.raises(Invalid, match=r"vision.*12 heads of 4"):
        part_of(info("vision.qkv_proj.weight", (80, 8)), splits, 3, 4)


REFUSED: Mapping[str, tuple[str, tuple[int, ...], Splits]] = {
    "divided among 4 ranks": ("m.q_proj.weight", (10, 8), TRANSFORMER),
    "no dimension 1": ("m.down_proj.weight", (8,), TRANSFORMER),
    "6 heads cannot be divided": ("m.q_proj.weight", (24, 8), splits_of(config_of(6, 3))),
    "3 heads cannot be divided": ("m.k_proj.weight", (12, 8), splits_of(config_of(12, 3))),
    "config.json would say which": ("m.qkv_proj.weight", (48, 8), TRANSFORMER),
    "several tensors are stacked": ("m.query_key_value.weight", (48, 8), TRANSFORMER),
    "experts are stacked": ("m.mlp.experts.gate_up_proj", (8, 8, 8), TRANSFORMER),
    "config.json would say how": ("m.down_proj.scales", (8, 8), TRANSFORMER),
    "whether desc_act": (
        "m.down_proj.scales",
        (8, 8),
        splits_of({"quantization_config": {"quant_method": "gptq"}}),
    ),
    "its module is cut": ("m.down_proj.weight_scale", (8, 1), TRANSFORMER),
    "not as 1:1": ("m.gate_up_proj.weight", (7, 8), TRANSFORMER),
    "48 are not 7 heads": ("m.q_proj.weight", (48, 8), {"q_proj": Heads(7)}),
    "'9' is no number of one of 8 experts": ("e.9.w", (8, 8), {r"e\.(\d+)": Experts(8)}),
    "6 experts cannot be divided": ("e.5.w", (8, 8), {r"e\.(\d+)": Experts(6)}),
    "because": ("w", (8, 8), {"w": Refused("because")}),
    "experts are stacked in it": ("m.experts.gate_up_proj.weight", (4, 8, 8), TRANSFORMER),
    "state space": ("m.mixer.in_proj.weight", (8, 8), TRANSFORMER),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(said: str) -> None:
    name, shape, splits = REFUSED[said]
    with pytest.raises(Invalid) as caught:
        part_of(info(name, shape), splits, 1, 4)
    assert said in str(caught.value)
    assert repr(name) in str(caught.value)
    assert part_of(info(name, shape), splits, 0, 1) is None


@pytest.mark.parametrize(
    ("name", "dimension"),
    {
        "layers.0.attention.wq.weight": 0,
        "layers.0.attention.wo.weight": 1,
        "layers.0.feed_forward.w2.weight": 1,
        "tok_embeddings.weight": 0,
        "output.weight": 0,
        "model.layers.0.self_attn.dense.weight": 1,
        "lm_head.bias": 0,
    }.items(),
)
def test_both_halves_of_a_module_are_cut(name: str, dimension: int) -> None:
    """Whatever a family calls them: one half alone would be other weights."""
    shape = (8,) if name.endswith("bias") else (8, 8)
    assert part_of(info(name, shape), TRANSFORMER, 1, 2) == TensorPart(dimension, ((4, 8),))


def test_what_is_added_after_the_sum_all_ranks_have() -> None:
    assert part_of(info("m.self_attn.dense.bias", (8,)), TRANSFORMER, 1, 2) is None


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid, match="rank 4"):
        part_of(info("w", (8,)), {}, 4, 4)


@pytest.mark.parametrize("config", [None, {}, {"num_attention_heads": "8"}, {"head_dim": 8}])
def test_what_says_nothing_of_heads_leaves_names_alone(config: dict[str, Any] | None) -> None:
    assert splits_of(config) == TRANSFORMER


WORDS = [
    "model",
    "layers",
    "h",
    "experts",
    "block_sparse_moe",
    "self_attn",
    "mlp",
    "q_proj",
    "k_proj",
    "o_proj",
    "qkv_proj",
    "w1",
    "w2",
    "wqkv",
    "fc1",
    "fc2",
    "down_proj",
    "gate_up_proj",
    "gate_up_proj_1",
    "in_proj_qkv",
    "dense",
    "dense_h_to_4h",
    "attention",
    "attention_2",
    "embed_tokens",
    "output",
    "norm",
    "query_key_value",
    "weight",
    "bias",
    "scales",
    "qzeros",
    "g_idx",
    "0",
    "7",
    "12",
    "128",
    "1b",
    "b1",
]
SOME = st.lists(st.sampled_from(WORDS), max_size=3)
CONFIGS: list[dict[str, Any] | None] = [
    None,
    config_of(8, 2),
    config_of(8, 4, model_type="internlm2"),
    config_of(8, 4, model_type="chatglm"),
    config_of(8, 1, model_type="falcon"),
    config_of(8, 8, model_type="bloom"),
    {**config_of(8, 2), "quantization_config": {"quant_method": "awq", "group_size": 128}},
]


@given(SOME, st.sampled_from(["weight", "bias", "scales", "g_idx"]), st.sampled_from(CONFIGS))
def test_numbers_in_names_mean_nothing_to_what_a_config_says(
    before: list[str], last: str, config: dict[str, Any] | None
) -> None:
    """So what was found for one layer holds for the others; also what is refused, and the name
    by which it is."""
    cutting = cutting_of(config, 1, 4)
    for word in WORDS:
        for shape in [(48, 8), (8,), (6, 6)]:
            tensor = info(".".join([*before, word, last]), shape)
            assert outcome(cutting, tensor) == outcome(Cutting(splits_of(config), 1, 4), tensor)


def outcome(cutting: Cutting, tensor: TensorInfo) -> TensorPart | str | None:
    try:
        return cutting.part(tensor)
    except Invalid as refusal:
        return str(refusal)
