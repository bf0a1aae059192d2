"""`kvfs export`: files become objects of an S3 bucket."""

import os
from pathlib import Path

import click

from cli import settings_options
from cli.commands.files import import_export


@click.command("export")
@click.argument("path", type=click.UNPROCESSED)
@click.argument("target", type=click.UNPROCESSED)
@import_export.options
@settings_options.options("store")
def command(
    path: str,
    target: str,
    config_file: Path | None,
    endpoint: str | None,
    jobs: int,
    **flags: object,
) -> None:
    """Copy the file or tree PATH to TARGET (s3://BUCKET/PREFIX).

    Objects that exist with the same size and are not older are left alone, as are the uploaded
    parts of a large file: run it again to resume after an interruption. Credentials come from the
    usual AWS settings.
    """
    config = settings_options.resolve(config_file, **flags)
    with import_export.of(config, target, endpoint, jobs, f"export {path}") as (moving, location):
        import_export.tell("exported", moving.export(os.fsencode(path), location))
