"""Makes safetensors checkpoints byte by byte, so that what is read is compared with what was meant
and not with another reader's opinion."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gds.format.safetensors import BITS

if TYPE_CHECKING:
    import torch


class Meant(NamedTuple):
    """What a tensor is to be."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def meant(dtype: str, shape: Sequence[int], seed: int) -> Meant:
    """Random bytes, but for BOOL."""
    size = math.prod(shape) * BITS[dtype] // 8
    data = random.Random(seed).randbytes(size)
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return Meant(dtype, tuple(shape), data)


def write(path: Path, tensors: Mapping[str, Meant], padding: int = 0) -> None:
    """A file of them, in their order; the header ends in as many spaces."""
    entries, at = {}, 0
    for name, each in tensors.items():
        end = at + len(each.data)
        entries[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode() + b" " * padding
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for each in tensors.values():
            file.write(each.data)


def write_shards(directory: Path, shards: Sequence[Mapping[str, Meant]]) -> None:
    """A checkpoint of several files, with its index."""
    weights: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(directory / name, tensors)
        weights |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": weights}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def llama(layers: int, hidden: int, first: int = 0) -> dict[str, Meant]:
    """Layers as Llama has them, in small."""
    found: dict[str, Meant] = {}
    for layer in range(first, first + layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 4, hidden),
            "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (3 * hidden, hidden),
            "mlp.up_proj": (3 * hidden, hidden),
            "mlp.down_proj": (hidden, 3 * hidden),
            "input_layernorm": (hidden,),
        }
        for kind, shape in shapes.items():
            name = f"model.layers.{layer}.{kind}.weight"
            found[name] = meant("BF16", shape, len(found) + 1000 * layer)
    return found


def raw(tensor: "torch.Tensor") -> bytes:
    import torch

    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, Any], wanted: dict[str, Meant]) -> None:
    assert set(found) == set(wanted)
    for name, each in wanted.items():
        assert raw(found[name]) == each.data, name
