"""`kvfs namespace`: make, change, show and remove the top-level directories and their policies."""

import grp
import os
import pwd
import stat
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from cli import node_requests, open_store, settings_options
from cli.commands.admin import namespace_policy, nodes
from cli.group import CommandGroup
from cli.presentation import output
from kvfs.base.config import Config
from kvfs.base.errors import Invalid, NotSupported, Unavailable
from kvfs.base.units import format_size

if TYPE_CHECKING:
    from kvfs.meta.engine import Transaction
    from kvfs.tree.namespaces import ListedNamespace

_PERMISSIONS = 0o7777


class OwnerIds(NamedTuple):
    """User and group ids, None if not given."""

    uid: int | None
    gid: int | None


def _policy_options(function: Any) -> Any:
    for option in (
        click.option("--mode", metavar="OCTAL", help="Permission bits of the directory."),
        click.option("--owner", metavar="USER[:GROUP]", help="Owner of the directory."),
    ):
        function = option(function)
    return namespace_policy.options(function)


@click.group("namespace", cls=CommandGroup)
def command() -> None:
    """Namespaces: the top-level directories and their policies.

    A namespace made by mkdir on the mount is durable: nothing in it is ever dropped.
    """


@command.command("create")
@click.argument("name", type=click.UNPROCESSED)
@_policy_options
@settings_options.configured("store")
def create(
    name: str,
    config: Config,
    owner: str | None,
    mode: str | None,
    **flags: object,
) -> None:
    """Make a namespace. Default: durable, no limit of its own, owned by the caller, mode 0755."""
    from kvfs.meta.records import namespace_root
    from kvfs.tree import namespaces

    wanted = namespace_policy.take(flags)
    namespace_policy.require(config, wanted)
    raw = open_store.namespace_name(os.fsencode(name))
    who = _parse_owner(owner)
    bits = 0o755 if mode is None else _parse_mode(mode)
    uid = os.getuid() if who.uid is None else who.uid
    gid = os.getgid() if who.gid is None else who.gid
    with open_store.engine_of(config) as engine:
        number = engine.transact_now(
            lambda t: namespaces.create(
                t, raw, now=time.time_ns(), mode=bits, uid=uid, gid=gid, **wanted
            )
        )
    open_store.tell_node(config, raw, namespace_root(number))
    click.echo(f"made the {wanted.get('kind') or 'durable'} namespace /{name.strip('/')}")


@command.command("set")
@click.argument("name", type=click.UNPROCESSED)
@_policy_options
@settings_options.configured("store")
def set_(
    name: str,
    config: Config,
    owner: str | None,
    mode: str | None,
    **flags: object,
) -> None:
    """Change the settings that are given as options, and nothing else."""
    from kvfs.meta.records import namespace_root
    from kvfs.tree import inodes, namespaces

    wanted = namespace_policy.take(flags)
    if not wanted and owner is None and mode is None:
        raise click.UsageError(
            f"nothing to change: give {', '.join(namespace_policy.SHOWN)}, --owner or --mode"
        )
    namespace_policy.require(config, wanted)
    raw = open_store.namespace_name(os.fsencode(name))
    who = _parse_owner(owner)
    changes = inodes.AttributeChanges(
        mode=None if mode is None else _parse_mode(mode), uid=who.uid, gid=who.gid
    )

    away = _away(config) if wanted.get("coherence") not in (None, "peer") else None

    def change(t: "Transaction") -> int:
        number, before = namespaces.by_name(t, raw)
        namespaces.set_policy(t, number, now=time.time_ns(), **wanted)
        if away is not None and namespaces.get(t, number).ends_peer and not before.ends_peer:
            raise Unavailable(away)
        if changes != inodes.AttributeChanges():
            inodes.set_attributes(t, namespace_root(number), changes, time.time_ns())
        return number

    if wanted.get("coherence") == "peer":
        _gather(config, raw)
    with open_store.engine_of(config) as engine:
        number = engine.transact_now(change)
    open_store.tell_node(config, raw, namespace_root(number))


def _gather(config: Config, raw: bytes) -> None:
    """Has a namespace leave its own shard: those of peers are together."""
    from kvfs.tree import namespaces

    def found(t: "Transaction") -> int:
        number, _ = namespaces.by_name(t, raw)
        return number if namespaces.is_apart(t, number) else 0

    with open_store.engine_of(config) as engine:
        number = engine.read_now(found)
    if number:
        node_requests.ask(
            config, "gather", {"namespace": number}, deadline_s=node_requests.COPYING_S
        )


def _away(config: Config) -> str | None:
    """Returns what is to be said of a node that is away, without which a namespace does not end
    being peer; None if all are there."""
    try:
        members: list[dict[str, Any]] = nodes.of(config)["nodes"]
    except NotSupported:
        return None
    for each in members:
        if each["lease"] != "held" and each["state"] != "removed":
            number = each["number"]
            return (
                f"node {number} ({each['name']}) is away, and may have files of the namespace:"
                " start it, or let it go with what it has:"
                f" `kvfs node remove {number}`"
            )
    return None


@command.command("remove")
@click.argument("name", type=click.UNPROCESSED)
@settings_options.configured("store")
def remove(name: str, config: Config) -> None:
    """Remove an empty namespace."""
    from kvfs.meta.records import namespace_root
    from kvfs.tree import namespaces

    raw = open_store.namespace_name(os.fsencode(name))
    with open_store.engine_of(config) as engine:
        number = engine.transact_now(lambda t: namespaces.remove(t, raw, time.time_ns()))
    open_store.tell_node(config, raw, namespace_root(number))


def _all_facts(facts: dict[str, Any]) -> list[str]:
    shown = {**_readable(facts), **_of_several(facts)}
    return [f"{key:<12}{value}" for key, value in shown.items()]


@command.command("show")
@click.argument("name", type=click.UNPROCESSED)
@output.facts(_all_facts)
@settings_options.configured("store")
def show(name: str, config: Config) -> dict[str, Any]:
    """Show one namespace: policy, owner, usage."""
    raw = open_store.namespace_name(os.fsencode(name))
    with open_store.engine_of(config) as engine:
        return engine.read_now(lambda t: _facts_of(t, raw))


def _rows(all_facts: list[dict[str, Any]]) -> list[str]:
    header = ["NAME", "KIND", "COHERENCE", "CAPACITY", "EVICTION", "OWNER", "MODE", "USED", "FILES"]
    return output.table([header, *(list(_readable(facts).values()) for facts in all_facts)])


@command.command("list")
@output.facts(_rows)
@settings_options.configured("store")
def list_(config: Config) -> list[dict[str, Any]]:
    """List all namespaces."""
    from kvfs.tree import namespaces

    with open_store.engine_of(config) as engine:
        return engine.read_now(lambda t: [_facts(t, each) for each in namespaces.list_all(t)])


def _facts_of(t: "Transaction", name: bytes) -> dict[str, Any]:
    from kvfs.tree import namespaces

    number, _ = namespaces.by_name(t, name)
    return _facts(t, namespaces.listed(t, number))


def _facts(t: "Transaction", listed: "ListedNamespace") -> dict[str, Any]:
    from kvfs.cluster import node_records
    from kvfs.meta.records import namespace_root
    from kvfs.tree import inodes

    top = inodes.read_inode(t, namespace_root(listed.id))
    return {
        "name": listed.namespace.name.decode(errors="backslashreplace"),
        **namespace_policy.facts(listed.namespace),
        "uid": top.uid,
        "gid": top.gid,
        "mode": f"{stat.S_IMODE(top.mode):04o}",
        "used_bytes": listed.usage.bytes + listed.elsewhere.bytes,
        "inodes": listed.usage.inodes + listed.elsewhere.inodes,
        "coherence_becomes": listed.namespace.switches_to,
        "coherence_waits_for": node_records.changing_coherence(t, listed.id),
    }


def _readable(facts: dict[str, Any]) -> dict[str, str]:
    return {
        "name": f"/{facts['name']}",
        "kind": facts["kind"],
        "coherence": facts["coherence"] + _unfinished(facts),
        "capacity": namespace_policy.shown_capacity(facts["capacity_bytes"]),
        "eviction": facts["eviction"] or "-",
        "owner": f"{_user_name(facts['uid'])}:{_group_name(facts['gid'])}",
        "mode": facts["mode"],
        "used": format_size(facts["used_bytes"]),
        "files": str(facts["inodes"]),
    }


def _of_several(facts: dict[str, Any]) -> dict[str, str]:
    """Returns the facts that `list` has no room for."""
    return {
        "media": ",".join(facts["media"]) or "-",
        "cold": "on" if facts["cold"] else "off",
        "replicas": str(facts["replicas"]),
        "acknowledge": facts["acknowledge"],
        "locks": facts["locks"],
    }


def _unfinished(facts: dict[str, Any]) -> str:
    if not facts["coherence_becomes"]:
        return ""
    nodes = ", ".join(f"node {each}" for each in facts["coherence_waits_for"])
    return f" (not finished: waits for {nodes or 'its last step'})"


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _parse_mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= _PERMISSIONS:
        raise Invalid(f"'{text}' is not a mode; write it in octal, like 0755")
    return mode


def _parse_owner(text: str | None) -> OwnerIds:
    if text is None:
        return OwnerIds(None, None)
    user, colon, group = text.partition(":")
    try:
        uid = (int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid) if user else None
        gid = (int(group) if group.isdigit() else grp.getgrnam(group).gr_gid) if group else None
    except KeyError as error:
        raise Invalid(f"--owner {text}: {error.args[0]}") from None
    if (uid is None and gid is None) or (colon and not group):
        raise Invalid(f"--owner {text}: write USER, USER:GROUP or :GROUP")
    return OwnerIds(uid, gid)
