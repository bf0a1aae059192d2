"""Loads safetensors checkpoints into tensors: `load_file`, `load_model`, `iter_tensors`."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Final, NamedTuple, SupportsIndex

import torch

from gds.format.checkpoint import Checkpoint, Path, config_beside, open_checkpoint
from gds.format.safetensors import BITS
from gds.io.mapped_tensors import map_tensors
from gds.io.tensors import is_converted, is_target
from gds.loader import Loader
from gds.plan.architecture import cutting_of
from gds.plan.load_plan import LoadPlan, Strategy, WantedTensor, make_plan, parts_of
from gds.plan.tensor_parallel import Cutting, Splits, require_splits
from gds.probe.io_path import Report, device_of, open_target
from kvfs.base.errors import Invalid

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and those to read: (0, all) once the files are open, then with
each tensor, by the thread that takes them. An exception that it raises ends the load."""
_MOST_THREADS: Final = 8
_BUDGET_BYTES: Final = 384 << 20


class _Asked(NamedTuple):
    """The load that was asked for. The public calls explain each field."""

    paths: Path | Sequence[Path]
    device: str | torch.device = "cpu"
    rank: int = 0
    ranks: int = 1
    splits: Splits | None = None
    dtype: torch.dtype | None = None
    strategy: Strategy = Strategy.AUTO
    copy: bool = True
    progress: Progress | None = None
    report: Report | None = None
    verify: bool = False
    budget: int | None = None
    """Bytes in memory that nobody took yet; None: everything is kept anyway."""


def load_file(
    path: Path,
    device: str | torch.device = "cpu",
    *,
    copy: bool = True,
    progress: Progress | None = None,
    report: Report | None = None,
    verify: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns all tensors of one file, by name; of a directory or an index of shards, those of all
    shards.

    `path`: on a KVFS mount, or any other. `device`: cpu, cuda, cuda:N; tensors of a GPU belong to
    the stream that is current here, and begin at multiples of 16 bytes. `copy` False: the tensors
    are views of the mapped file, which is read as they are used (see `gds.io.mapped_tensors`); CPU
    only. `report` is told which way a copy takes, and why (`gds.Taken`), and at the end how its
    threads spent their time (`gds.Stages`). A caller that drops tensors gives their memory back,
    some 64 MiB at a time. `verify`: the data read are compared with the store's checksums of a
    sealed file, which exist some seconds after it was written (see `gds.io.checked_source`); on a
    mount only.

    Raises NotFound, Corrupt (no safetensors file, truncated, not what was stored, or the disk
    cannot read it), Conflict (it was written to meanwhile), NoSpace (of memory, or on the disk for
    data on other nodes), Invalid (no such device), NotSupported (no CUDA; a dtype that torch has
    not; nothing has checksums of the file), Unavailable (the GPU failed; there are no checksums
    yet; nodes that have it do not answer), AccessDenied (of the checksums), OSError. Interrupted,
    it leaves nothing behind."""
    asked = _Asked(
        [path], device, splits={}, copy=copy, progress=progress, report=report, verify=verify
    )
    return dict(_load(asked))


def load_model(
    paths: Path | Sequence[Path],
    device: str | torch.device = "cpu",
    rank: int = 0,
    world_size: int = 1,
    plan: Splits | None = None,
    *,
    dtype: torch.dtype | None = None,
    strategy: Strategy | str = Strategy.AUTO,
    copy: bool = True,
    progress: Progress | None = None,
    report: Report | None = None,
    verify: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint, by name. If world_size ranks share it, returns the share
    of `rank` by `plan` (see `gds.plan.tensor_parallel`); None: as transformers are cut, by the
    config.json beside the files.

    `paths`: files, or a directory or an index of shards (`*.safetensors.index.json`). `dtype`:
    another floating point dtype to which such tensors are converted. `strategy`: how columns are
    read; to verify them, lines are read whole unless STRIDED is asked for. The other arguments and
    errors are those of `load_file`; Invalid also for names that two files have, for tensors that
    cannot be divided, and for an invalid plan, dtype or strategy."""
    kind = _strategy(strategy)
    asked = _Asked(
        paths, device, rank, world_size, plan, dtype, kind, copy, progress, report, verify
    )
    return dict(_load(asked))


def iter_tensors(
    paths: Path | Sequence[Path],
    device: str | torch.device = "cpu",
    rank: int = 0,
    world_size: int = 1,
    plan: Splits | None = None,
    *,
    dtype: torch.dtype | None = None,
    strategy: Strategy | str = Strategy.AUTO,
    progress: Progress | None = None,
    report: Report | None = None,
    verify: bool = False,
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Like `load_model`, but yields each tensor as it arrives. Tensors that were not taken yet have
    at most 512 MB, or are one tensor. Close it to end early. Nothing is looked at before the first
    is asked for: tensors of a GPU belong to the stream that is current then. A process that is
    forked meanwhile can close it, and gets Invalid for the next tensor."""
    kind = _strategy(strategy)
    asked = _Asked(
        paths, device, rank, world_size, plan, dtype, kind, True, progress, report, verify
    )
    return _load(asked._replace(budget=_BUDGET_BYTES))


def _strategy(asked: Strategy | str) -> Strategy:
    try:
        return Strategy(asked)
    except ValueError:
        known = ", ".join(each.value for each in Strategy)
        raise Invalid(f"strategy {asked!r}: {known} are known") from None


def _require_dtype(dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise Invalid(f"dtype {dtype!r}: one of torch's is wanted, as torch.bfloat16")
    if not is_target(dtype):
        raise Invalid(f"dtype {dtype}: of floating point tensors, which cannot become that")


def _require_numbers(rank: int, ranks: int) -> None:
    for name, number in (("rank", rank), ("world_size", ranks)):
        if not isinstance(number, SupportsIndex):
            raise Invalid(f"{name} {number!r}: a whole number is wanted")


def _load(asked: _Asked) -> Generator[tuple[str, torch.Tensor], None, None]:
    _require_dtype(asked.dtype)
    _require_numbers(asked.rank, asked.ranks)
    if asked.splits is not None:
        require_splits(asked.splits)
    device = device_of(asked.device)
    if not asked.copy and (device.type != "cpu" or asked.dtype is not None):
        raise Invalid("copy=False: what goes to a device or another dtype is copied")
    if not asked.copy and asked.verify:
        raise Invalid("copy=False: what is read later, as it is used, cannot be verified")
    with open_checkpoint(asked.paths, verify=asked.verify) as checkpoint:
        is_rank = asked.ranks > 1
        for source in checkpoint.sources:
            source.share(is_rank=is_rank, is_common=is_rank and asked.splits == {})
        wanted = list(_wanted(checkpoint, asked))
        if asked.copy:
            yield from _copied(checkpoint, wanted, device, asked)
        else:
            yield from map_tensors(checkpoint.sources, wanted)
            checkpoint.check_unchanged()


def _copied(
    checkpoint: Checkpoint, wanted: Sequence[WantedTensor], device: torch.device, asked: _Asked
) -> Generator[tuple[str, torch.Tensor], None, None]:
    strategy = asked.strategy
    if asked.verify and strategy is Strategy.AUTO:
        strategy = Strategy.SLICE  # of each piece all chunks would be read
    plan = make_plan(wanted, strategy)
    with open_target(plan, device, asked.dtype, checkpoint.sources, asked.report) as opened:
        loader = Loader(
            plan,
            checkpoint.sources,
            opened.target,
            threads=max(1, min(_MOST_THREADS, len(plan.steps))),
            budget=_budget(plan, device, asked),
            cpus=opened.cpus,
        )
        yield from _taken(loader, plan, asked.progress)
    checkpoint.check_unchanged()
    if asked.report is not None:
        asked.report(loader.stages())


def read_wanted(
    checkpoint: Checkpoint, wanted: Sequence[WantedTensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns tensors of open files, or parts of them, by name. Raises what `load_file` raises."""
    return dict(_copied(checkpoint, wanted, device, _Asked((), device)))


def _taken(
    loader: Loader, plan: LoadPlan, progress: Progress | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    to_read = plan.read_bytes if progress else 0
    if progress:
        progress(0, to_read)
    # Threads read until the loader's iterator ends, and so before the files are closed.
    with contextlib.closing(loader.tensors()) as tensors:
        for at, tensor in tensors:
            yield plan.wanted[at].tensor.name, tensor
            del tensor  # whoever took it may have dropped it
            if progress:
                progress(loader.read_bytes, to_read)


def _wanted(checkpoint: Checkpoint, asked: _Asked) -> Iterable[WantedTensor]:
    if asked.splits is None:
        config = config_beside(checkpoint.sources[0].where) if asked.ranks > 1 else None
        cutting = cutting_of(config, asked.rank, asked.ranks)
    else:
        cutting = Cutting(asked.splits, asked.rank, asked.ranks)
    for each in parts_of(checkpoint.headers, cutting):
        converted = asked.dtype is not None and is_converted(each.tensor, asked.dtype)
        yield each._replace(converted=converted)


def _budget(plan: LoadPlan, device: torch.device, asked: _Asked) -> int | None:
    """Returns the limit of bytes in memory. A tensor that the file does not align is copied once
    more: the memory that it is copied from is bounded, else it would take as much as the
    tensors."""
    is_moved = device.type != "cpu" or any(
        run is not None and lines.begin * 8 % BITS[wanted.tensor.dtype]
        for wanted, lines, run in zip(plan.wanted, plan.lines, plan.run_of, strict=True)
    )
    return _BUDGET_BYTES if is_moved else asked.budget
