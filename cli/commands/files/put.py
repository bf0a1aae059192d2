"""`kvfs put`: store a local file; the kernel moves the bytes."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli import open_store, settings_options
from cli.presentation import progress
from kvfs.base.errors import Invalid, IsADirectory, NotPermitted
from kvfs.session.paths import shown

if TYPE_CHECKING:
    from kvfs.client import Client


@click.command("put")
@click.argument("source", type=click.UNPROCESSED)
@click.argument("path", type=click.UNPROCESSED)
@settings_options.options("store")
@click.option("-p", "--parents", is_flag=True, help="Make missing directories.")
@click.option("--exclusive", is_flag=True, help="Fail if the name is taken.")
def command(
    source: str,
    path: str,
    config_file: Path | None,
    parents: bool,
    exclusive: bool,
    **flags: object,
) -> None:
    """Store the local file SOURCE as PATH, atomically.

    SOURCE - is standard input. An existing file is replaced. A PATH that ends with a slash is a
    directory: the file keeps its name in it.
    """
    config = settings_options.resolve(config_file, **flags)
    target = os.fsencode(path)
    if target.endswith(b"/"):
        target += _name_of(source)
    with (
        open_store.client_of(config) as client,
        open(0 if source == "-" else source, "rb", buffering=0, closefd=source != "-") as stream,
    ):
        found = os.fstat(stream.fileno())
        regular = stat.S_ISREG(found.st_mode)
        size = found.st_size if regular else None
        with progress.shown(f"put {source}", size) as step, _hinting(client, target):
            client.put_file(
                stream,
                target,
                mode=stat.S_IMODE(found.st_mode) & 0o777 if regular else 0o644,
                exclusive=exclusive,
                parents=parents,
                progress=step,
            )


@contextlib.contextmanager
def _hinting(client: "Client", target: bytes) -> Iterator[None]:
    """Tells a user who names a directory, perhaps a namespace, how to put a file into it."""
    try:
        yield
    except (IsADirectory, NotPermitted):
        if not client.exists([target])[0] or not client.stat(target).is_directory:
            raise
        path = shown(target)
        raise IsADirectory(
            f"{path} is a directory: write {path}/ to put the file into it"
        ) from None


def _name_of(source: str) -> bytes:
    if source == "-":
        raise Invalid("standard input has no name: write the whole path")
    return os.path.basename(os.fsencode(source))
