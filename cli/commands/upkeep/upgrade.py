"""`kvfs upgrade --check`: the course of an upgrade to this program, before it is made."""

import json
import sys
from typing import TYPE_CHECKING, Any, Final

import click

from cli import node_requests, settings_options
from cli.presentation import output
from kvfs.base import control
from kvfs.base.config import Config
from kvfs.base.printable import printable

if TYPE_CHECKING:
    from kvfs.admin.upgrade_plan import UpgradeFinding, UpgradeSituation

_HINDERED: Final = 1
_STATES: Final = {"ok": "ok", "note": "NOTE", "stop": "STOP"}


@click.command("upgrade")
@click.option("--check", is_flag=True, help="Tell what an upgrade would do, and change nothing.")
@settings_options.configured("store", "engine")
@output.json_option
def command(config: Config, check: bool, as_json: bool) -> None:
    """Tell what an upgrade to this program would do.

    Run it with the program that is to come. It looks at the store, at the node that runs on it and
    at the cluster's engine, if there are such, in some seconds: whether this program reads them,
    which other nodes have to go first, what becomes of the mount, what is converted and when,
    whether the program before can come back. A line says ok, NOTE (to be known before) or STOP.
    Exits with 0 if nothing hinders the upgrade, else with 1.
    """
    import msgspec

    from kvfs.admin.upgrade_plan import plan

    if not check:
        raise click.UsageError(
            "an upgrade is a start of the new program (`kvfs restart`, or `kvfs down` and `kvfs"
            " up`); `kvfs upgrade --check` tells what that would do"
        )
    found = plan(_situation(config))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found)))
    else:
        rows = [(each.name, _STATES[each.state], _said(each)) for each in found.findings]
        for line in output.table(rows):
            click.echo(line)
    sys.exit(0 if found.ready else _HINDERED)


def _situation(config: Config) -> "UpgradeSituation":
    import trio

    from gateway.holder import mount_journal
    from kvfs.admin import upgrade_facts
    from kvfs.admin.upgrade_plan import UpgradeSituation
    from kvfs.base.errors import NotSupported
    from kvfs.datastore import layout

    refusal, store = "", None
    try:
        store = upgrade_facts.of_store(layout.open_store(config.store))
    except NotSupported as error:
        refusal = str(error)
    engine = trio.run(upgrade_facts.of_engine, config.engine) if config.engine else None
    status = _status(config)
    running = None
    if status is not None:
        goes_on = mount_journal.can_go_on(int(status["pid"]))
        running = upgrade_facts.of_status(status, goes_on=goes_on)
    return UpgradeSituation(store, refusal, running, engine)


def _status(config: Config) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = node_requests.ask(config, "status")
    except control.NoNode:
        return None
    return found


def _said(finding: "UpgradeFinding") -> str:
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return printable(f"{finding.reason}{remedy}")
