"""`kvfs prefetch`: have the data of files brought to nodes before somebody reads them there."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import moving, node, settings
from kvfs.config import Config
from kvfs.errors import NotFound, Unavailable
from kvfs.units import format_size

if TYPE_CHECKING:
    from kvfs.client import Stat


@click.command("prefetch")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@click.option(
    "--to", "targets", multiple=True, metavar="NODE", help="Name or number, or all; repeatable."
)
@settings.options("store")
def command(
    paths: tuple[str, ...], targets: tuple[str, ...], config_file: Path | None, **flags: object
) -> None:
    """Bring the data of files to nodes before they are read.

    Of directories, all that lies below. Nodes fetch from each other, so that many take hardly
    longer than one.
    """
    config = settings.resolve(config_file, **flags)
    nodes = _numbers(config, targets)

    def job(path: str, found: "Stat") -> str:
        params = {"inode": found.ino, "nodes": nodes}
        answer = moving.ask_until(config, "prefetch", params, _is_settled)
        failed = [f"{path}: {text}" for text in answer.values() if text != "done"]
        return "; ".join(failed)

    outcome = moving.all_below(config, paths, "prefetch", job)
    where = f" to {len(nodes)} nodes" if len(nodes) > 1 else ""
    size = format_size(outcome.size_bytes)
    click.echo(f"brought {outcome.done} files{where}, {size} each")
    if failures := outcome.failures:
        raise Unavailable(f"{len(failures)} are not everywhere: {failures[0]}")


def _is_settled(answer: dict[str, str]) -> bool:
    return all(state != "coming" for state in answer.values())


def _numbers(config: Config, targets: tuple[str, ...]) -> list[int]:
    """The nodes that are meant; none: the one that is asked. Raises NotFound."""
    if not targets:
        return []
    members: list[dict[str, Any]] = node.ask(config, "nodes")["nodes"]
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
