"""`kvfs get`: copy a file out of the store; the kernel moves the bytes."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from cli import open_store, settings_options
from cli.presentation import progress

_OF_THE_DESTINATION: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@click.command("get")
@click.argument("path", type=click.UNPROCESSED)
@click.argument("destination", default=".", type=click.UNPROCESSED)
@settings_options.options("store")
def command(path: str, destination: str, config_file: Path | None, **flags: object) -> None:
    """Copy PATH to the local file or directory DESTINATION.

    Default: the current directory; - is standard output. A local file appears whole or not at
    all.
    """
    config = settings_options.resolve(config_file, **flags)
    source = os.fsencode(path)
    with open_store.client_of(config) as client:
        size = client.stat(source).size
        with progress.shown(f"get {path}", size) as step, _naming(path, destination):
            if destination == "-":
                sys.stdout.flush()
                client.get_file(source, sys.stdout.fileno(), progress=step)
            else:
                client.get_file(source, _place(source, destination), progress=step)


@contextlib.contextmanager
def _naming(path: str, destination: str) -> Iterator[None]:
    """Makes a failed transfer name its file, if the system does not."""
    target = "standard output" if destination == "-" else destination
    try:
        yield
    except OSError as error:
        if error.filename is None:
            is_target = error.errno in _OF_THE_DESTINATION
            error.filename = target if is_target else f"{path} to {target}"
        raise


def _place(source: bytes, destination: str) -> bytes:
    target = os.fsencode(destination)
    if os.path.isdir(target):
        return os.path.join(target, os.path.basename(source.rstrip(b"/")))
    return target
