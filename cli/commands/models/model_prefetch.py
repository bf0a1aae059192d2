"""`kvfs model prefetch`: fetches checkpoints to nodes before they are loaded there."""

import os
from pathlib import Path

import click

from cli import settings_options
from cli.commands.files import jobs, mounted_path
from gds.format.checkpoint import indexes_in, is_index, shards_of
from kvfs.base.config import Config
from kvfs.base.errors import NotSupported
from kvfs.client.mount.backing_file import within_mount


@click.command("prefetch")
@click.argument("paths", nargs=-1, required=True, type=click.Path(), metavar="PATH...")
@jobs.to_nodes
@settings_options.configured("store")
def command(paths: tuple[str, ...], targets: tuple[str, ...], config: Config) -> None:
    """Fetch checkpoints to nodes before they are loaded.

    For an index, fetches the shards that it names; for a directory, everything in it, with
    configuration and tokenizer. Nodes fetch from each other, so many take hardly longer than
    one.
    """
    found = [
        os.fsdecode(within_mount(file)) for path in paths for file in _files(_found(config, path))
    ]
    jobs.bring(config, found, targets)


def _found(config: Config, path: str) -> Path:
    """Raises NotFound, NotSupported."""
    place = mounted_path.find(config, path)
    if not mounted_path.is_on_mount(place):
        raise NotSupported(f"{path} is on no mount of KVFS: it is where it is")
    return Path(place)


def _files(path: Path) -> list[Path]:
    """Returns the files of a model. Raises NotFound (also for files that an index names), Corrupt,
    Invalid."""
    if is_index(path):
        return [path, *(shard.path for shard in shards_of(path))]
    for index in indexes_in(path):
        shards_of(index)
    return [path]
