"""Loads safetensors checkpoints into tensors: `load_file`, `load_model`, `iter_tensors`."""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Final

import torch

from gds.checkpoint import Checkpoint, Path, open_checkpoint
from gds.load_plan import LoadPlan, Strategy, Wanted, make_plan
from gds.loader import Loader
from gds.splits import TRANSFORMER, Splits, part_of
from gds.target import Target
from gds.tensors import is_converted
from kvfs.errors import Invalid, NotSupported

_MOST_THREADS: Final = 8
_BUDGET_BYTES: Final = 384 << 20
_RUN_BYTES: Final = 64 << 20
"""Of tensors that are handed over one by one, and may go one by one."""


def load_file(path: Path, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """All tensors of one file, by name.

    `path`: on a KVFS mount, or any other. Raises NotFound, Corrupt (no safetensors file, truncated,
    or the disk cannot read it), Conflict (it was written to meanwhile), NoSpace (of memory),
    Invalid (no such device), NotSupported (a dtype that torch has not), OSError. Interrupted, it
    leaves nothing behind."""
    return dict(_load([path], device, 0, 1, {}, None, Strategy.AUTO, None))


def load_model(
    paths: Path | Sequence[Path],
    device: str | torch.device = "cpu",
    rank: int = 0,
    world_size: int = 1,
    plan: Splits = TRANSFORMER,
    *,
    dtype: torch.dtype | None = None,
    strategy: Strategy | str = Strategy.AUTO,
) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, by name; of world_size ranks that share it, what `rank` has by
    `plan` (see `gds.splits`).

    `paths`: files, or a directory or an index of shards (`*.safetensors.index.json`). `dtype`: of
    floating point tensors, where it is to be another. `strategy`: how columns are read. Raises as
    `load_file`; Invalid for names that two files have, and for what cannot be divided."""
    found = _load(paths, device, rank, world_size, plan, dtype, Strategy(strategy), None)
    return dict(found)


def iter_tensors(
    paths: Path | Sequence[Path],
    device: str | torch.device = "cpu",
    rank: int = 0,
    world_size: int = 1,
    plan: Splits = TRANSFORMER,
    *,
    dtype: torch.dtype | None = None,
    strategy: Strategy | str = Strategy.AUTO,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """As `load_model`, each tensor as it arrives. What was not taken yet has at most 512 MB, or is
    one tensor; who drops tensors gives their memory back, some 64 MiB at a time. Close it to end
    early."""
    return _load(paths, device, rank, world_size, plan, dtype, Strategy(strategy), _BUDGET_BYTES)


def _load(
    paths: Path | Sequence[Path],
    device: str | torch.device,
    rank: int,
    ranks: int,
    splits: Splits,
    dtype: torch.dtype | None,
    strategy: Strategy,
    budget: int | None,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    where = device_of(device)
    with open_checkpoint(paths) as checkpoint:
        wanted = list(_wanted(checkpoint, splits, rank, ranks, dtype))
        plan = make_plan(wanted, strategy, _RUN_BYTES if budget else None)
        loader = Loader(
            plan,
            checkpoint.sources,
            Target(plan, where, dtype),
            threads=_threads(plan),
            budget=budget,
            shared=ranks > 1,
        )
        # Threads read until the loader's iterator ends, and so before the files are closed.
        with contextlib.closing(loader.tensors()) as tensors:
            for at, tensor in tensors:
                yield wanted[at].tensor.name, tensor
                del tensor  # whoever took it may have dropped it
        checkpoint.check_unchanged()


def device_of(device: str | torch.device) -> torch.device:
    """Raises Invalid, NotSupported."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise Invalid(f"{device!r} is no device: {error}") from None
    if found.type != "cpu":
        raise NotSupported(f"{device}: only cpu")
    return found


def _wanted(
    checkpoint: Checkpoint, splits: Splits, rank: int, ranks: int, dtype: torch.dtype | None
) -> Iterable[Wanted]:
    for file, header in enumerate(checkpoint.headers):
        for tensor in header.tensors:
            converted = dtype is not None and is_converted(tensor, dtype)
            yield Wanted(file, tensor, part_of(tensor, splits, rank, ranks), converted)


def _threads(plan: LoadPlan) -> int:
    return max(1, min(_MOST_THREADS, len(plan.steps)))
