"""`kvfs import`: objects of an S3 bucket become files."""

import os
from pathlib import Path

import click

from cli import settings_options
from cli.commands.files import import_export


@click.command("import")
@click.argument("source", type=click.UNPROCESSED)
@click.argument("path", type=click.UNPROCESSED)
@import_export.options
@settings_options.options("store")
def command(
    source: str,
    path: str,
    config_file: Path | None,
    endpoint: str | None,
    jobs: int,
    **flags: object,
) -> None:
    """Copy the object or tree SOURCE (s3://BUCKET/PREFIX) to PATH.

    Files that exist with the same size and are not older are left alone: run it again to resume
    after an interruption. Credentials come from the usual AWS settings.
    """
    config = settings_options.resolve(config_file, **flags)
    with import_export.of(config, source, endpoint, jobs, f"import {source}") as (moving, location):
        import_export.tell("imported", moving.import_(location, os.fsencode(path)))
