"""vLLM's load format `kvfs`, in vLLM's own code: the plugin is found, the loader made, a model of
vLLM's kind gets its weights.

    python vllm_example.py DIRECTORY [--ranks N --rank R --meet FILE]

Runs on a CPU, with vLLM's sources and without its kernels: no request is served. With a GPU and an
installed vLLM it is `vllm serve /mnt/kvfs/models/llama --load-format kvfs`. Ends with 0 when every
parameter has what the checkpoint has.
"""

import argparse
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import BaseModelLoader, get_model_loader
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.plugins import load_general_plugins

from gds.vllm.load_format import KvfsModelLoader

logging.disable(logging.WARNING)
HIDDEN, LAYERS = 256, 4


class Model(torch.nn.Module):
    """As vLLM's are: it takes its weights with vLLM's own helper."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def load_weights(self, weights: Any) -> set[str]:
        found: set[str] = AutoWeightsLoader(self).load_weights(weights)
        return found


def save(directory: Path) -> None:
    """Two shards, as such a model would have them."""
    torch.manual_seed(1)
    tensors = {name: torch.randn_like(value) for name, value in Model().state_dict().items()}
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: tensors[name] for name in part}, directory / f"{number}.safetensors")


def check_interface(loader: Any) -> None:
    """That what vLLM asks of a loader is there, and takes what vLLM gives."""
    assert type(loader) is KvfsModelLoader
    asked = BaseModelLoader.__abstractmethods__
    assert asked == {"download_model", "load_weights"}, asked
    for name in asked:
        ours = inspect.signature(getattr(KvfsModelLoader, name))
        theirs = inspect.signature(getattr(BaseModelLoader, name))
        assert list(ours.parameters) == list(theirs.parameters), name


def load(directory: Path) -> None:
    load_general_plugins()
    loader = get_model_loader(LoadConfig(load_format="kvfs"))
    check_interface(loader)
    config: Any = SimpleNamespace(model=str(directory), model_weights="", revision=None)
    loader.download_model(config)
    model = Model()
    loader.load_weights(model, config)
    wanted: dict[str, torch.Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        wanted |= load_file(shard)
    assert set(wanted) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def refuse(directory: Path) -> None:
    """What makes no sense is said as vLLM's own loaders say it."""
    try:
        get_model_loader(LoadConfig(load_format="kvfs", model_loader_extra_config={"x": 1}))
        raise AssertionError("a setting that there is not was taken")
    except ValueError as error:
        assert "x" in str(error)
    loader = get_model_loader(LoadConfig(load_format="kvfs"))
    try:
        loader.download_model(SimpleNamespace(model=str(directory / "none")))
        raise AssertionError("a directory that there is not was taken")
    except ValueError as error:
        assert "no directory" in str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM's load format kvfs.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meet", help="a file that all ranks name and that is not there yet")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.ranks > 1:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{options.meet}",
            rank=options.rank,
            world_size=options.ranks,
        )
    if options.rank == 0:
        save(options.directory)
    if options.ranks > 1:
        torch.distributed.barrier()
    load(options.directory)
    refuse(options.directory)
    print("the model has its weights")


if __name__ == "__main__":
    main()
