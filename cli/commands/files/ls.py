"""`kvfs ls`: the names in a directory, read from the store and not through the mount."""

import json
import os
import stat
import sys
import time
from pathlib import Path

import click

from cli import open_store, settings_options
from cli.commands.files.stat import as_json_object
from kvfs.base.printable import printable
from kvfs.client import Stat

_RECENT_NS = 180 * 86_400 * 1_000_000_000


@click.command("ls")
@click.argument("path", default="/", type=click.UNPROCESSED)
@settings_options.options("store")
@click.option(
    "-l", "long", is_flag=True, help="Show mode, owner, size and time of the last change."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def command(
    path: str, config_file: Path | None, long: bool, as_json: bool, **flags: object
) -> None:
    """List a directory (default: the namespaces), or show one file.

    Names are printed as they are stored, to a terminal with escapes. Directories end with a
    slash.
    """
    config = settings_options.resolve(config_file, **flags)
    is_terminal = sys.stdout.isatty()
    with open_store.client_of(config) as client:
        found = client.stat(os.fsencode(path))
        for entry in client.list(os.fsencode(path)) if found.is_directory else [found]:
            if as_json:
                line = json.dumps(as_json_object(entry)).encode()
            else:
                line = _long(entry) if long else _shown(entry)
                line = _printable(line) if is_terminal else line
            sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _printable(line: bytes) -> bytes:
    """Returns the line for a terminal, as ls(1) prints it: a pipe gets names as they are."""
    return printable(os.fsdecode(line)).encode()


def _shown(entry: Stat) -> bytes:
    return entry.name + (b"/" if entry.is_directory else b"")


def _long(entry: Stat) -> bytes:
    facts = (
        f"{stat.filemode(entry.mode)} {entry.uid:>5} {entry.gid:>5} {entry.size:>14} "
        f"{_when(entry.mtime_ns)} "
    )
    arrow = b" -> " + entry.target if entry.is_symlink else b""
    return facts.encode() + _shown(entry) + arrow


def _when(time_ns: int) -> str:
    """Formats a time like ls(1): the time of day of recent changes, the year of others."""
    recent = abs(time.time_ns() - time_ns) < _RECENT_NS
    return time.strftime("%b %e %H:%M" if recent else "%b %e  %Y", time.localtime(time_ns / 1e9))
