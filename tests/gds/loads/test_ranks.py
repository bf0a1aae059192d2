"""Loads of one rank of several: what is stacked, heads fewer than ranks, experts."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import gds
from gds.io import co_readers
from gds.io.page_cache import cached_bytes
from gds.plan.tensor_parallel import Experts, Heads, Stacked
from kvfs.base.errors import Corrupt, Invalid
from tests.gds import children
from tests.gds.checkpoints import Meant, llama, meant, raw, write
from tests.gds.cold import make_cold

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch

HIDDEN, HEAD, QUERIES, KEYS = 512, 64, 8, 2
CONFIG = {"hidden_size": HIDDEN, "num_attention_heads": QUERIES, "num_key_value_heads": KEYS}


def phi(layers: int) -> dict[str, Meant]:
    """Layers as Phi stacks them; values that bfloat16 and float32 both have."""
    import torch

    shapes = {
        "self_attn.qkv_proj": ((QUERIES + 2 * KEYS) * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_up_proj": (6 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 3 * HIDDEN),
        "input_layernorm": (HIDDEN,),
    }
    return {
        f"model.layers.{layer}.{kind}.weight": Meant(
            "BF16", shape, raw(torch.randn(shape).to(torch.bfloat16))
        )
        for layer in range(layers)
        for kind, shape in shapes.items()
    }


def part(name: str, whole: "torch.Tensor", rank: int, ranks: int) -> "torch.Tensor":
    """What the rank is to have, from the whole tensor."""
    import torch

    if "qkv" in name:
        q, k, v = whole.split([QUERIES * HEAD, KEYS * HEAD, KEYS * HEAD])
        key = rank * KEYS // ranks
        keys = slice(key * HEAD, (key + max(1, KEYS // ranks)) * HEAD)
        return torch.cat([q.chunk(ranks)[rank], k[keys], v[keys]])
    if "gate_up" in name:
        gate, up = whole.chunk(2)
        return torch.cat([gate.chunk(ranks)[rank], up.chunk(ranks)[rank]])
    if "norm" in name:
        return whole
    return whole.chunk(ranks, 1)[rank]


@pytest.mark.parametrize("strategy", ["auto", "slice", "strided"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_of_stacked_tensors_ranks_have_their_part_of_each(
    where: Path, strategy: str, ranks: int
) -> None:
    import torch

    import gds

    write(where / "a.safetensors", phi(2))
    (where / "config.json").write_text(json.dumps(CONFIG))
    whole = gds.load_model(where)
    for dtype in (None, torch.float32):
        for rank in range(ranks):
            found = gds.load_model(
                where, rank=rank, world_size=ranks, strategy=strategy, dtype=dtype
            )
            for name, tensor in whole.items():
                expected = part(name, tensor, rank, ranks).to(dtype or torch.bfloat16)
                assert torch.equal(found[name], expected), name


def test_a_stack_in_columns_is_cut_by_the_callers_plan(where: Path) -> None:
    """As experts stacked in one tensor have them: [expert, input, gate and up]."""
    import torch

    import gds
    from gds.plan.tensor_parallel import Stacked

    write(where / "a.safetensors", {"experts.gate_up_proj": meant("I16", (3, 40, 96), 1)})
    whole = gds.load_model(where)["experts.gate_up_proj"]
    for strategy in ("slice", "strided"):
        for rank in range(4):
            (found,) = gds.load_model(
                where,
                rank=rank,
                world_size=4,
                plan={"gate_up": Stacked((48, 48), 2)},
                strategy=strategy,
            ).values()
            halves = [half.chunk(4, 2)[rank] for half in whole.chunk(2, 2)]
            assert torch.equal(found, torch.cat(halves, 2))


def test_experts_of_others_are_not_loaded(where: Path) -> None:
    import gds
    from gds.plan.tensor_parallel import Experts

    tensors = {f"experts.{n}.w": meant("U8", (8, 8), n) for n in range(8)}
    write(where / "a.safetensors", tensors | {"router": meant("U8", (8,), 9)})
    found = gds.load_model(where, rank=1, world_size=4, plan={r"experts\.(\d+)\.": Experts(8)})
    assert set(found) == {"experts.2.w", "experts.3.w", "router"}
    assert raw(found["experts.3.w"]) == tensors["experts.3.w"].data


CONFIGS: Mapping[str, tuple[str | None, type[Exception], str]] = {
    "none": (None, Invalid, "qkv_proj.*config.json"),
    "other heads": (json.dumps(CONFIG | {"head_dim": 32}), Invalid, "qkv_proj.*heads of 32"),
    "no object": ("[]", Corrupt, "config.json: no JSON object"),
    "torn": ("{", Corrupt, "config.json: no JSON"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_cannot_be_cut_is_refused_and_the_whole_is_loaded(where: Path, kind: str) -> None:
    import gds

    text, error, said = CONFIGS[kind]
    tensors = phi(1)
    write(where / "a.safetensors", tensors)
    if text is not None:
        (where / "config.json").write_text(text)
    with pytest.raises(error, match=said):
        gds.load_model(where, rank=0, world_size=2)
    whole: dict[str, Any] = gds.load_model(where)
    assert {name: raw(tensor) for name, tensor in whole.items()} == {
        name: each.data for name, each in tensors.items()
    }


_RANK: Final = """
import gds
def read_bytes():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
plan = {} if sys.argv[4:] == ["whole"] else None
gds.load_model(sys.argv[3], rank=int(sys.argv[2]), world_size=4)  # the libraries themselves
before = read_bytes()
gds.load_model(sys.argv[1], rank=int(sys.argv[2]), world_size=4, plan=plan)
print(read_bytes() - before)
"""


_SERVER: Final = """
import gds
def read_bytes():
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
gds.load_model(sys.argv[2])  # the libraries themselves
before = read_bytes()
gds.load_model(sys.argv[1])
print(read_bytes() - before)
"""


def test_ranks_of_one_host_read_each_byte_from_the_disk_once(tmp_path: Path) -> None:
    path, small = tmp_path / "a.safetensors", tmp_path / "small.safetensors"
    write(path, llama(2, 1024))
    write(small, llama(1, 256))
    fd = make_cold(path)
    try:
        co_readers.join(fd)  # so that the first of them is not alone before the others come
        with ThreadPoolExecutor(4) as threads:
            read = list(
                threads.map(lambda rank: int(children.run(_RANK, path, rank, small)), range(4))
            )
    finally:
        os.close(fd)
    if not sum(read):
        pytest.skip(f"{tmp_path} is on no disk that counts what is read")
    assert sum(read) <= 1.05 * path.stat().st_size


def test_servers_that_load_one_model_at_a_time_read_it_from_the_disk_once(tmp_path: Path) -> None:
    path, small = tmp_path / "a.safetensors", tmp_path / "small.safetensors"
    write(path, {"m.down_proj.weight": meant("U8", (4096, 12 * 1024), 1)})
    write(small, llama(1, 256))
    fd = make_cold(path)
    try:
        co_readers.join(fd)  # so that the first of them is not alone before the others come
        with ThreadPoolExecutor(3) as threads:
            read = list(threads.map(lambda _: int(children.run(_SERVER, path, small)), range(3)))
    finally:
        os.close(fd)
    if not sum(read):
        pytest.skip(f"{tmp_path} is on no disk that counts what is read")
    assert sum(read) <= 1.05 * path.stat().st_size


def test_ranks_that_read_all_one_after_the_other_read_it_from_the_disk_once(tmp_path: Path) -> None:
    path, small = tmp_path / "a.safetensors", tmp_path / "small.safetensors"
    write(path, {"m.down_proj.weight": meant("U8", (4096, 12 * 1024), 1)})
    write(small, llama(1, 256))
    fd = make_cold(path)  # while it is open the kernel does not drop it as one of many inodes
    read = [int(children.run(_RANK, path, rank, small, "whole")) for rank in range(4)]
    os.close(fd)
    if not sum(read):
        pytest.skip(f"{tmp_path} is on no disk that counts what is read")
    assert sum(read) <= 1.05 * path.stat().st_size


def test_a_rank_alone_leaves_the_page_cache_to_others(tmp_path: Path) -> None:
    import gds

    path = tmp_path / "a.safetensors"
    # One large tensor: small reads are buffered anyway, and the kernel reads ahead of them.
    write(path, {"m.q_proj.weight": meant("U8", (4096, 12 * 1024), 1)})
    fd = make_cold(path)
    try:
        gds.load_model(path, rank=0, world_size=4)
        cached = cached_bytes(fd, 0, 0)
        assert cached is not None
        assert cached < path.stat().st_size / 8
        co_readers.join(fd)
        gds.load_model(path, rank=2, world_size=4)
        assert (cached_bytes(fd, 0, 0) or 0) > path.stat().st_size / 5
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (Heads(), "numbers of heads"),
        (Heads(queries=4, grouped=True), "of queries and of keys"),
        (Heads(queries=4, size=0), "a size"),
        (Stacked((0, 0)), "sizes"),
        (Stacked((3, -1)), "sizes"),
        (Stacked(()), "sizes"),
        (Experts(0), "number of experts"),
        ("0", "dimension"),
        (-1, "dimension"),
        (True, "dimension"),
    ],
)
def test_a_plan_that_is_none_is_refused_by_pattern(tmp_path: Path, cut: Any, said: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"t": meant("BF16", (4, 4), 1)})
    with pytest.raises(Invalid, match=f"'t\\$'.*{said}"):
        gds.load_model(path, rank=0, world_size=2, plan={"t$": cut})


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"plan": {"(": 0}}, "no regular expression"),
        ({"plan": [("t", 0)]}, "a mapping"),
        ({"strategy": "x"}, "auto, slice, strided"),
        ({"dtype": "float16"}, "torch.bfloat16"),
        ({"dtype": "int8"}, "one of torch's"),
        ({"device": None}, "no device"),
        ({"rank": "0"}, "rank '0': a whole number"),
        ({"rank": 0.5}, r"rank 0\.5: a whole number"),
        ({"world_size": None}, "world_size None: a whole number"),
        ({"paths": 3}, "3 is no path"),
        ({"paths": [None]}, "None is no path"),
        ({"device": 1.5}, "no device"),
    ],
)
def test_arguments_that_are_none_are_refused(
    tmp_path: Path, kwargs: dict[str, Any], said: str
) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"t": meant("BF16", (4, 4), 1)})
    with pytest.raises(Invalid, match=said):
        gds.load_model(**{"paths": path, **kwargs})


@pytest.mark.parametrize("name", ["int8", "bool", "complex64", "float4_e2m1fn_x2"])
def test_weights_do_not_become_what_has_no_fractions(tmp_path: Path, name: str) -> None:
    import torch

    path = tmp_path / "a.safetensors"
    write(path, {"t": meant("BF16", (4, 4), 1)})
    with pytest.raises(Invalid, match=name):
        gds.load_model(path, dtype=getattr(torch, name))
