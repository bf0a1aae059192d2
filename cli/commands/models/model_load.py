"""`kvfs model load`: loads a checkpoint as the ranks of an engine would, and says how fast that
was.

Each rank is a process (`model_rank`): all import torch first, then begin at the same moment.
"""

import contextlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import click

from cli import settings_options
from cli.commands.files import mounted_path
from cli.commands.models import rank_processes
from cli.commands.models.model_inspect import MOST_RANKS, print_table, shares_of, strategy_option
from cli.presentation import progress
from gds import NO_TORCH
from gds.format.checkpoint import read_headers, shards_of
from gds.io.page_cache import cached_bytes
from gds.plan.load_plan import Strategy
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotSupported
from kvfs.base.units import format_size
from kvfs.client.mount.backing_file import open_backings

Result = dict[str, Any]
"""A rank's result at the end."""


_STAGES: Final = {"read": "READING", "check": "CHECKING", "copy": "COPYING", "wait": "WAITING"}
"""Mean seconds of a rank's threads, by their activity."""


class _Opened(NamedTuple):
    """The opened files before the load."""

    files: int
    size_bytes: int
    cached_bytes: int | None
    seconds: float
    """Seconds until all of them were here."""


@click.command("load")
@click.argument("path", type=click.Path())
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Device: cpu, cuda:N, or cuda: each rank has the device of its number.",
)
@click.option(
    "--ranks",
    "count",
    type=click.IntRange(1, MOST_RANKS),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of tensor-parallel ranks that share the model, each a process.",
)
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Load this rank alone.")
@strategy_option
@click.option(
    "--verify",
    is_flag=True,
    help="Compare the data read with the store's checksums (sealed files).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options.configured("store")
def command(
    path: str,
    device: str,
    count: int,
    rank: int | None,
    strategy: str,
    verify: bool,
    as_json: bool,
    config: Config,
) -> None:
    """Load a checkpoint into tensors, and say how long it took.

    Nothing is kept: this shows what an engine can expect here, and whether the files are sound.
    Data on other nodes are fetched first. Needs torch (pip install 'kvfs[torch]').

    START is Python and torch, LOAD what follows until the last tensor is there. READING, CHECKING,
    COPYING and WAITING (for memory) are the mean activities of a rank's threads in that time, each
    with its own GB/s: the longest one limits the load.
    """
    if rank is not None and rank >= count:
        raise Invalid(f"rank {rank} is none of {count} ranks, which count from 0")
    _require_device(device)
    require_torch()
    numbers = range(count) if rank is None else [rank]
    place = mounted_path.find(config, path)
    _require_plan(place, numbers[0], count, Strategy(strategy))
    try:
        with _opened(place) as opened:
            results, wall_s = _load(place, device, numbers, count, strategy, verify)
    except rank_processes.RankFailed as error:
        who = f"rank {error.number}: " if count > 1 else ""
        click.echo(f"kvfs: {who}{error}", err=True)
        raise click.exceptions.Exit(error.code) from None
    if as_json:
        click.echo(json.dumps(_described(path, device, count, opened, results, wall_s)))
    else:
        _show(opened, results, wall_s)


def require_torch() -> None:
    """Raises NotSupported with the remedy if torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise NotSupported(NO_TORCH)


def _require_device(device: str) -> None:
    """Raises Invalid if torch does not know the device."""
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", device):
        raise Invalid(f"{device!r} is no device to load to: cpu, cuda and cuda:N are known")


def _require_plan(path: str, number: int, count: int, strategy: Strategy) -> None:
    """Finds faults of the headers, or tensors that cannot be divided, before any rank starts: they
    hold for every rank. Raises what `read_headers` and `shares_of` raise."""
    with progress.explained(f"reading the headers of {path} ..."):
        shares_of(read_headers(path), [number], count, strategy)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[_Opened]:
    """Keeps the files open while the block lasts. Raises what `open_backings` raises."""
    began = time.monotonic()
    shards = [shard.path for shard in shards_of(path)]
    with contextlib.ExitStack() as stack:
        fds = [backing.fd for backing in open_backings(shards)]
        for fd in fds:
            stack.callback(os.close, fd)
        seconds = time.monotonic() - began
        cached = [cached_bytes(fd, 0, 0) for fd in fds]
        sizes = [os.fstat(fd).st_size for fd in fds]
        known = [each for each in cached if each is not None]
        yield _Opened(len(fds), sum(sizes), sum(known) if len(known) == len(fds) else None, seconds)


def _load(
    path: str, device: str, numbers: Sequence[int], count: int, strategy: str, verify: bool
) -> tuple[list[Result], float]:
    """Loads, and returns each rank's result and the seconds until the last one was done. Raises
    RankFailed."""
    wanted = [
        {
            "path": path,
            "device": f"cuda:{number}" if device == "cuda" and count > 1 else device,
            "rank": number,
            "ranks": count,
            "strategy": strategy,
            "verify": verify,
            "parent": os.getpid(),
        }
        for number in numbers
    ]
    with rank_processes.running(wanted) as running:
        with progress.counted("ranks have started", len(running)) as step:

            def count_started() -> None:
                step(sum(each.start_s is not None for each in running))

            rank_processes.wait(running, lambda each: each.start_s is not None, count_started)
        began = time.monotonic()
        for each in running:
            each.begin()
        rank_processes.wait(running, lambda each: each.of_bytes is not None)
        size = sum(each.of_bytes or 0 for each in running)
        with progress.shown(f"load {path}", size) as step:

            def sum_read() -> None:
                step(sum(each.read_bytes for each in running))

            rank_processes.wait(running, lambda each: each.result is not None, sum_read)
        wall_s = time.monotonic() - began
        return [
            {"rank": each.number, "start_s": each.start_s, **(each.result or {})}
            for each in running
        ], wall_s


def _rate(size_bytes: int, seconds: float) -> float:
    """Returns GB/s."""
    return size_bytes / seconds / 1e9 if seconds > 0 else 0.0


def _described(
    path: str, device: str, count: int, opened: _Opened, results: Sequence[Result], wall_s: float
) -> dict[str, Any]:
    read = sum(each["read_bytes"] for each in results)
    return {
        "path": path,
        "device": device,
        "ranks": count,
        "files": opened.files,
        "file_bytes": opened.size_bytes,
        "cached_bytes": opened.cached_bytes,
        "bring_s": opened.seconds,
        "wall_s": wall_s,
        "read_bytes": read,
        "gb_per_s": _rate(read, wall_s),
        "loaded": list(results),
    }


def _show(opened: _Opened, results: Sequence[Result], wall_s: float) -> None:
    plural = "" if opened.files == 1 else "s"
    click.echo(
        f"{opened.files} file{plural}, {format_size(opened.size_bytes)}, "
        f"here after {opened.seconds:.2f} s{_cached(opened)}"
    )
    rows = [
        (
            str(each["rank"]),
            f"{each['start_s']:.2f} s",
            f"{each['open_s'] * 1e3:.0f} ms",
            f"{each['load_s']:.2f} s",
            format_size(each["read_bytes"]),
            f"{_rate(each['read_bytes'], each['load_s']):.2f} GB/s",
            f"{each['tensors']}, {format_size(each['tensor_bytes'])}",
        )
        for each in results
    ]
    print_table(("RANK", "START", "HEADERS", "LOAD", "READ", "RATE", "TENSORS"), rows)
    _show_stages(results)
    read = sum(each["read_bytes"] for each in results)
    for way, why in sorted({(each["way"], each["why"]) for each in results}):
        click.echo(f"by {way}: {why}")
    start_s = max(each["start_s"] for each in results)
    click.echo(
        f"all in {wall_s:.2f} s: {format_size(read)} read, {_rate(read, wall_s):.2f} GB/s; "
        f"before that Python and torch took {start_s:.2f} s to start"
    )


def _show_stages(results: Sequence[Result]) -> None:
    rows = []
    for each in results:
        stages = each["stages"]
        cells = (_stage(stages[name]) for name in _STAGES)
        rows.append((str(each["rank"]), str(stages["threads"]), *cells))
    print_table(("RANK", "THREADS", *_STAGES.values()), rows)


def _stage(spent: dict[str, float]) -> str:
    seconds = f"{spent['seconds']:.2f} s"
    if spent["bytes"]:
        return f"{seconds} at {spent['gb_per_s']:.2f} GB/s"
    return seconds if spent["seconds"] else "-"


def _cached(opened: _Opened) -> str:
    if opened.cached_bytes is None or not opened.size_bytes:
        return ""
    share = min(1.0, opened.cached_bytes / opened.size_bytes)
    return f"; {share:.0%} of it was in the page cache"
