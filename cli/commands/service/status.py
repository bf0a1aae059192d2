"""`kvfs status`: the state of a running node, for people and machines."""

import json
from typing import Any, Final

import click

from cli import node_requests, settings_options
from cli.commands.admin import nodes
from kvfs.base.config import Config
from kvfs.base.control import NoNode
from kvfs.base.printable import printable
from kvfs.base.units import format_size

_DOORS: Final = {"mount": "by the mount", "s3": "by S3", "client": "by clients"}
_SILENT_S: Final = 2.0
"""Time after which a shard counts as silent: as long as a cache is believed."""
_EVICTED: Final = {
    "namespace_full": "namespace full",
    "store_full": "store full",
    "drained": "node drained",
}


@click.command("status")
@settings_options.configured("store")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config: Config, as_json: bool) -> None:
    """Show the running node: mount, data path, space, doors."""
    status = _ask(config)
    if as_json:
        click.echo(json.dumps(status))
    else:
        _show(status)


def _ask(config: Config) -> dict[str, Any]:
    """Raises NoNode, which tells of a mount that waits for a node."""
    from gateway.holder import claim

    try:
        status: dict[str, Any] = node_requests.ask(config, "status")
    except NoNode:
        found = claim.waiting(config.store / "run")
        if found is None:
            raise
        why = f"; the last start failed: {found.why}" if found.why else ""
        raise NoNode(
            f"no node serves the store {config.store}: its mount waits {found.left_s} s more for"
            f" one{why}"
        ) from None
    return status


def _show(status: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cli.commands.service.up import summary

    console = Console(highlight=False, soft_wrap=True)
    console.print(summary(status).split("\n", 1)[1].rstrip(), markup=False)
    console.print(
        f"  {'memory':<8}{format_size(status['rss_bytes'])} resident, "
        f"up for {status['uptime_s']:.0f} s\n",
        markup=False,
    )
    if lent := _lent(status):
        console.print(lent, markup=False)
    if (left := status["engine"]["reserve_left"]) < 1:
        console.print(
            "  the store's DISK IS FULL, or the metadata's map is: what adds is refused,"
            f" what removes goes on ({left:.0%} of the metadata's reserve is left)\n",
            markup=False,
        )
    if (found := status["engine"]["long_reader"]) is not None:
        console.print(f"  the metadata's file GROWS BY EVERY CHANGE: {found}\n", markup=False)
    for path in status["engine"]["damaged_metadata"]:
        console.print(
            f"  a start found the metadata's journal or base DAMAGED, the log says what it gave up:"
            f" {path} keeps it until you remove it\n",
            markup=False,
        )
    if (s3 := status.get("s3")) is not None:
        console.print(_served(s3), markup=False)
    if (nfs := status.get("nfs")) is not None:
        console.print(_exported(nfs), markup=False)
    if (backup := status.get("backup")) is not None:
        console.print(_backed_up(backup), markup=False)
    if (cluster := status.get("cluster")) is not None:
        console.print(_membership(cluster), markup=False)
        if status["engine"]["is_away"] or not cluster["holds_lease"]:
            console.print(_away(status["engine"]), markup=False)
        for shard in status["engine"].get("shards", ()):
            if shard["name"] and shard["silent_s"] > _SILENT_S:
                console.print(
                    f"  the ENGINE DOES NOT ANSWER for the namespace {shard['name']}, by"
                    f" {shard['server']}, for {shard['silent_s']:.0f} s: others go on",
                    markup=False,
                )
        if (refusal := status["engine"]["mirror_refusal"]) is not None:
            console.print(
                "  the metadata replica CANNOT TAKE what other nodes commit: strict"
                f" namespaces are errors, caches are misses ({refusal})",
                markup=False,
            )
        if status["engine"]["is_full"]:
            console.print(
                "  the engine's MEMORY IS FULL: what adds is refused, what removes goes on",
                markup=False,
            )
        if (names := cluster.get("names")) is not None:
            console.print(_names(names), markup=False)
        console.print(nodes.table(cluster["nodes"]), markup=False)
        if stuck := nodes.obstacles(cluster["nodes"]):
            console.print(stuck, markup=False)
    if not status["engine"].get("is_upgraded", True):  # a node of the version before has no answer
        remedy = (
            "`kvfs node finish-upgrade`, once all nodes are of this one"
            if cluster
            else "a start while no other program uses the store"
        )
        console.print(
            f"  the metadata have the form of the version before; what changes it: {remedy}",
            markup=False,
        )
    metadata = format_size(status["engine"]["bytes"])
    console.print(f"  metadata take {metadata} of the store's disk", markup=False)
    table = Table("NAMESPACE", "KIND", box=box.SIMPLE_HEAD)
    for name in ("USED", "CAPACITY", "FILES"):
        table.add_column(name, justify="right")
    for space in status["namespaces"]:
        table.add_row(
            space["name"],
            space["kind"],
            format_size(space["used_bytes"]),
            format_size(space["capacity_bytes"]) if space["capacity_bytes"] else "-",
            str(space["inodes"]),
        )
    console.print(table)
    if (written := status["former_writers"])["files"]:
        size = format_size(written["bytes"])
        console.print(
            f"  {written['files']} files, {size}, that programs write by a mount that is gone are "
            "being copied: who opens them waits\n",
            markup=False,
        )
    if (held := status["held"])["files"]:
        size = format_size(held["bytes"])
        console.print(f"  removed, but held open by programs: {held['files']} files, {size}")
    counters = status["counters"]
    for reason, meaning in _EVICTED.items():
        if files := counters[f"evicted_files_{reason}"]:
            size = format_size(counters[f"evicted_bytes_{reason}"])
            console.print(f"  evicted {files} files, {size}: {meaning}")
    for door, meaning in _DOORS.items():
        counts = status["misses"].get(door, {})
        missed = [
            f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count
        ]
        if missed:
            console.print(f"  looked for {meaning} and not there: {', '.join(missed)}")
    if refused := counters["refused_no_space"]:
        console.print(f"  refused {refused} creates: no space")
    if (replicas := status.get("replicas")) is not None:
        console.print(_replicated(replicas, status["cluster"]["nodes"]), markup=False)
    console.print(_scrubbed(status), markup=False)


def _lent_place(tier: dict[str, Any]) -> str:
    refusal = "" if tier["refusal"] is None else f"; it TAKES NO FILES: {tier['refusal']}"
    if tier["medium"].startswith("shared:"):
        name = tier["medium"].removeprefix("shared:")
        return f"  {'shared':<8}{tier['path']} ({name}){refusal}"
    used, capacity = format_size(tier["used_bytes"]), format_size(tier["capacity_bytes"])
    return f"  {tier['medium']:<8}{tier['path']}, {used} of {capacity}{refusal}"


def _lent(status: dict[str, Any]) -> str:
    """The places beside the store's directory."""
    lines = [_lent_place(each) for each in status["tiers"]]
    if (cold := status["cold"]) is not None:
        sent = format_size(status["counters"]["cold_sent_bytes"])
        fetched = format_size(status["counters"]["cold_fetched_bytes"])
        away = "" if cold["answers"] else "; it DOES NOT ANSWER"
        lines.append(f"  {'cold':<8}{cold['place']}, {sent} sent, {fetched} fetched{away}")
    return "\n".join([*lines, ""]) if lines else ""


def _membership(cluster: dict[str, Any]) -> str:
    """This node's place in its cluster."""
    lost = "; its LEASE IS LOST: it serves other nodes blocks of peer namespaces alone"
    lease = "" if cluster["holds_lease"] else lost
    return (
        f"  {'cluster':<8}{cluster['cluster']}, node {cluster['node']} ({cluster['name']}), "
        f"incarnation {cluster['incarnation']}{lease}{_transport(cluster['rdma'])}"
    )


def _names(names: dict[str, Any]) -> str:
    """Returns what is known of namespaces that are kept by their nodes."""
    found = (
        f"  {'names':<8}{names['own']} held here and {names['others']} on other nodes, of"
        f" namespaces that nodes keep; their table takes {format_size(names['table_bytes'])}"
    )
    if (homes := names["homes"]) is not None:
        share = f"{homes['ready']} of {homes['of']} ranges"
        found += f"; there are {homes['nodes']} homes of them, of which this one knows {share}"
        if homes["ready"] < homes["ranges"]:
            found += f" and will know {homes['ranges']}"
    if names["lagging"]:
        found += f"; {names['lagging']} nodes have told more than has come here"
    if names["is_full"]:
        found += "; the table is FULL: what else they hold is not found"
    if names.get("lacking_copies"):
        found += f"; {names['lacking_copies']} blocks lack copies that no node takes now"
    if names.get("names_differing"):
        last = names["differing"][-1]
        found += (
            f"; {names['names_differing']} names have other content on other nodes, the last"
            f" {printable(last['path'])} on node {last['node']}"
        )
    return found


def _transport(rdma: dict[str, Any] | None) -> str:
    """Returns the transport, if it is worth a word."""
    if rdma is None:
        return ""
    if not rdma["over"]:
        return f"; transport rdma, but {rdma['reason']}: over TCP"
    device = "" if rdma["over"] == "rdma" else ", without a device"
    return f"; transport rdma{device}"


def _replicated(replicas: dict[str, Any], others: list[dict[str, Any]]) -> str:
    """Returns the copies that files of the cluster lack, and this node's work on them."""
    counted = [each["lacking_files"] for each in others if each["lease"] == "held"]
    lacking = f"{sum(counted)} files lack" if counted else "it is not known how many files lack"
    lines = [
        f"  {lacking} copies; of those that this node has made, "
        f"{replicas['in_progress']} are under way, {replicas['waiting']} wait"
    ]
    if lost := replicas["without_holder"]:
        lines.append(f"  {lost} files of nodes that went are on no node that is there")
    if (draining := replicas.get("draining")) is not None:
        lines.append(f"  draining: {nodes.drained_so_far(draining)}")
    return "\n".join(lines)


def _scrubbed(status: dict[str, Any]) -> str:
    """The scrubber's work, and the contents of the quarantine."""
    counters, scrub = status["counters"], status["scrub"]
    lines = [
        f"  scrubbed {counters['scrubbed_files']} files, "
        f"{format_size(counters['scrubbed_bytes'])}"
        f"{', going on' if scrub['running'] else ''}; {counters['scrub_damaged']} were damaged"
    ]
    if (kept := status["quarantine"])["files"]:
        size = format_size(kept["used_bytes"])
        lines.append(f"  in quarantine: {kept['files']} data files, {size}; see kvfs quarantine")
    return "\n".join(lines)


def _exported(nfs: dict[str, Any]) -> str:
    """The namespaces that are exported over NFS, and whether they are served."""
    names = [f"/{each['namespace']}" for each in nfs["exports"]]
    what = ", ".join(names) if names else "nothing is exported"
    if nfs["is_serving"]:
        how = f"{nfs['clients']} clients, {nfs['connections']} connections"
    else:
        how = f"NOT SERVED: {nfs['problem']}"
    lines = [f"  {'nfs':<8}{nfs['endpoint']}: {what}; {how}, {nfs['restarts']} restarts"]
    lines += [
        f"  {'':<8}/{each['namespace']} is NOT SERVED: {each['problem']}"
        for each in nfs["exports"]
        if each["problem"]
    ]
    return "\n".join([*lines, ""])


def _away(engine: dict[str, Any]) -> str:
    loss = engine.get("loss")  # a node of the version before has none
    silent = f"{engine['silent_s']:.0f} s"
    what = f"DOES NOT ANSWER, for {silent}"
    if loss is not None:
        what = f"HAS LOST METADATA, which it had {silent} ago"
    told = (
        f"  the ENGINE {what}: strict namespaces are read as they were then (removed files, too),"
        " and take no changes; caches are misses"
    )
    return told if loss is None else f"{told}\n  {loss}"


def _backed_up(backup: dict[str, Any]) -> str:
    """The backups that the node makes."""
    last = backup["last"]
    done = f"the newest is {last['name']}, {last['files']:,} files" if last else "none is known yet"
    lines = [f"  {'backup':<8}{backup['place']}: {done}"]
    if backup["problem"]:
        lines.append(f"  {'':<8}NO BACKUP IS MADE: {backup['problem']}")
    return "\n".join([*lines, ""])


def _served(s3: dict[str, Any]) -> str:
    """The work of the S3 API."""
    sent, received = format_size(s3["sent_bytes"]), format_size(s3["received_bytes"])
    lines = [
        f"  {'s3':<8}{s3['requests']} requests, {sent} sent, {received} received, "
        f"{s3['connections']} connections",
        f"  {'':<8}{len(s3['workers'])} of {s3['wanted_workers']} workers, "
        f"{format_size(s3['rss_bytes'])} resident, {s3['restarts']} restarts\n",
    ]
    return "\n".join(lines)
