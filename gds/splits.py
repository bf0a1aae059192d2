"""Which part of each tensor a tensor-parallel rank has. Pure.

As Megatron-LM splits a transformer: what makes heads or hidden units is cut along its first
dimension (rows), what takes them in along its second (columns), tables of tokens along the tokens;
norms and biases of the second kind are on every rank.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from gds.safetensors import TensorInfo
from kvfs.errors import Invalid

FUSED: Final = -1
"""Instead of a dimension: several tensors stacked in one, of each of which a rank has a part. They
are refused: one contiguous part would be other weights."""
Splits = Mapping[str, int | None]
"""Dimension to cut along, None for tensors that all ranks have, by a regular expression that is
searched in the tensor's name; the first that is found counts. What none names, all ranks have."""

TRANSFORMER: Final[Splits] = {
    r"\b((q|k|v|gate|up)_proj|w1|w3|fc1)\.(weight|bias)$": 0,
    r"\b((o|out|down)_proj|w2|fc2)\.weight$": 1,
    r"\b(embed_tokens|lm_head|wte)\.weight$": 0,
    r"\b(qkv|gate_up)(_proj)?\.(weight|bias)$": FUSED,
}
"""Names as Llama, Qwen, Mistral, Mixtral and OPT have them."""


class Part(NamedTuple):
    """The elements [begin, end) along one dimension of a tensor."""

    dimension: int
    begin: int
    end: int


def part_of(tensor: TensorInfo, splits: Splits, rank: int, ranks: int) -> Part | None:
    """What the rank has of the tensor; None: all of it. Raises Invalid."""
    if not 0 <= rank < ranks:
        raise Invalid(f"rank {rank} is none of {ranks} ranks, which count from 0")
    dimension = _dimension(tensor, splits) if ranks > 1 else None
    if dimension is None:
        return None
    if dimension == FUSED:
        raise Invalid(
            f"tensor {tensor.name!r} has several tensors stacked in one, which are not cut yet: "
            "load it whole, with ranks of 1, or name another dimension for it in the plan"
        )
    if not 0 <= dimension < len(tensor.shape):
        raise Invalid(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} has no dimension {dimension}"
        )
    each, rest = divmod(tensor.shape[dimension], ranks)
    if rest:
        raise Invalid(
            f"tensor {tensor.name!r}: {tensor.shape[dimension]} along dimension {dimension} "
            f"cannot be divided among {ranks} ranks"
        )
    return Part(dimension, rank * each, (rank + 1) * each)


def _dimension(tensor: TensorInfo, splits: Splits) -> int | None:
    for pattern, dimension in splits.items():
        if re.search(pattern, tensor.name):
            return dimension
    return None
