"""`kvfs rebuild`: rebuilds lost metadata from the data files."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli import settings_options
from cli.presentation import progress
from kvfs.base.config import Config
from kvfs.base.errors import Exists, Invalid, NotFound
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.datastore.layout import Store
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
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
@settings_options.options("store", "engine", "secret_file")
@click.option("--finish", is_flag=True, help="With --engine: finish; this is the last node's turn.")
@click.option(
    "--replace",
    is_flag=True,
    help="With --engine: discard older metadata in it, or another cluster's.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    config_file: Path | None,
    store: Path | None,
    engine: str | None,
    secret_file: str | None,
    finish: bool,
    replace: bool,
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
    lost then.
    """
    config = settings_options.resolve(
        config_file, store=store, engine=engine, secret_file=secret_file
    )
    if config.engine:
        counts = _rebuild_cluster(config, finish=finish, replace=replace)
    elif finish or replace:
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
    from kvfs.meta.replica.replica_mark import refuse_mirror

    with _opened(path) as (store, engine):
        refuse_mirror(engine)
        if engine.read_now(lambda t: t.get(keys.VERSION)) is not None:
            raise Exists(
                f"the metadata of {path} are there: `kvfs fsck` looks whether they are whole; "
                f"to give them up, move {store.meta} away first"
            )
        files = data_files(store)
        try:
            engine.transact_now(lambda t: rebuild.begin(t, _owner()))
            with progress.shown("reading", None) as step:
                index = Index(engine.database(NAME))
                counts = rebuild.Rebuild(engine, files, index, _owner()).run(step)
        finally:
            files.close()
        engine.transact_now(rebuild.finish)
        trio.run(engine.sync)
        store.mark_recovered(places.boot_of(store))
    return counts


def _rebuild_cluster(config: Config, *, finish: bool, replace: bool) -> dict[str, int]:
    from kvfs.admin.rebuild_cluster import Rebuilding
    from kvfs.cluster import node_identity

    with _opened(config.store) as (store, local):
        path = Path(config.secret_file or store.root / node_identity.SECRETS)
        secrets = node_identity.read_secrets(path)
        if secrets is None:
            raise NotFound(
                f"{path}, the cluster's secret, is not there: restore it, or take another node's"
            )
        turn = Rebuilding(store, local, config.engine, secrets)
        with progress.shown("reading", None) as step:
            came = turn.run(_owner(), step, replace=replace)
        if finish:
            turn.finish()
    return {**came.counts, "newest_mirror": came.mirror, "not_here": came.lost}


def _owner() -> "DirectoryOwner":
    from kvfs.tree.rebuilt_records import DirectoryOwner

    return DirectoryOwner(os.geteuid(), os.getegid(), time.time_ns())


@contextmanager
def _opened(path: Path) -> "Iterator[tuple[Store, EmbeddedEngine]]":
    """Opens a store that no node uses meanwhile, and the engine in it."""
    from kvfs.datastore import layout
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

    store = layout.open_store(path)
    store.lock()
    try:
        engine = EmbeddedEngine(store.meta)
        try:
            yield store, engine
        finally:
            engine.close()
    finally:
        store.unlock()
