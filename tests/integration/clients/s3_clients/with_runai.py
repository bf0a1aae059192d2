"""Run:ai's model streamer, as vLLM drives it for `--load-format runai_streamer s3://...`.

The checkpoint is written on the mount; every tensor of it has to come over S3 byte for byte.
"""

import os
import sys
from pathlib import Path

import torch
from runai_model_streamer import SafetensorsStreamer
from safetensors.torch import save_file

TYPES = (torch.bfloat16, torch.float32, torch.int8, torch.bool)


def main(folder: Path, url: str) -> None:
    """Two shards of 33 tensors, of all sizes from nothing to 8 MiB."""
    torch.manual_seed(7)
    wanted: dict[str, torch.Tensor] = {}
    for shard in range(2):
        tensors = {
            f"shard{shard}.layer{n}": torch.randint(0, 2, (n, 64 << n % 17)).to(TYPES[n % 4])
            for n in range(33)
        }
        save_file(tensors, folder / f"model-{shard}.safetensors")
        wanted |= tensors
    paths = [f"{url}/{name}" for name in sorted(os.listdir(folder))]
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(paths)
        got = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
