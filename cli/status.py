"""`kvfs status`: what a running node does, for people and machines."""

import json
from pathlib import Path
from typing import Any

import click

from cli import node, settings
from kvfs.units import format_size


@click.command("status")
@settings.options("store")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(config_file: Path | None, store: Path | None, as_json: bool) -> None:
    """Show the running node: mount, fast path, space, evictions, S3."""
    config = settings.resolve(config_file, store=store)
    status = node.ask(config, "status")
    if as_json:
        click.echo(json.dumps(status))
    else:
        _show(status)


def _show(status: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cli.up import summary

    console = Console(highlight=False, soft_wrap=True)
    console.print(summary(status).split("\n", 1)[1].rstrip(), markup=False)
    console.print(
        f"  {'memory':<8}{format_size(status['rss_bytes'])} resident, "
        f"up for {status['uptime_s']:.0f} s\n",
        markup=False,
    )
    if (s3 := status.get("s3")) is not None:
        console.print(_served(s3), markup=False)
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
    counters = status["counters"]
    for reason, meaning in (("namespace_full", "namespace full"), ("store_full", "store full")):
        if files := counters[f"evicted_files_{reason}"]:
            size = format_size(counters[f"evicted_bytes_{reason}"])
            console.print(f"  evicted {files} files, {size}: {meaning}")
    if refused := counters["refused_no_space"]:
        console.print(f"  refused {refused} creates: no space")


def _served(s3: dict[str, Any]) -> str:
    """What the S3 API has done."""
    sent, received = format_size(s3["sent_bytes"]), format_size(s3["received_bytes"])
    lines = [
        f"  {'s3':<8}{s3['requests']} requests, {sent} sent, {received} received, "
        f"{s3['connections']} connections",
        f"  {'':<8}{len(s3['workers'])} of {s3['wanted_workers']} workers, "
        f"{format_size(s3['rss_bytes'])} resident, {s3['restarts']} restarts\n",
    ]
    return "\n".join(lines)
