"""`kvfs rm`: remove files and, if asked to, directories with their content."""

import os
from typing import TYPE_CHECKING

import click

from cli import open_store, settings_options
from kvfs.base.config import Config
from kvfs.base.errors import IsADirectory, NotFound
from kvfs.session.paths import parse_name

if TYPE_CHECKING:
    from kvfs.client import Client


@click.command("rm")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@settings_options.configured("store")
@click.option("-r", "--recursive", is_flag=True, help="Remove directories with everything in them.")
@click.option("-f", "--force", is_flag=True, help="Ignore files that do not exist.")
def command(
    paths: tuple[str, ...],
    config: Config,
    recursive: bool,
    force: bool,
) -> None:
    """Remove files. A top-level directory is a namespace: -r removes it too."""
    with open_store.client_of(config) as client:
        for path in map(os.fsencode, paths):
            try:
                _remove(client, path, recursive=recursive)
            except NotFound:
                if not force:
                    raise


def _remove(client: "Client", path: bytes, *, recursive: bool) -> None:
    if not client.stat(path).is_directory:
        client.remove(path)
    elif recursive:
        parse_name(path)  # `/` and what ends with `..` are refused before anything is gone
        _remove_tree(client, path)
    else:
        raise IsADirectory(f"{os.fsdecode(path)} is a directory: -r removes it with all it holds")


def _remove_tree(client: "Client", path: bytes) -> None:
    """Removes depth first; files that others remove meanwhile are gone, as wanted."""
    for entry in client.list(path):
        below = path.rstrip(b"/") + b"/" + entry.name
        try:
            if entry.is_directory:
                _remove_tree(client, below)
            else:
                client.remove(below)
        except NotFound:
            continue
    client.rmdir(path)
