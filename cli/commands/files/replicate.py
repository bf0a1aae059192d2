"""`kvfs replicate`: make more copies of files on other nodes, now."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli import settings_options
from cli.commands.files import jobs
from kvfs.base.errors import Unavailable

if TYPE_CHECKING:
    from kvfs.client import Stat

_MOST: int = 15


@click.command("replicate")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@click.option(
    "--replicas",
    type=click.IntRange(1, _MOST),
    required=True,
    metavar="N",
    help="Number of copies beside the first.",
)
@settings_options.options("store")
def command(
    paths: tuple[str, ...], replicas: int, config_file: Path | None, **flags: object
) -> None:
    """Make more copies of files on other nodes, now.

    For a directory, copies everything below it until N nodes besides one have it. Nodes are chosen
    as for the replicas of a namespace. Copies beyond those that the namespace asks for are the
    first to go when space is needed.
    """
    config = settings_options.resolve(config_file, **flags)

    def job(path: str, found: "Stat") -> str:
        params = {"inode": found.ino, "copies": replicas + 1}
        answer = jobs.ask_until(config, "replicate", params, _is_settled)
        if answer["state"] != "done":
            return f"{path}: {answer['state']}"
        lacking = replicas + 1 - len(answer["nodes"])
        return f"{path}: {lacking} copies found no node" if lacking > 0 else ""

    outcome = jobs.all_below(config, paths, "replicate", job)
    click.echo(f"{outcome.done} files have {replicas + 1} copies or more")
    if failures := outcome.failures:
        raise Unavailable(f"{len(failures)} have not: {failures[0]}")


def _is_settled(answer: dict[str, Any]) -> bool:
    return bool(answer["state"] != "coming")
