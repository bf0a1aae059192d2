"""`kvfs nfs`: which namespaces are exported over NFS, to whom, and who is connected."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from cli import node_requests, open_store, settings_options
from cli.group import CommandGroup
from cli.presentation import output
from kvfs.base.config import Config
from kvfs.base.errors import NotFound, NotSupported, Unavailable

if TYPE_CHECKING:
    from gateway.nfs.exports import Exported, Groups, Squash

_ADOPT_S: Final = 60.0
"""The node waits for the other one's lease to end, and for NFS-Ganesha to start."""


@click.group("nfs", cls=CommandGroup)
def command() -> None:
    """NFS: exported namespaces and connected hosts.

    `kvfs up --nfs` serves them; nothing is exported before `kvfs nfs export`.
    """


@command.command("export")
@click.argument("name", type=click.UNPROCESSED)
@click.option(
    "--allow",
    multiple=True,
    metavar="NETWORK",
    help="Clients that may enter: a network like 10.1.0.0/16, or an address; repeatable (default: "
    "this host).",
)
@click.option(
    "--squash",
    type=click.Choice(["none", "root", "all"]),
    default="root",
    show_default=True,
    help="Users whose calls count as nobody's: none, root, or all.",
)
@click.option("--read-only", is_flag=True, help="Refuse changes through the export.")
@click.option(
    "--groups",
    type=click.Choice(["client", "server"]),
    default="client",
    show_default=True,
    help="Source of a user's groups: the client, which can name 16, or the server: this host's"
    " /etc/group (no directory service).",
)
@settings_options.configured("store")
def export(
    name: str,
    config: Config,
    allow: Sequence[str],
    squash: "Squash",
    read_only: bool,
    groups: "Groups",
) -> None:
    """Export a namespace as /NAME, or change how it is exported."""
    from gateway.nfs import exports

    raw = open_store.namespace_name(os.fsencode(name))
    wanted = exports.make(allow, squash=squash, read_only=read_only, groups=groups)
    with open_store.engine_of(config) as engine:
        engine.transact_now(lambda t: exports.put(t, raw, wanted, time.time_ns()))
    text = raw.decode()
    click.echo(f"exported /{text} to {', '.join(wanted.allow)}")
    served = _have_it_seen(config)
    if served is None:
        click.echo("no node that serves NFS runs on this store: `kvfs up --nfs` starts one")
        return
    for each in served["exports"]:
        if each["namespace"] == text and each["problem"]:
            raise Unavailable(f"/{text} cannot be served: {each['problem']}")


@command.command("unexport")
@click.argument("name", type=click.UNPROCESSED)
@settings_options.configured("store")
def unexport(name: str, config: Config) -> None:
    """Stop exporting a namespace; its files stay."""
    from gateway.nfs import exports

    raw = open_store.namespace_name(os.fsencode(name))
    with open_store.engine_of(config) as engine:
        engine.transact_now(lambda t: exports.take_away(t, raw, time.time_ns()))
    _have_it_seen(config)


def _exports(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"/{each['namespace']}  {'ro' if each['read_only'] else 'rw'}  squash {each['squash']}"
        f"  groups by {each['groups']}  {', '.join(each['allow'])}"
        for each in found
    ]


@command.command("list")
@output.facts(_exports)
@settings_options.configured("store")
def list_(config: Config) -> list[dict[str, Any]]:
    """List the exported namespaces, to whom they are exported and how."""
    from gateway.nfs import exports

    with open_store.engine_of(config) as engine:
        found = engine.read_now(exports.list_all)
    return [_row(each) for each in found]


def _connected(found: list[dict[str, Any]]) -> list[str]:
    return [
        f"{each['address']}  {each['connections']} connection{'s' * (each['connections'] != 1)}"
        for each in found
    ]


@command.command("clients")
@output.facts(_connected)
@settings_options.configured("store")
def clients(config: Config) -> list[dict[str, Any]]:
    """List the hosts that are connected now."""
    try:
        found = node_requests.ask(config, "nfs_clients")["clients"]
    except NotSupported:
        raise NotFound("the running node serves no NFS: start it with --nfs") from None
    return [{"address": address, "connections": count} for address, count in found.items()]


@command.command("adopt")
@click.argument("which", metavar="NODE")
@settings_options.configured("store")
def adopt(which: str, config: Config) -> None:
    """Let the clients of a node that has ended go on at this one.

    NODE is a number or a name. Version 4 clients take back what they have open and locked within
    the grace period, for which NFS is started anew here: move the node's address to this one right
    afterwards. Version 3 clients need no more than the address.
    """
    try:
        told = node_requests.ask(config, "nfs_adopt", {"node": which}, deadline_s=_ADOPT_S)
    except NotSupported as error:
        raise NotFound(f"nothing can be adopted: {error}") from None
    click.echo(
        f"{told['clients']} clients of node {told['name']} may return here within"
        f" {told['grace_s']} s"
    )


def _row(exported: "Exported") -> dict[str, Any]:
    how = exported.export
    return {
        "namespace": exported.name,
        "allow": list(how.allow),
        "squash": how.squash,
        "read_only": how.read_only,
        "groups": how.groups,
    }


def _have_it_seen(config: Config) -> dict[str, Any] | None:
    """Returns the node's report once the node of this store serves the present exports; None if no
    node serves NFS."""
    with contextlib.suppress(Unavailable, NotSupported):
        found: dict[str, Any] = node_requests.ask(config, "nfs_look")
        return found
    return None
