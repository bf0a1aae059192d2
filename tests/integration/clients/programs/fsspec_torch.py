"""torch.distributed.checkpoint on `kvfs://`: a state saved by FsspecWriter, loaded by FsspecReader.

    python fsspec_torch.py kvfs://models/checkpoint [--store DIRECTORY]

Ends with 0 when every tensor came back bit for bit; also where it is saved over an older one.
"""

import argparse

import fsspec
import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "weight": torch.randn(1024, 1024, dtype=torch.bfloat16),
        "bias": torch.randn(1000),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


def save_and_load(where: str, options: dict[str, str], seed: int) -> None:
    wanted = state(seed)
    checkpoint.save(
        wanted, storage_writer=FsspecWriter(where, thread_count=2, **options), no_dist=True
    )
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    checkpoint.load(found, storage_reader=FsspecReader(where, **options), no_dist=True)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def plain(where: str, options: dict[str, str]) -> None:
    """torch.save and torch.load through a file object."""
    wanted = state(3)
    with fsspec.open(f"{where}/plain.pt", "wb", **options) as file:
        torch.save(wanted, file)
    with fsspec.open(f"{where}/plain.pt", "rb", **options) as file:
        found = torch.load(file, weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="A checkpoint of torch on kvfs://.")
    parser.add_argument("where")
    parser.add_argument("--store")
    given = parser.parse_args()
    options = {"store": given.store} if given.store else {}
    for seed in (1, 2):
        save_and_load(given.where, options, seed)
    plain(given.where, options)
    print(f"torch {torch.__version__}: every tensor came back")


if __name__ == "__main__":
    main()
