"""A checkpoint on KVFS, read by SGLang's own loaders, format by format, and compared.

    python sglang_weights.py DIRECTORY [URL]

URL: of the same directory as Run:ai's streamer takes it, s3://BUCKET/... with the AWS settings.
Runs on a CPU: what is read are the weights that a loader gives to a model; to make one of SGLang's
models takes its kernels. Not among them: `fastsafetensors`, whose tensors SGLang wants on cuda:0,
and `instanttensor`, which is for GPUs; both need an NVIDIA GPU. Ends with 0 when every tensor came
by every loader bit for bit.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import sglang_stand_ins  # noqa: F401  (before SGLang)
import torch
from safetensors.torch import save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import get_model_loader
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

Tensors = dict[str, torch.Tensor]
Settings = dict[str, object]

ONE_THREAD: Settings = {"enable_multithread_load": False}
FORMATS: list[tuple[str, str, str, Settings, Settings]] = [
    ("threads and mmap", "safetensors", "auto", {}, {}),
    ("one thread and mmap", "safetensors", "safetensors", ONE_THREAD, {}),
    ("read()", "safetensors", "safetensors", {}, {"weight_loader_disable_mmap": True}),
    (
        "read ahead, and dropped from the page cache",
        "safetensors",
        "safetensors",
        {},
        {"weight_loader_prefetch_checkpoints": True, "weight_loader_drop_cache_after_load": True},
    ),
    ("Run:ai's streamer", "safetensors", "runai_streamer", {}, {}),
    ("torch.load", "torch", "pt", {}, {}),
    ("copies that numpy makes beside it", "numpy", "npcache", {}, {}),
]
"""What it is, the directory, --load-format, --model-loader-extra-config, more of the server's
settings."""


def make() -> Tensors:
    torch.manual_seed(1)
    tensors = {f"layers.{n}.weight": torch.randn(1024, 777).bfloat16() for n in range(8)}
    tensors |= {f"layers.{n}.norm": torch.rand(1001 + n) for n in range(8)}
    return tensors | {"table": torch.randint(-128, 127, (777, 33), dtype=torch.int8)}


def save(directory: Path, tensors: Tensors) -> dict[str, Tensors]:
    """Three shards with their index, and what torch saves. What is in each directory."""
    shards = {name: f"model-{n % 3}.safetensors" for n, name in enumerate(sorted(tensors))}
    for shard in set(shards.values()):
        part = {name: tensors[name] for name, where in shards.items() if where == shard}
        save_file(part, new(directory / "safetensors") / shard)
    index = directory / "safetensors" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    torch.save(tensors, new(directory / "torch") / "model.pt")
    known = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.bfloat16}
    torch.save(known, new(directory / "numpy") / "pytorch_model.bin")
    return {"safetensors": tensors, "torch": tensors, "numpy": known}


def new(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def read(where: str, how: str, extra: Settings, server: Settings) -> Tensors:
    get_context().set_server_args(ServerArgs(model_path=where, device="cpu", **server))
    loader: Any = get_model_loader(LoadConfig(load_format=how, model_loader_extra_config=extra))
    loader.target_device_str = "cpu"  # as the streamer's has it from load_model
    source = loader.Source(where, None, fall_back_to_pt=False)
    # A copy: some give views of what they read into next.
    return {name: tensor.clone() for name, tensor in loader._get_weights_iterator(source)}


def compare(what: str, found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted), what
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{what}: {name} came back changed"
    print(f"{what}: {len(found)} tensors, bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description="SGLang's loaders on KVFS.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("url", nargs="?")
    options = parser.parse_args()
    saved = save(options.directory, make())
    for what, where, how, extra, server in FORMATS:
        compare(what, read(f"{options.directory}/{where}", how, extra, server), saved[where])
    if options.url:
        found = read(f"{options.url}/safetensors", "runai_streamer", {}, {})
        compare("S3", found, saved["safetensors"])


if __name__ == "__main__":
    main()
