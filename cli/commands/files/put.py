"""`kvfs put` and `kvfs get`: store a local file, and copy one out of the store; the kernel moves
the bytes."""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

from cli import open_store, settings_options
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, IsADirectory, NotPermitted
from kvfs.session.paths import shown

if TYPE_CHECKING:
    from kvfs.client import Client

_OF_THE_DESTINATION: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@click.command("get")
@click.argument("path", type=click.UNPROCESSED)
@click.argument("destination", default=".", type=click.UNPROCESSED)
@settings_options.configured("store")
def get(path: str, destination: str, config: Config) -> None:
    """Copy PATH to the local file or directory DESTINATION.

    Default: the current directory; - is standard output. A local file appears whole or not at
    all.
    """
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


@click.command("put")
@click.argument("source", type=click.UNPROCESSED)
@click.argument("path", type=click.UNPROCESSED)
@settings_options.configured("store")
@click.option("-p", "--parents", is_flag=True, help="Make missing directories.")
@click.option("--exclusive", is_flag=True, help="Fail if the name is taken.")
def command(
    source: str,
    path: str,
    config: Config,
    parents: bool,
    exclusive: bool,
) -> None:
    """Store the local file SOURCE as PATH, atomically.

    SOURCE - is standard input. An existing file is replaced. A PATH that ends with a slash is a
    directory: the file keeps its name in it.
    """
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
