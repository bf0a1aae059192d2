"""`kvfs get`: copy a file out of the store; the kernel moves the bytes."""

import os
import sys
from pathlib import Path

import click

from cli import progress, settings, store


@click.command("get")
@click.argument("path", type=click.UNPROCESSED)
@click.argument("destination", default=".", type=click.UNPROCESSED)
@settings.options("store")
def command(path: str, destination: str, config_file: Path | None, **flags: object) -> None:
    """Copy PATH to the local file or directory DESTINATION (-: standard output; default: here).

    A local file appears whole or not at all.
    """
    config = settings.resolve(config_file, **flags)
    source = os.fsencode(path)
    with store.client_of(config) as client:
        size = client.stat(source).size
        with progress.shown(f"get {path}", size) as step:
            if destination == "-":
                sys.stdout.flush()
                client.get_file(source, sys.stdout.fileno(), progress=step)
            else:
                client.get_file(source, _place(source, destination), progress=step)


def _place(source: bytes, destination: str) -> bytes:
    target = os.fsencode(destination)
    if os.path.isdir(target):
        return os.path.join(target, os.path.basename(source.rstrip(b"/")))
    return target
