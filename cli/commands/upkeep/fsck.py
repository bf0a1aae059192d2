"""`kvfs fsck`: checks a store, and repairs it."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli import settings_options
from kvfs.base.config import Config
from kvfs.base.errors import Corrupt

if TYPE_CHECKING:
    from kvfs.admin.fsck import Fsck, Problem

_UNREPAIRED: Final = 1


@click.command("fsck")
@settings_options.configured("store")
@click.option("--repair", is_flag=True, help="Repair the problems found.")
@click.option("--checksums", is_flag=True, help="Read all data and compare their checksums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
def command(config: Config, repair: bool, checksums: bool, as_json: bool) -> None:
    """Check the store of a stopped node; repair it if told to.

    Prints one line for each problem. Exits with 0 when nothing is wrong any more, else with 1.
    """
    with ExitStack() as closing:
        fsck, damaged = _open(config.store, closing, checksums=checksums, repair=repair)
        gone_past = [problem for problem in damaged if problem.mend is None]
        repaired = _report(gone_past, as_json, repaired=True)
        waiting = [problem for problem in damaged if problem.mend is not None]
        if repair:
            repaired += _report(_mended(waiting), as_json, repaired=True)
            repaired += _report(fsck.repair(), as_json, repaired=True)
        left = 0 if repair else _report(waiting, as_json, repaired=False)
        left += _report(fsck.check(), as_json, repaired=False)
        kept = len(list(fsck.quarantined()))
    _conclude(repaired, left, kept, as_json)


def _open(
    path: Path, closing: ExitStack, *, checksums: bool, repair: bool
) -> "tuple[Fsck, list[Problem]]":
    """Opens everything that a check needs, with the store's lock held until `closing` closes, and
    returns it with the damage of base and journal, which is skipped if `repair` is set."""
    from kvfs.admin.fsck import Fsck
    from kvfs.admin.fsck_records import Problem
    from kvfs.datastore import layout
    from kvfs.datastore.index import NAME, Index
    from kvfs.datastore.tiered_files import data_files
    from kvfs.holdings import repaired_names
    from kvfs.meta import keys
    from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
    from kvfs.meta.lmdb.reconstruction import damaged_metadata
    from kvfs.meta.replica.replica_mark import read_mark

    store = layout.open_store(path)
    store.lock()
    closing.callback(store.unlock)
    engine = EmbeddedEngine(store.meta, past_damage=repair)
    closing.callback(engine.close)
    if damage := engine.find_damage():
        raise Corrupt(f"the metadata of {path} are damaged: {damage}; restore meta/ from a backup")
    is_behind = False
    if (mark := engine.read_now(read_mark)) is not None:
        engine.node = keys.pack_node(mark.node)
        is_behind = bool(damaged_metadata(store.meta))
    files = data_files(store)
    closing.callback(files.close)
    damaged = [Problem(kind, str(path), detail, None) for kind, detail in engine.damage.items()]
    if detail := engine.find_base_damage():
        damaged.append(Problem("damaged_base", str(path), detail, engine.rotate_now))
    index = Index(engine.database(NAME))
    fsck = Fsck(
        *(engine, files, index),
        checksums=checksums,
        is_behind=is_behind,
        before_repair=partial(repaired_names.mark, store.root) if mark else lambda: None,
    )
    return fsck, damaged


def _mended(problems: "list[Problem]") -> "Iterator[Problem]":
    for problem in problems:
        assert problem.mend is not None, "only what can be"
        problem.mend()
        yield problem


def _report(problems: "Iterable[Problem]", as_json: bool, *, repaired: bool) -> int:
    """Prints each problem as it is found, and returns their number."""
    count = 0
    for problem in problems:
        count += 1
        if as_json:
            fields = {
                "kind": problem.kind,
                "subject": problem.subject,
                "detail": problem.detail,
                "repaired": repaired,
            }
            click.echo(json.dumps(fields))
        else:
            click.echo(f"repaired {problem}" if repaired else str(problem))
    return count


def _conclude(repaired: int, left: int, kept: int, as_json: bool) -> None:
    if not as_json:
        click.echo(_conclusion(repaired, left))
        if kept:
            click.echo(f"{kept} data files are in quarantine: kvfs quarantine shows them")
    sys.exit(_UNREPAIRED if left else 0)


def _conclusion(repaired: int, left: int) -> str:
    if not repaired and not left:
        return "the store is whole"
    if not left:
        return f"{repaired} problems repaired, the store is whole"
    more = "; kvfs fsck --repair mends what can be" if not repaired else ""
    return f"{repaired} problems repaired, {left} left{more}"
