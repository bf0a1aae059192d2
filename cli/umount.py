"""`kvfs umount`: take the mount of a running node away; the node goes on."""

from pathlib import Path

import click

from cli import node, settings


@click.command("umount")
@settings.options("store")
@click.option("--lazy", is_flag=True, help="Also while it is in use: what is open is closed.")
def command(config_file: Path | None, store: Path | None, lazy: bool) -> None:
    """Unmount; the node goes on running."""
    config = settings.resolve(config_file, store=store)
    answer = node.ask(config, "unmount", {"lazy": lazy}, deadline_s=node.MOUNT_DEADLINE_S)
    click.echo(f"unmounted {answer['mountpoint']}")
