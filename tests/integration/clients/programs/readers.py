"""A safetensors checkpoint on a mount, read by other loaders, and by gds, and compared.

    python readers.py DIRECTORY

safetensors, fastsafetensors without GPUDirect, and Run:ai's streamer, each as its own documentation
has it, on a CPU. Ends with 0 when every tensor came to each of them bit for bit.
"""

import argparse
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")

import safetensors.torch
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
from runai_model_streamer import SafetensorsStreamer

import gds

Tensors = dict[str, torch.Tensor]


def make() -> Tensors:
    torch.manual_seed(1)
    tensors = {f"layers.{n}.weight": torch.randn(1024, 777).bfloat16() for n in range(8)}
    tensors |= {f"layers.{n}.norm": torch.rand(1001 + n) for n in range(8)}
    return tensors | {"table": torch.randint(-128, 127, (777, 33), dtype=torch.int8)}


def with_safetensors(path: Path) -> Tensors:
    found: Tensors = safetensors.torch.load_file(path)
    return found


def with_fastsafetensors(path: Path) -> Tensors:
    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    try:
        return {name: buffers.get_tensor(name).clone() for name in loader.get_keys()}
    finally:
        buffers.close()
        loader.close()


def with_streamer(path: Path) -> Tensors:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


READERS: dict[str, Callable[[Path], Tensors]] = {
    "safetensors": with_safetensors,
    "fastsafetensors": with_fastsafetensors,
    "runai-model-streamer": with_streamer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A checkpoint, by several readers.")
    parser.add_argument("directory", type=Path)
    path = parser.parse_args().directory / "model.safetensors"
    wanted = make()
    safetensors.torch.save_file(wanted, path)
    for name, read in (*READERS.items(), ("gds", gds.load_file)):
        found = read(path)
        assert set(found) == set(wanted), name
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), f"{name}: {key} came back changed"
        version = "" if name == "gds" else importlib.metadata.version(name)
        print(f"{name} {version}: {len(found)} tensors, bit for bit")


if __name__ == "__main__":
    main()
