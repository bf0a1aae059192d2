"""`kvfs rebuild`: rebuilds lost metadata from the data files."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli import open_store, settings_options
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Exists, Invalid, NotFound
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.tree.rebuilt_records import DirectoryOwner

_TOLD: Final = (
    ("without_name", "were not described, and have names like lost+found-<number>"),
    ("written_since", "were written after they were sealed, and are as they were left"),
    ("damaged", "do not match their checksums; what is left of durable ones is in quarantine"),
    ("dropped", "of caches were dropped"),
    ("newest_mirror", "metadata replica was put back"),
    ("not_here", "that this node was said to have are not here"),
)


@click.command("rebuild")
@settings_options.configured("store", "engine", "secret_file")
@click.option("--finish", is_flag=True, help="With --engine: finish; this is the last node's turn.")
@click.option(
    "--replace",
    is_flag=True,
    help="With --engine: discard older metadata in it, or another cluster's.",
)
@click.option(
    "--replace-unfollowed",
    is_flag=True,
    help="With --replace: also where this node does not have all namespaces.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    config: Config,
    finish: bool,
    replace: bool,
    replace_unfollowed: bool,
    as_json: bool,
) -> None:
    """Rebuild lost metadata from data files.

    The node must be stopped. Each sealed file says where it was and what it was. Data that no
    record knows are read once and compared with their checksums. Anything without a data file is
    not restored: symbolic links, empty directories, the modes of directories, policies, S3 users
    and buckets' settings.

    With --engine, the engine of a cluster lost its data. Stop all nodes, then give each its turn,
    the last one with --finish: it puts back its replica of all metadata, if that is newer than
    those of the nodes before it, and what its data files know beyond that. Nothing of the above is
    lost then, except in namespaces with shards of their own that no node has whole: they have what
    data files tell. So --replace, which discards healthy servers' shards too, is refused at a node
    that does not have all of them.
    """
    if config.engine:
        if replace_unfollowed and not replace:
            raise Invalid("--replace-unfollowed is for --replace: give both")
        counts = _rebuild_cluster(
            config, finish=finish, replace=replace, is_partial=replace_unfollowed
        )
    elif finish or replace or replace_unfollowed:
        raise Invalid("--finish and --replace are for the engine of a cluster: name it by --engine")
    else:
        counts = _rebuild(config.store)
    if as_json:
        click.echo(json.dumps(counts))
    else:
        _tell(counts, config.engine, finish=finish)


def _tell(counts: dict[str, int], engine: str, *, finish: bool) -> None:
    click.echo(f"{counts['files']:,} files, {format_size(counts['bytes'])}, have their names again")
    for name, meaning in _TOLD:
        if counts.get(name):
            click.echo(f"{counts[name]:,} {meaning}")
    if engine and not finish:
        click.echo("the next node's turn; nodes may start after the last one's, with --finish")


def _rebuild(path: Path) -> dict[str, int]:
    import trio

    from kvfs.admin import rebuild
    from kvfs.datastore import places
    from kvfs.datastore.index import NAME, Index
    from kvfs.datastore.tiered_files import data_files
    from kvfs.meta import keys
    from kvfs.meta.replica.replica_mark import refuse_replica

    with open_store.stopped_store(path) as (store, engine):
        refuse_replica(engine)
        if engine.read_now(lambda t: t.get(keys.VERSION)) is not None:
            raise Exists(
                f"the metadata of {path} are there: `kvfs fsck` looks whether they are whole; "
                f"to give them up, move {store.meta} away first"
            )
        with contextlib.closing(data_files(store)) as files:
            engine.transact_now(lambda t: rebuild.begin(t, _owner()))
            with progress.shown("reading", None) as step:
                index = Index(engine.database(NAME))
                counts = rebuild.Rebuild(engine, files, index, _owner()).run(step)
        engine.transact_now(rebuild.finish)
        trio.run(engine.sync)
        store.mark_recovered(places.boot_of(store))
    return counts


def _rebuild_cluster(
    config: Config, *, finish: bool, replace: bool, is_partial: bool
) -> dict[str, int]:
    from kvfs.admin.partial_replica import shown
    from kvfs.admin.rebuild_cluster import Rebuilding
    from kvfs.cluster import node_identity

    with open_store.stopped_store(config.store) as (store, local):
        path = Path(config.secret_file or store.root / node_identity.SECRETS)
        secrets = node_identity.read_secrets(path)
        if secrets is None:
            raise NotFound(
                f"{path}, the cluster's secret, is not there: restore it, or take another node's"
            )
        turn = Rebuilding(store, local, config.engine, secrets)
        with progress.shown("reading", None) as step:
            came = turn.run(_owner(), step, replace=replace, is_partial=is_partial)
        if finish and (bare := turn.finish()):
            click.echo(f"no node had all of {shown(bare)}: what data files tell is there", err=True)
    return {**came.counts, "newest_mirror": came.is_newest, "not_here": came.lost}


def _owner() -> "DirectoryOwner":
    from kvfs.tree.rebuilt_records import DirectoryOwner

    return DirectoryOwner(os.geteuid(), os.getegid(), time.time_ns())
