"""`kvfs engine`: the metadata of stores, moved between engines."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from cli import open_store
from cli.group import CommandGroup
from cli.presentation import progress
from kvfs.base.errors import Invalid, NotFound
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
    from kvfs.meta.replica.direct_engine import DirectEngine

    AnyEngine = EmbeddedEngine | DirectEngine


@click.group("engine", cls=CommandGroup)
def command() -> None:
    """Copy metadata between engines, for backups and inspection."""


@command.command("copy")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--namespace", "name", metavar="NAME", help="Copy only this namespace.")
@click.option("--replace", is_flag=True, help="Remove the target's metadata first.")
def copy(source: str, target: str, name: str | None, replace: bool) -> None:
    """Copy metadata from one engine to another.

    FROM and TO are the directory of a store whose node is down, or the URL of a Redis or Valkey
    server: redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss:// (TLS, ?ca=FILE), unix:///PATH,
    redis+sentinel://HOST[:PORT],.../NAME, redis+cluster://HOST[:PORT],...; ?prefix=NAME keeps
    several copies apart, and ?password-file=FILE keeps a password out of the list of processes.

    In a Redis cluster a copy lies in one slot, so on one server and its replicas.

    Where the target's metadata are replaced its nodes must be stopped. Data files are not copied,
    and the secrets of S3 users stay encrypted with the key of the store they come from. A copy that
    was cut short is begun anew by the same command.
    """
    from kvfs.cluster.membership import check_unused
    from kvfs.meta.redis.location import is_url
    from kvfs.meta.replica.direct_engine import DirectEngine
    from kvfs.tree.metadata_copy import copy_all, copy_namespace

    if _same(source, target):
        raise Invalid("source and target are the same")
    if replace and is_url(target):
        trio.run(check_unused, target)
    with _opened(source) as old, _opened(target, make=True) as new:
        places = [each.place() for each in (old, new) if isinstance(each, DirectEngine)]
        if len(places) > len(set(places)):
            raise Invalid("source and target are the same")
        with progress.shown("copying", None) as step:
            if name is None:
                copied = copy_all(old, new, replace=replace, progress=step)
            else:
                raw = open_store.namespace_name(os.fsencode(name))
                copied = copy_namespace(
                    old, new, raw, replace=replace, now=time.time_ns(), progress=step
                )
        trio.run(new.sync)
    click.echo(f"copied {copied.keys:,} keys, {format_size(copied.bytes)}; digest {copied.digest}")


def _same(source: str, target: str) -> bool:
    from kvfs.meta.redis.location import is_url

    if is_url(source) or is_url(target):
        return source == target
    return Path(source).resolve() == Path(target).resolve()


@contextmanager
def _opened(place: str, *, make: bool = False) -> "Iterator[AnyEngine]":
    """Opens the engine of a URL, or of a store that no node uses meanwhile; `make`: makes a new
    store if there is none, and the earlier agreement of its data files and records no longer
    counts."""
    from kvfs.meta.redis.location import is_url

    if is_url(place):
        from kvfs.meta.replica.direct_engine import DirectEngine

        engine = DirectEngine(place)
        try:
            yield engine
        finally:
            engine.close()
        return
    with _embedded(Path(place), make=make) as embedded:
        yield embedded


@contextmanager
def _embedded(path: Path, *, make: bool) -> "Iterator[EmbeddedEngine]":
    from kvfs.datastore import layout
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

    try:
        opened = layout.open_store(path)
    except NotFound:
        if not make:
            raise
        opened = layout.create_store(path)
    opened.lock()
    try:
        if make:
            opened.take_clean()
        engine = EmbeddedEngine(opened.meta)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        opened.unlock()
