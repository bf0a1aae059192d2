"""`kvfs umount`: removes the mount of a running node; the node goes on."""

from pathlib import Path

import click

from cli import node_requests, settings_options
from kvfs.base.control import NoNode
from kvfs.base.errors import Unavailable


@click.command("umount")
@settings_options.options("store")
@click.option(
    "--lazy", is_flag=True, help="Unmount even while it is in use; open files are closed."
)
def command(config_file: Path | None, store: Path | None, lazy: bool) -> None:
    """Unmount; the node keeps running."""
    config = settings_options.resolve(config_file, store=store)
    try:
        answer = node_requests.ask(
            config, "unmount", {"lazy": lazy}, deadline_s=node_requests.MOUNT_DEADLINE_S
        )
    except NoNode:
        raise Unavailable(
            f"no node runs on the store {config.store}; `kvfs down` removes the mount that "
            "a killed one left"
        ) from None
    click.echo(f"unmounted {answer['mountpoint']}")
