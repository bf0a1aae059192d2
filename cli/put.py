"""`kvfs put`: store a local file; the kernel moves the bytes."""

import os
import stat
from pathlib import Path

import click

from cli import progress, settings, store
from kvfs.client.paths import parse_name, shown
from kvfs.errors import Invalid


@click.command("put")
@click.argument("source", type=click.UNPROCESSED)
@click.argument("path", type=click.UNPROCESSED)
@settings.options("store")
@click.option("-p", "--parents", is_flag=True, help="Make the directories that are missing.")
@click.option("--exclusive", is_flag=True, help="Fail where the name is taken.")
def command(
    source: str,
    path: str,
    config_file: Path | None,
    parents: bool,
    exclusive: bool,
    **flags: object,
) -> None:
    """Store the local file SOURCE (-: standard input) as PATH, atomically over what is there.

    A PATH that ends with a slash is a directory: the file keeps its name in it.
    """
    config = settings.resolve(config_file, **flags)
    target = os.fsencode(path)
    if target.endswith(b"/"):
        target += _name_of(source)
    _refuse_top_level(target)
    with (
        store.client_of(config) as client,
        open(0 if source == "-" else source, "rb", buffering=0, closefd=source != "-") as stream,
    ):
        found = os.fstat(stream.fileno())
        regular = stat.S_ISREG(found.st_mode)
        with progress.shown(f"put {source}", found.st_size if regular else None) as step:
            client.put_file(
                stream,
                target,
                mode=stat.S_IMODE(found.st_mode) & 0o777 if regular else 0o644,
                exclusive=exclusive,
                parents=parents,
                progress=step,
            )


def _refuse_top_level(target: bytes) -> None:
    """Raises Invalid where the path leads to the top level: links are not followed, so counting is
    enough."""
    depth = 0
    for part in parse_name(target)[0]:
        depth = max(depth - 1, 0) if part == b".." else depth + 1
    if depth == 0:
        raise Invalid(f"{shown(target)}: the top level holds namespaces only: put the file in one")


def _name_of(source: str) -> bytes:
    if source == "-":
        raise Invalid("standard input has no name: write the whole path")
    return os.path.basename(os.fsencode(source))
