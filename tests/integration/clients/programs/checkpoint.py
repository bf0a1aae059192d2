"""Saves a safetensors checkpoint to a directory and loads it in every way that loaders use.

    python checkpoint.py DIRECTORY [--megabytes N]

Runs in the environment that has torch and safetensors. Ends with 0 when each way gave every tensor
back bit for bit.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

MIB = 1 << 20


def make(megabytes: int) -> dict[str, torch.Tensor]:
    """A checkpoint in small: layers of bfloat16, norms of float32, an int8 table, a scalar."""
    torch.manual_seed(1)
    rows = 1024
    layers = max(megabytes // 8, 1)
    tensors = {
        f"layers.{n}.weight": torch.randn(4 * rows, 1024).to(torch.bfloat16) for n in range(layers)
    }
    tensors |= {f"layers.{n}.norm": torch.rand(1000 + n) for n in range(layers)}
    tensors["table"] = torch.randint(-128, 127, (777, 33), dtype=torch.int8)
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0, 4)
    return tensors


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        if t.numel()
        else ""
        for name, t in tensors.items()
    }


def by_slices(path: Path) -> dict[str, torch.Tensor]:
    """Row by row blocks, as tensor-parallel workers read their shares."""
    found = {}
    with safetensors.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - this is no dictionary
            share = file.get_slice(name)
            shape = share.get_shape()
            if len(shape) == 2 and shape[0] >= 2:
                half = shape[0] // 2
                found[name] = torch.cat([share[:half], share[half:]])
            else:
                found[name] = file.get_tensor(name)
    return found


def by_reading(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(path.read_bytes())


def by_mapping(path: Path) -> dict[str, torch.Tensor]:
    """A plain mapping cut up by the header, as fast loaders do."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32, "I8": torch.int8}
    raw = numpy.memmap(path, dtype=numpy.uint8, mode="c")
    length = int.from_bytes(raw[:8].tobytes(), "little")
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        piece = torch.from_numpy(raw[8 + length + start : 8 + length + end])
        found[name] = piece.clone().view(kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


WAYS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "load_file": safetensors.torch.load_file,
    "slices": by_slices,
    "read": by_reading,
    "mapping": by_mapping,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A checkpoint, saved and loaded.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    tensors = make(options.megabytes)
    wanted = digests(tensors)
    path = options.directory / "model.safetensors"
    temporary = options.directory / "model.safetensors.tmp"
    safetensors.torch.save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, path)
    for name, load in WAYS.items():
        assert digests(load(path)) == wanted, f"{name}: a tensor came back changed"
    torch.save(tensors, options.directory / "model.pt")
    mapped = torch.load(options.directory / "model.pt", mmap=True, weights_only=True)
    assert digests(mapped) == wanted, "torch.load: a tensor came back changed"
    size = path.stat().st_size
    print(f"{len(tensors)} tensors, {size // MIB} MiB: {', '.join(WAYS)} and torch.load agree")


if __name__ == "__main__":
    main()
