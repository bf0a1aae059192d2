"""`kvfs prefetch`: fetches the data of files to nodes before they are read there."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli import settings_options
from cli.commands.admin import nodes
from cli.commands.files import jobs
from kvfs.base.config import Config
from kvfs.base.errors import NotFound, NotSupported, Unavailable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.client import Stat


to_nodes: Final = click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="NODE",
    help="Name or number of a node, or all; repeatable (default: the running node).",
)


@click.command("prefetch")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@to_nodes
@settings_options.options("store")
def command(
    paths: tuple[str, ...], targets: tuple[str, ...], config_file: Path | None, **flags: object
) -> None:
    """Fetch the data of files to nodes before they are read.

    For a directory, fetches everything below it. Nodes fetch from each other, so many take hardly
    longer than one.
    """
    bring(settings_options.resolve(config_file, **flags), paths, targets)


def bring(config: Config, paths: Sequence[str], targets: Sequence[str]) -> None:
    """Has files, and everything below directories, fetched to nodes (none: the asked node), and
    reports it. Raises NotFound, Unavailable."""
    numbers = _numbers(config, targets)

    def job(path: str, found: "Stat") -> str:
        params = {"inode": found.ino, "nodes": numbers}
        answer = jobs.ask_until(config, "prefetch", params, _is_settled)
        failed = [f"{path}: {text}" for text in answer.values() if text != "done"]
        return "; ".join(failed)

    outcome = jobs.all_below(config, paths, "prefetch", job)
    where, each = (f" to {len(numbers)} nodes", " each") if len(numbers) > 1 else ("", "")
    size = format_size(outcome.size_bytes)
    plural = "" if outcome.done == 1 else "s"
    click.echo(f"brought {outcome.done} file{plural}{where}, {size}{each}")
    if failures := outcome.failures:
        raise Unavailable(f"{len(failures)} are not everywhere: {failures[0]}")


def _is_settled(answer: dict[str, str]) -> bool:
    return all(state != "coming" for state in answer.values())


def _numbers(config: Config, targets: Sequence[str]) -> list[int]:
    """Returns the numbers of the named nodes; none: the asked node. Raises NotFound,
    NotSupported."""
    if not targets:
        return []
    try:
        members: list[dict[str, Any]] = nodes.of(config)["nodes"]
    except NotSupported:
        if "all" in targets:
            return []  # the node alone
        raise
    alive = [each for each in members if each["lease"] == "held"]
    if "all" in targets:
        return [each["number"] for each in alive]
    numbers = []
    for target in targets:
        found = [each for each in alive if target in (each["name"], str(each["number"]))]
        if not found:
            raise NotFound(f"no node {target} runs: `kvfs node list` shows those that do")
        numbers.append(found[0]["number"])
    return numbers
