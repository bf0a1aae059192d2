"""`kvfs import` and `kvfs export`: objects of an S3 bucket become files, and files objects."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from cli import interrupts, open_store, settings_options
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import NotSupported
from kvfs.base.printable import printable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.admin.import_export import Moved, Trees
    from kvfs.transfer.cold.endpoint import ColdLocation

_JOBS: Final = 8
_MOST_JOBS: Final = 64


def _options(function: Any) -> Any:
    """Adds the options of both commands."""
    for option in (
        click.option(
            "--jobs",
            type=click.IntRange(1, _MOST_JOBS),
            default=_JOBS,
            show_default=True,
            help="Number of files moved at once.",
        ),
        click.option(
            "--endpoint", metavar="URL", help="URL of the S3 service (default: $AWS_ENDPOINT_URL)."
        ),
    ):
        function = option(function)
    return function


@contextlib.contextmanager
def _moving(
    config: Config, place: str, url: str | None, jobs: int, what: str
) -> Iterator[tuple["Trees", "ColdLocation"]]:
    """Moves trees between the store and this place, with a bar that counts the bytes."""
    from kvfs.admin.import_export import Trees
    from kvfs.transfer.cold.endpoint import Endpoint, parse

    location = parse(place)
    lock, moved = threading.Lock(), 0
    with (
        open_store.client_of(config) as client,
        contextlib.closing(Endpoint(location.bucket, url)) as endpoint,
        _ending_at_once(),
        progress.shown(what, None) as step,
    ):

        def told(size: int) -> None:
            nonlocal moved
            with lock:
                moved += size
                step(moved)

        yield Trees(client, endpoint, told, jobs=jobs), location


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Makes Ctrl-C wait for no thread, which may be waiting for an answer: an incomplete file has
    no name yet, and goes as that of a killed process does."""
    try:
        yield
    except KeyboardInterrupt:
        print("kvfs: interrupted: run it again to go on", file=sys.stderr, flush=True)
        interrupts.end()


def _tell(done: str, moved: "Moved") -> None:
    """Prints the result in one line. Raises NotSupported if something had to be left out."""
    there = f"; {moved.there} were there" if moved.there else ""
    click.echo(f"{done} {moved.files} files, {format_size(moved.bytes)}{there}")
    for each in moved.left_out:
        click.echo(f"left out: {printable(str(each))}", err=True)
    if moved.left_out_files:
        raise NotSupported(f"{moved.left_out_files} were left out")


@click.command("export")
@click.argument("path", type=click.UNPROCESSED)
@click.argument("target", type=click.UNPROCESSED)
@_options
@settings_options.configured("store")
def export(
    path: str,
    target: str,
    config: Config,
    endpoint: str | None,
    jobs: int,
) -> None:
    """Copy the file or tree PATH to TARGET (s3://BUCKET/KEY).

    Objects that exist with the same size and are not older are left alone, as are the uploaded
    parts of a large file: run it again to resume after an interruption. Credentials come from the
    usual AWS settings.
    """
    with _moving(config, target, endpoint, jobs, f"export {path}") as (moving, location):
        _tell("exported", moving.export(os.fsencode(path), location))


@click.command("import")
@click.argument("source", type=click.UNPROCESSED)
@click.argument("path", type=click.UNPROCESSED)
@_options
@settings_options.configured("store")
def import_(
    source: str,
    path: str,
    config: Config,
    endpoint: str | None,
    jobs: int,
) -> None:
    """Copy the object or tree SOURCE (s3://BUCKET/KEY) to PATH.

    Files that exist with the same size and are not older are left alone: run it again to resume
    after an interruption. Credentials come from the usual AWS settings.
    """
    with _moving(config, source, endpoint, jobs, f"import {source}") as (moving, location):
        _tell("imported", moving.import_(location, os.fsencode(path)))
