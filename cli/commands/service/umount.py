"""`kvfs umount`: take the mount of a running node away; the node goes on."""

from pathlib import Path

import click

from cli import node_requests, settings_options
from kvfs.base.control import NoNode
from kvfs.base.errors import Unavailable


@click.command("umount")
@settings_options.options("store")
@click.option("--lazy", is_flag=True, help="Also while it is in use: what is open is closed.")
def command(config_file: Path | None, store: Path | None, lazy: bool) -> None:
    """Unmount; the node goes on running."""
    config = settings_options.resolve(config_file, store=store)
    try:
        answer = node_requests.ask(
            config, "unmount", {"lazy": lazy}, deadline_s=node_requests.MOUNT_DEADLINE_S
        )
    except NoNode:
        raise Unavailable(
            f"no node runs on the store {config.store}; `kvfs down` takes away what a killed one "
            "left mounted"
        ) from None
    click.echo(f"unmounted {answer['mountpoint']}")
