"""`kvfs backup`: backups of a store or of a cluster."""

import json
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cli import node_requests, settings_options
from cli.group import CommandGroup
from cli.presentation import progress
from kvfs.base import control
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotFound
from kvfs.base.printable import printable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.admin.backup.create import Made
    from kvfs.admin.backup.manifest import ListedBackup, Manifest
    from kvfs.admin.backup.restore import Restored
    from kvfs.admin.backup.verify import VerifiedBackup

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_TIME_OR_NAME: Final = "TIME|NAME"
_CHOICE: Final = "The newest backup that is not later, or the one of this name"
_DAMAGED: Final = 8
"""The exit code of damaged data (`cli.presentation.exits`)."""
_BRING_S: Final = 60.0


@click.group("backup", cls=CommandGroup)
def command() -> None:
    """Make, list, verify and restore backups."""


@command.command("create")
@settings_options.configured("store", "backup", "backup_endpoint", "backup_keep")
@click.option("--secrets", is_flag=True, help="Put the key of S3 users' secrets into the backup.")
@click.option(
    "--if-older-than",
    "age_s",
    type=click.IntRange(min=0),
    metavar="SECONDS",
    help="Make none if the newest backup is younger.",
)
@_JSON
def create(config: Config, secrets: bool, age_s: int | None, as_json: bool) -> None:
    """Make a backup of the store, beside its node or while it is down.

    It has all metadata of durable namespaces, S3 users and buckets' settings, as of one moment, and
    the content of their sealed files: of those that an earlier backup has, only that it is there. A
    file that only the cold tier has is named, and not copied. Of caches it has the namespaces, and
    no file. In a cluster one node makes it for all: files that it does not have are fetched.

    Cut short, it is no backup; run again, it goes on where it was.
    """
    from kvfs.admin.backup import create as making
    from kvfs.admin.backup import manifest, repository
    from kvfs.session import session

    place = _place(config)
    opened = session.acquire(config.store)
    try:
        with (
            repository.opened(place, config.backup_endpoint or None, make=True) as where,
            progress.shown("back up", None) as step,
        ):
            newest = manifest.newest_whole(where) if age_s is not None else None
            passed_ns = time.time_ns() - newest.made_ns if newest is not None else -1
            if newest is not None and 0 <= passed_ns < (age_s or 0) * 10**9:
                _tell_newest(newest, place, as_json)
                return
            made = making.create(
                opened, where, _node(config), step, keep=config.backup_keep, with_secrets=secrets
            )
    finally:
        session.release(opened)
    _tell_made(made, place, as_json)


@command.command("list")
@settings_options.configured("backup", "backup_endpoint")
@_JSON
def list_(config: Config, as_json: bool) -> None:
    """List the backups of a place, the oldest first."""
    from kvfs.admin.backup import manifest, repository

    with repository.opened(_place(config), config.backup_endpoint or None) as where:
        found = manifest.listed(where)
    if as_json:
        click.echo(json.dumps([_facts(each) for each in found]))
        return
    for each in found:
        click.echo(_line(each))


@command.command("verify")
@settings_options.configured("backup", "backup_endpoint")
@click.option("--at", metavar=_TIME_OR_NAME, default="", help=f"{_CHOICE} (default: all).")
@_JSON
def verify(config: Config, at: str, as_json: bool) -> None:
    """Read backups as a restore does, and tell which are damaged.

    All that the backups of the place hold is read and compared with its checksums, what they share
    once; --at names a single one. Damaged objects are named, and the first files that a restore
    would leave out. Exits with 0 if nothing is damaged, else with 8. Nothing is written.
    """
    from kvfs.admin.backup import repository
    from kvfs.admin.backup import verify as verifying

    with (
        repository.opened(_place(config), config.backup_endpoint or None) as where,
        progress.shown("verify", None) as step,
    ):
        found = verifying.verify(where, at, step)
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(each) for each in found]))
    else:
        for each in found:
            _tell_verified(each)
    sys.exit(0 if all(each.is_whole for each in found) else _DAMAGED)


@command.command("restore")
@settings_options.configured("store", "backup", "backup_endpoint", "engine")
@click.option("--at", metavar=_TIME_OR_NAME, default="", help=f"{_CHOICE} (default: the newest).")
@click.option("--skip-damaged", is_flag=True, help="Leave out files whose content is damaged.")
@click.option(
    "--take-over",
    is_flag=True,
    help="The former store is gone: the new one has its id, and so its cold tier.",
)
@_JSON
def restore(config: Config, at: str, skip_damaged: bool, take_over: bool, as_json: bool) -> None:
    """Make a new store of a backup; with --engine, the first node of a new cluster.

    The directory of --store must be new or empty, and the engine without metadata: nothing is
    replaced. Each content is compared with its checksum. Cut short, run it again. Then start the
    node: `kvfs up --store DIR`, with the same --engine; further nodes join it.

    Files that only the cold tier has are left out, unless the new store takes over from one that
    will never run again: two that share a tier would delete each other's files there.
    """
    from kvfs.admin.backup import repository
    from kvfs.admin.backup import restore as restoring

    place = _place(config)
    with (
        repository.opened(place, config.backup_endpoint or None) as where,
        progress.shown("restore", None) as step,
    ):
        done = restoring.restore(
            *(where, at, config.store, config.engine, step),
            skips_damaged=skip_damaged,
            takes_over=take_over,
        )
    _tell_restored(done, config, as_json, taken_over=take_over)


def _place(config: Config) -> str:
    if not config.backup:
        raise Invalid("name the place of backups: --backup DIR, or --backup s3://BUCKET/PREFIX")
    return config.backup


class _Node:
    """The running node of a store."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def seal(self, inos: list[int]) -> bool:
        return bool(node_requests.ask(self._config, "seal", {"inodes": inos})["tried"])

    def bring(self, ino: int) -> bool:
        state = node_requests.ask(self._config, "bring", {"inode": ino}, _BRING_S)["state"]
        if state == "nowhere":
            raise NotFound(f"no node has the data of inode {ino}")
        return bool(state == "here")


def _node(config: Config) -> _Node | None:
    try:
        node_requests.ask(config, "status")
    except control.NoNode:
        return None
    return _Node(config)


def _tell_newest(newest: "Manifest", place: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**_told(newest), "left_out_paths": [], "deleted": []}))
    else:
        click.echo(f"{newest.name} in {place} is young enough: no backup was made")


def _tell_made(made: "Made", place: str, as_json: bool) -> None:
    done = made.manifest
    if as_json:
        told = {"left_out_paths": made.left_out, "deleted": made.deleted}
        click.echo(json.dumps({**_told(done), **told}))
        return
    click.echo(
        f"{done.name} in {place}: {done.files:,} files, {format_size(done.bytes)}, of them"
        f" {format_size(done.added_bytes)} new"
    )
    if done.in_cold_tier:
        click.echo(f"{done.in_cold_tier:,} files are in the cold tier alone: keep that too")
    for each in made.left_out:
        click.echo(f"without its content: {printable(each)}", err=True)
    if done.left_out:
        click.echo(
            f"{done.left_out:,} files were being written, or could not be read: the next backup"
            " has them if they can then",
            err=True,
        )
    for name in made.deleted:
        click.echo(f"deleted {name}")


def _tell_verified(found: "VerifiedBackup") -> None:
    if found.is_whole:
        click.echo(f"{printable(found.name)}  {found.files:,} files, whole")
        return
    if not found.restorable:
        effect = "NO RESTORE can be made of it"
    else:
        effect = f"a restore leaves out {found.damaged_files:,} files (--skip-damaged)"
    click.echo(f"{printable(found.name)}  DAMAGED: {effect}")
    for each in found.damaged:
        click.echo(f"  {printable(each)}")
    for each in found.paths:
        click.echo(f"  lost in it: {printable(each)}")
    if found.damaged_files > len(found.paths):
        click.echo(f"  and {found.damaged_files - len(found.paths):,} more files")


def _tell_restored(done: "Restored", config: Config, as_json: bool, *, taken_over: bool) -> None:
    if as_json:
        click.echo(
            json.dumps(
                {
                    "name": done.name,
                    "files": done.files,
                    "bytes": done.bytes,
                    "dropped": done.dropped,
                    "in_cold_tier": done.in_cold_tier,
                    "damaged": done.damaged,
                    "damaged_files": done.damaged_files,
                    "secrets": done.has_secret_key,
                }
            )
        )
        return
    click.echo(f"restored {done.name}: {done.files:,} files, {format_size(done.bytes)}")
    if done.dropped:
        click.echo(f"{done.dropped:,} files are not restored: their content is not in the backup")
    if done.in_cold_tier and taken_over:
        click.echo(f"{done.in_cold_tier:,} files are in the cold tier: start it with --cold")
    elif done.in_cold_tier:
        click.echo(
            f"{done.in_cold_tier:,} files are not restored: only the former store's cold tier has"
            " them (--take-over)"
        )
    for each in done.damaged:
        click.echo(f"damaged: {printable(each)}", err=True)
    if not done.has_secret_key:
        click.echo(
            "the key of S3 users' secrets is not in the backup: put the former store's secret.key"
            f" into {config.store} before the first start, or give users new keys"
        )
    engine = f" --engine {_without_password(config.engine)}" if config.engine else ""
    click.echo(f"start it: kvfs up --store {config.store}{engine}")


def _without_password(url: str) -> str:
    from kvfs.meta.redis.calling import locate

    return locate(url).shown


def _told(made: "Manifest") -> dict[str, Any]:
    names = ("name", "made_ns", "version", "source", "files", "bytes", "added_bytes")
    told = {name: getattr(made, name) for name in names}
    told["in_cold_tier"], told["left_out"] = made.in_cold_tier, made.left_out
    return {**told, "secrets": bool(made.secret_key)}


def _facts(each: "ListedBackup") -> dict[str, Any]:
    if each.manifest is None:
        return {"name": each.name, "damaged": True}
    return {**_told(each.manifest), "damaged": False}


def _line(each: "ListedBackup") -> str:
    found = each.manifest
    if found is None:
        return f"{printable(each.name)}  damaged: its manifest is not what it was"
    made = datetime.fromtimestamp(found.made_ns / 1e9).astimezone().isoformat(" ", "seconds")
    left = f", {found.left_out:,} without content" if found.left_out else ""
    secrets = ", with secrets" if found.secret_key else ""
    return (
        f"{found.name}  {made}  {found.files:,} files, {format_size(found.bytes)}, of them"
        f" {format_size(found.added_bytes)} new{left}{secrets}"
    )
