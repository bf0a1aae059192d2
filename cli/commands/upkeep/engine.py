"""`kvfs engine`: the metadata of stores, moved between engines."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from cli import node_requests, open_store, settings_options
from cli.group import CommandGroup
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Invalid
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
    from kvfs.meta.replica.direct_engine import DirectEngine

    AnyEngine = EmbeddedEngine | DirectEngine


@click.group("engine", cls=CommandGroup)
def command() -> None:
    """Copy metadata to another engine, spread or gather them."""


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

    In a Redis cluster a copy lies in one slot, so on one server and its replicas, also of
    namespaces that were spread: spread them again.

    A node of such a cluster has the names of the namespaces that it uses: its store is refused
    where it does not have all that is to be copied.

    Where the target's metadata are replaced its nodes must be stopped. Data files are not copied,
    and the secrets of S3 users stay encrypted with the key of the store they come from. A copy that
    was cut short is begun anew by the same command.
    """
    from kvfs.admin.partial_replica import check_to_copy
    from kvfs.cluster.membership import check_unused
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
    from kvfs.meta.redis.location import is_url
    from kvfs.meta.replica.direct_engine import DirectEngine
    from kvfs.tree.metadata_copy import copy_all, copy_namespace

    if _same(source, target):
        raise Invalid("source and target are the same")
    if replace and is_url(target):
        trio.run(check_unused, target)
    raw = None if name is None else open_store.namespace_name(os.fsencode(name))
    with _opened(source) as old, _opened(target, make=True) as new:
        if isinstance(old, EmbeddedEngine):
            check_to_copy(old, raw)
        places = [each.place() for each in (old, new) if isinstance(each, DirectEngine)]
        if len(places) > len(set(places)):
            raise Invalid("source and target are the same")
        if replace and raw is None and isinstance(new, DirectEngine):
            new.discard_shards()
        with progress.shown("copying", None) as step:
            if raw is None:
                copied = copy_all(old, new, replace=replace, progress=step)
            else:
                copied = copy_namespace(
                    old, new, raw, replace=replace, now=time.time_ns(), progress=step
                )
        trio.run(new.sync)
    click.echo(f"copied {copied.keys:,} keys, {format_size(copied.bytes)}; digest {copied.digest}")


@command.command("spread")
@settings_options.configured("store")
def spread(config: Config) -> None:
    """Give the namespaces of a Redis cluster its servers.

    Each namespace gets a shard of its own: its names and files lie on one of the servers and its
    replicas, and go on while those of another are away. New ones get one too from now on. Nodes go
    on meanwhile; changes in a namespace wait for a moment when its shard takes over. All keys are
    compared before. Cut short, it is finished by the same command. What leads back is `kvfs engine
    gather`.
    """
    for name in node_requests.ask(config, "spread", deadline_s=node_requests.COPYING_S):
        click.echo(f"{name} has a shard of its own")
    click.echo("new namespaces get one each")


@command.command("gather")
@settings_options.configured("store")
def gather(config: Config) -> None:
    """Bring the namespaces of a Redis cluster back to one of its servers.

    It undoes `kvfs engine spread`: all names and files lie on one server and its replicas again,
    which needs the memory for them, and so do those of new namespaces. Nodes go on meanwhile, and
    read what they lack: changes in a namespace wait for a moment when the one shard takes over. All
    keys are compared before. Cut short, it is finished by the same command.
    """
    for name in node_requests.ask(config, "gather", deadline_s=node_requests.COPYING_S):
        click.echo(f"{name} is in the shard of all")
    click.echo("new namespaces are, too")


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

        with contextlib.closing(DirectEngine(place)) as engine:
            yield engine
        return
    with open_store.stopped_store(Path(place), make=make) as (_, embedded):
        yield embedded
