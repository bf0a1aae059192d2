"""`kvfs node`: the nodes of a cluster, who may become one, and how one is emptied and removed."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli import node_requests, settings_options
from cli.group import CommandGroup
from cli.presentation import output
from kvfs.base.config import Config
from kvfs.base.control import NoNode
from kvfs.base.errors import Invalid, NotFound, NotSupported
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.cluster.secrets import Secrets
    from kvfs.datastore.layout import Store

_REMOVE_S: Final = 60.0
"""Deadline of a removal, which looks at all files of the node first."""
_LEASES: Final = {
    "held": "held",
    "left": "none, it was stopped",
    "unknown": "not known: the engine is silent",
}


@click.group("node", cls=CommandGroup)
def command() -> None:
    """The nodes that share an engine.

    A node joins when it is started with --engine. The first one makes the cluster's secret; every
    other one must get it first: run `kvfs node secret` on a node of the cluster, and `kvfs node
    join` on the new one.
    """


def of(config: Config) -> dict[str, Any]:
    """Returns the running node's report of its cluster's nodes. Raises NotSupported (it is in
    none), Unavailable (none runs)."""
    try:
        report: dict[str, Any] = node_requests.ask(config, "nodes")
    except NotSupported:
        raise NotSupported(
            f"the node on {config.store} is in no cluster: "
            "`kvfs up --engine redis://HOST` joins one"
        ) from None
    return report


def _lines(report: dict[str, Any]) -> list[str]:
    head = f"cluster {report['cluster']}, seen from node {report['node']} ({report['name']})"
    text = table(report["nodes"]) + obstacles(report["nodes"])
    return [head, *text.splitlines()]


@command.command("list")
@settings_options.configured("store")
@output.facts(_lines)
def list_nodes(config: Config) -> dict[str, Any]:
    """Show the nodes of the cluster, as seen from this host."""
    return of(config)


@command.command("drain")
@click.argument("which", metavar="[NODE]", required=False)
@click.option("--stop", is_flag=True, help="Stop draining: give the node data again.")
@click.option("--status", is_flag=True, help="Tell how far the node of this host has come.")
@settings_options.configured("store")
@output.json_option
def drain(which: str | None, stop: bool, status: bool, config: Config, as_json: bool) -> None:
    """Move all data of a node to others, while it serves.

    NODE is a number or a name. `kvfs node list` shows it as 'draining', with its obstacles, and as
    'drained' when nothing is left: then it can be stopped and removed. Files of a cache for which
    no node has room are evicted. With --status, on the node's own host, it tells what is left, what
    was moved, how fast, and how long the rest takes; --json is for that.
    """
    if status:
        _tell_drain(config, which, as_json)
        return
    if not which:
        raise click.UsageError("which node? `kvfs node list` shows them")
    name = node_requests.ask(config, "drain", {"node": which, "stop": stop})
    click.echo(f"node {name} is given data again" if stop else f"node {name} is being emptied")


def _tell_drain(config: Config, which: str | None, as_json: bool) -> None:
    found = node_requests.ask(config, "status")
    cluster = found.get("cluster")
    if cluster is None:
        raise NotSupported(f"the node on {config.store} is in no cluster: it is not drained")
    own = next(each for each in cluster["nodes"] if each["number"] == cluster["node"])
    if which not in (None, str(own["number"]), own["name"]):
        raise Invalid(
            f"this is node {own['number']} ({own['name']}): ask on the host of node {which}, or see"
            " its obstacles in `kvfs node list`"
        )
    progress = found["replicas"].get("draining")  # a node of the version before tells none
    if as_json:
        told = {name: own[name] for name in ("number", "name", "state", "obstacle")}
        click.echo(json.dumps({**told, "progress": progress}))
        return
    so_far = "" if progress is None else f": {drained_so_far(progress)}"
    click.echo(f"node {own['number']} ({own['name']}) is {own['state']}{so_far}")
    click.echo(obstacles([own]), nl=False)


def drained_so_far(progress: dict[str, Any]) -> str:
    """Returns the progress of a drain, for people."""
    left_s = progress["left_s"]
    lasts = "nothing has moved yet" if left_s is None else f"some {left_s:,.0f} s to go"
    return (
        f"{progress['files_left']:,} files, {format_size(progress['bytes_left'])} are left;"
        f" {progress['files_moved']:,} files, {format_size(progress['bytes_moved'])} went in"
        f" {progress['passed_s']:,.0f} s ({format_size(progress['bytes_per_s'])}/s); {lasts}"
    )


@command.command("remove")
@click.argument("which", metavar="NODE")
@click.option(
    "--force", is_flag=True, help="Remove it even if it runs, or has data that no other node has."
)
@settings_options.configured("store")
def remove(which: str, force: bool, config: Config) -> None:
    """Forget a node that does not come back.

    NODE is a number or a name. This is refused while the node runs and was not drained, and if it
    has files of durable namespaces that no other node has.
    """
    name = node_requests.ask(
        config, "remove", {"node": which, "force": force}, deadline_s=_REMOVE_S
    )
    click.echo(f"node {name} is removed; what it left in the metadata is cleared up")


@command.command("finish-upgrade")
@settings_options.configured("store")
def finish_upgrade(config: Config) -> None:
    """Put the metadata into this version's form on all nodes.

    Until then nodes of this version and the one before work together, and each can go back to it.
    Afterwards the one before can join no more. It is refused while a node is of that version, also
    one that is away. Cut short, it is finished by the same command.
    """
    if node_requests.ask(config, "finish-upgrade"):
        click.echo("the metadata have the form of this version; earlier ones do not read them")
    else:
        click.echo("the metadata have the form of this version already")


@command.command("join")
@click.argument("file", type=click.File("r"), default="-")
@click.option(
    "--again", is_flag=True, help="Join as a new node, since this one was removed or is a copy."
)
@settings_options.configured("store", "engine", "secret_file")
def join(file: Any, again: bool, config: Config) -> None:
    """Take the secret of a cluster that the store is to join.

    FILE, or standard input, holds the output of `kvfs node secret` on another node. A running node
    takes a new secret too, within seconds.
    """
    import trio

    from kvfs.cluster import membership, node_identity, secrets
    from kvfs.datastore import layout

    if not config.engine:
        raise Invalid("which cluster? name the engine that its nodes share with --engine")
    if file.isatty():
        raise Invalid("the secret is not typed: pipe `kvfs node secret` of another node in")
    those = secrets.parse(file.read(secrets.LIMIT), "what was given")
    trio.run(membership.check_secrets, config.engine, those)
    store = layout.create_store(config.store)
    if again:
        _be_new(store)
    layout.guarded(store.root, lambda: node_identity.keep_secrets(_secret_file(config), those))
    click.echo(f"the store {store.root} has the secret of the cluster {those.cluster}")


@command.command("secret")
@click.option(
    "--rotate", "change", flag_value="rotate", help="Make a new secret, valid beside the old one."
)
@click.option(
    "--retire", "change", flag_value="retire", help="Make only the newest secret valid from now on."
)
@settings_options.configured("store")
def secret(change: str | None, config: Config) -> None:
    """Print the secret of the cluster, for `kvfs node join`.

    To replace it, run this with --rotate, pass its output to `kvfs node join` on every other node,
    then run it with --retire.
    """
    try:
        text = node_requests.ask(config, "secret", {"change": change})
    except NoNode:
        if change is not None:
            raise
        text = _read_secrets(config).as_text()
    if change != "retire":
        sys.stdout.write(text)


def table(nodes: list[dict[str, Any]]) -> str:
    """Returns a table for people, complete however narrow the terminal is."""
    rows = [("NODE", "NAME", "STATE", "LEASE", "PLACE", "PEER", "FREE", "OF", "VERSION")]
    rows += [_row(each) for each in nodes]
    return "".join(f"  {line}\n" for line in output.table(rows))


def obstacles(nodes: list[dict[str, Any]]) -> str:
    """Returns the obstacles that keep nodes from being drained, a line for each."""
    return "".join(
        f"  node {each['number']} ({each['name']}) still has {each['obstacle']}\n"
        for each in nodes
        if each["state"] == "draining" and each["obstacle"]
    )


def _row(shown: dict[str, Any]) -> tuple[str, str, str, str, str, str, str, str, str]:
    place = "/".join(part for part in (shown["zone"], shown["rack"]) if part)
    return (
        str(shown["number"]),
        shown["name"],
        shown["state"],
        _LEASES.get(shown["lease"], f"lost for {shown['silent_s']:.0f} s"),
        place or "-",
        shown["peer"] or "-",
        format_size(shown["free_bytes"]),
        format_size(shown["capacity_bytes"]),
        shown["version"],
    )


def _secret_file(config: Config) -> Path:
    from kvfs.cluster import node_identity

    return Path(config.secret_file) if config.secret_file else config.store / node_identity.SECRETS


def _read_secrets(config: Config) -> "Secrets":
    from kvfs.cluster import node_identity

    path = _secret_file(config)
    found = node_identity.read_secrets(path)
    if found is None:
        raise NotFound(f"there is no secret of a cluster in {path}: is this store a node of one?")
    return found


def _be_new(store: "Store") -> None:
    from kvfs.cluster import node_identity
    from kvfs.datastore import layout

    store.lock()
    try:
        if node_identity.which_node(store) is None:
            raise Invalid(
                f"the store {store.root} was never a node of a cluster: leave --again out"
            )
        layout.guarded(store.root, lambda: layout.be_new_node(store))
        node_identity.forget_node(store)
    finally:
        store.unlock()
