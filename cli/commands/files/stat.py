"""`kvfs stat` and `kvfs ls`: the attributes of files, and the names in a directory, read from the
store and not through the mount."""

import json
import os
import stat
import sys
import time
from datetime import UTC, datetime
from typing import Any

import click

from cli import open_store, settings_options
from kvfs.base.config import Config
from kvfs.base.printable import printable
from kvfs.base.units import format_size
from kvfs.client import Stat

_RECENT_NS = 180 * 86_400 * 1_000_000_000
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block device",
    stat.S_IFCHR: "character device",
}


@click.command("stat")
@click.argument("paths", nargs=-1, required=True, type=click.UNPROCESSED, metavar="PATH...")
@settings_options.configured("store")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def command(paths: tuple[str, ...], config: Config, as_json: bool) -> None:
    """Show type, size, times, owner and checksum."""
    with open_store.client_of(config) as client:
        for path in paths:
            found = client.stat(os.fsencode(path))
            bucket = _bucket(path, found)
            if as_json:
                shown = as_json_object(found)
                if bucket is not None:
                    shown["s3_bucket"] = bucket
                click.echo(json.dumps(shown))
            else:
                click.echo(_readable(path, found, bucket))


def as_json_object(found: Stat) -> dict[str, Any]:
    """Returns an object in which names that are not UTF-8 have their bytes as backslash escapes."""
    return {
        "name": found.name.decode(errors="backslashreplace"),
        "kind": kind(found),
        "inode": found.ino,
        "mode": f"{stat.S_IMODE(found.mode):04o}",
        "uid": found.uid,
        "gid": found.gid,
        "links": found.nlink,
        "size_bytes": found.size,
        "disk_bytes": found.blocks * 512,
        "atime_ns": found.atime_ns,
        "mtime_ns": found.mtime_ns,
        "ctime_ns": found.ctime_ns,
        "target": found.target.decode(errors="backslashreplace") or None,
        "xxh3_128": found.checksum.hex() or None,
    }


def _bucket(path: str, found: Stat) -> bool | None:
    """Returns whether a top-level directory is a bucket of the S3 API; None: it is no such
    directory."""
    from s3api.model.addressing import is_bucket_name

    name = path.strip("/")
    if "/" in name or not name or not found.is_directory:
        return None
    return is_bucket_name(name)


def kind(found: Stat) -> str:
    """Returns the type in a word."""
    return _KINDS.get(stat.S_IFMT(found.mode), "unknown")


def _readable(path: str, found: Stat, bucket: bool | None) -> str:
    disk = format_size(found.blocks * 512)
    rows = [
        ("path", printable(path)),
        ("kind", kind(found)),
        ("size", f"{found.size} bytes, {disk} on disk"),
        ("mode", f"{stat.filemode(found.mode)} {found.uid}:{found.gid}"),
        ("inode", f"{found.ino:#x}, {found.nlink} link{'' if found.nlink == 1 else 's'}"),
        ("read", _when(found.atime_ns)),
        ("written", _when(found.mtime_ns)),
        ("changed", _when(found.ctime_ns)),
    ]
    if bucket is not None:
        absent = "absent: not a legal name of a bucket (3 to 63 of a-z 0-9 . -)"
        rows.append(("s3", "a bucket" if bucket else absent))
    if found.is_symlink:
        rows.append(("target", printable(os.fsdecode(found.target))))
    if found.is_file:
        rows.append(("xxh3-128", found.checksum.hex() or "not computed yet"))
    return "\n".join(f"{name:<10}{value}" for name, value in rows)


def _when(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"


@click.command("ls")
@click.argument("path", default="/", type=click.UNPROCESSED)
@settings_options.configured("store")
@click.option(
    "-l", "long", is_flag=True, help="Show mode, owner, size and time of the last change."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def ls(path: str, config: Config, long: bool, as_json: bool) -> None:
    """List a directory (default: the namespaces), or one file.

    Names are printed as they are stored, to a terminal with escapes. Directories end with a
    slash.
    """
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
        f"{_when_like_ls(entry.mtime_ns)} "
    )
    arrow = b" -> " + entry.target if entry.is_symlink else b""
    return facts.encode() + _shown(entry) + arrow


def _when_like_ls(time_ns: int) -> str:
    """Formats a time like ls(1): the time of day of recent changes, the year of others."""
    recent = abs(time.time_ns() - time_ns) < _RECENT_NS
    return time.strftime("%b %e %H:%M" if recent else "%b %e  %Y", time.localtime(time_ns / 1e9))
