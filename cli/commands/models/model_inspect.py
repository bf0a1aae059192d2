"""`kvfs model inspect`: the tensors of a checkpoint, and each rank's share of them. It reads only
their headers."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import click

from cli import settings_options
from cli.commands.files import mounted_path
from cli.presentation import output, progress
from gds.format.checkpoint import config_beside, read_headers
from gds.format.safetensors import Header, TensorInfo
from gds.plan.architecture import cutting_of
from gds.plan.load_plan import Strategy, make_plan, parts_of
from kvfs.base.config import Config
from kvfs.base.printable import printable
from kvfs.base.units import format_size

MOST_RANKS: Final = 1024
strategy_option: Final = click.option(
    "--strategy",
    type=click.Choice([each.value for each in Strategy]),
    default="auto",
    show_default=True,
    help="Way in which ranks read columns of tensors.",
)


class Share(NamedTuple):
    """The share of one rank."""

    rank: int
    tensor_bytes: int
    read_bytes: int
    """Bytes from which it cuts its tensors."""


@click.command("inspect")
@click.argument("path", type=click.Path())
@click.option(
    "--ranks",
    type=click.IntRange(1, MOST_RANKS),
    metavar="N",
    help="Show the share of each of N ranks.",
)
@strategy_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@settings_options.configured("store")
def command(
    path: str,
    ranks: int | None,
    strategy: str,
    as_json: bool,
    config: Config,
) -> None:
    """List tensors, their types, shapes and sizes.

    With --ranks, shows the share of each of N tensor-parallel ranks, and how many bytes it reads.
    Needs no torch, and fetches no data that are not here.
    """
    place = mounted_path.find(config, path)
    count = ranks or 0
    with progress.explained(f"reading the headers of {path} ..."):
        files = read_headers(place)
    with progress.explained(f"planning what each of {count} ranks reads ..."):
        shares = shares_of(files, range(count), count, Strategy(strategy))
    if as_json:
        click.echo(json.dumps(_described(path, files, shares)))
    else:
        _show(files, shares)


def shares_of(
    files: Sequence[tuple[str, Header]], numbers: Iterable[int], ranks: int, strategy: Strategy
) -> list[Share]:
    """Returns the ranks' shares of files, by their headers. Raises Invalid if tensors cannot be
    divided, Corrupt, OSError."""
    config = config_beside(files[0][0]) if ranks > 1 else None
    headers = [header for _, header in files]
    found = []
    for number in numbers:
        plan = make_plan(parts_of(headers, cutting_of(config, number, ranks)), strategy)
        tensor_bytes = sum(each.wanted * each.number for each in plan.lines)
        found.append(Share(number, tensor_bytes, plan.read_bytes))
    return found


def _described(
    path: str, files: Sequence[tuple[str, Header]], shares: Sequence[Share]
) -> dict[str, Any]:
    tensors = [tensor for _, header in files for tensor in header.tensors]
    return {
        "path": path,
        "tensors": len(tensors),
        "tensor_bytes": sum(map(_size, tensors)),
        "dtypes": dict(_by_dtype(tensors)),
        "files": [
            {
                "path": where,
                "metadata": dict(header.metadata),
                "tensors": [
                    {
                        "name": tensor.name,
                        "dtype": tensor.dtype,
                        "shape": tensor.shape,
                        "bytes": _size(tensor),
                        "offset": tensor.begin,
                    }
                    for tensor in header.tensors
                ],
            }
            for where, header in files
        ],
        "ranks": [share._asdict() for share in shares],
    }


def _show(files: Sequence[tuple[str, Header]], shares: Sequence[Share]) -> None:
    tensors = [tensor for _, header in files for tensor in header.tensors]
    print_table(
        ("TENSOR", "DTYPE", "SHAPE", "SIZE"),
        [
            (
                printable(each.name),
                each.dtype,
                " x ".join(map(str, each.shape)),
                format_size(_size(each)),
            )
            for each in tensors
        ],
    )
    dtypes = ", ".join(f"{dtype} {format_size(size)}" for dtype, size in _by_dtype(tensors))
    total = format_size(sum(map(_size, tensors)))
    what = f"{len(tensors)} tensors, {total}"
    click.echo(f"{what} in {len(files)} file{'s' if len(files) != 1 else ''}: {dtypes or 'none'}")
    if shares:
        print_table(
            ("RANK", "TENSORS", "READ"),
            [
                (str(each.rank), format_size(each.tensor_bytes), format_size(each.read_bytes))
                for each in shares
            ],
        )


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns that are as wide as necessary."""
    lines = output.table([head, *rows])
    click.echo("\n".join(lines))  # at once: each call flushes, and there may be a million


def _by_dtype(tensors: Sequence[TensorInfo]) -> list[tuple[str, int]]:
    """Returns bytes by type, the most first."""
    found: Counter[str] = Counter()
    for tensor in tensors:
        found[tensor.dtype] += _size(tensor)
    return found.most_common()


def _size(tensor: TensorInfo) -> int:
    return tensor.end - tensor.begin
