"""`kvfs quarantine`: data files that no record names, or that are damaged."""

import contextlib
import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli import settings_options
from kvfs.base.config import Config
from kvfs.base.errors import Invalid
from kvfs.base.printable import printable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.datastore.quarantine_directory import Quarantined

_REASONS: Final = {
    "unnamed": "no record names it",
    "outdated": "its record has another version",
    "damaged": "it does not match its checksum",
}


@click.command("quarantine")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@settings_options.configured("store")
@click.option("--empty", is_flag=True, help="Remove these data files; without PATH all of them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(paths: tuple[str, ...], config: Config, empty: bool, as_json: bool) -> None:
    """Show data files without a record, and damaged ones.

    A data file of a durable namespace is kept here when no record names it any more, or when it is
    damaged. It may be the last copy of its content: `kvfs put PATH /NAMESPACE/NAME` gives it a name
    again, `kvfs fsck --repair` gives it back to a record that misses it, and --empty removes it.
    Until then it takes space.
    """
    found = _find(config.store, paths)
    if empty:
        _empty(found)
    elif as_json:
        click.echo(json.dumps([_facts(each) for each in found]))
    else:
        _show(found)


def _find(store: Path, paths: Sequence[str]) -> "list[Quarantined]":
    """Returns everything in quarantine, or the named part of it, the latest last. Raises
    Invalid."""
    from kvfs.datastore import layout
    from kvfs.datastore.tiered_files import data_files

    with contextlib.closing(data_files(layout.open_store(store))) as files:
        found = sorted(files.quarantined(), key=lambda each: each.since_ns)
    if not paths:
        return found
    known = {each.path: each for each in found}
    if unknown := [path for path in paths if path not in known]:
        raise Invalid(f"{unknown[0]} is not in quarantine: `kvfs quarantine` shows what is")
    return [known[path] for path in paths]


def _empty(found: "list[Quarantined]") -> None:
    for each in found:
        Path(each.path).unlink(missing_ok=True)
    size = format_size(sum(each.used_bytes for each in found))
    click.echo(f"{len(found)} data files removed, {size}")


def _show(found: "list[Quarantined]") -> None:
    if not found:
        click.echo("nothing is in quarantine")
    for each in map(_facts, found):
        click.echo(each["path"])
        name = printable(each["last_name"]) or "its name is not known"
        click.echo(f"  {name}, {format_size(each['size_bytes'])}")
        click.echo(f"  since {each['since']}: {_REASONS[each['reason']]}")


def _facts(each: "Quarantined") -> dict[str, Any]:
    since = datetime.datetime.fromtimestamp(each.since_ns // 10**9, datetime.UTC)
    return {
        "path": each.path,
        "last_name": _last_name(each.path),
        "size_bytes": each.size_bytes,
        "used_bytes": each.used_bytes,
        "since": since.isoformat().replace("+00:00", "Z"),
        "reason": each.reason.value,
        "inode": each.ino,
        "version": each.version,
    }


def _last_name(path: str) -> str:
    """Returns the path of the file when its data file last described itself; empty if it never
    did."""
    from kvfs.datastore.files import description

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        said = description(fd)
    finally:
        os.close(fd)
    return "" if said is None else os.fsdecode(b"/" + said.path.lstrip(b"/"))
