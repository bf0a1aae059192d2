"""`kvfs mount` and `kvfs umount`: have a running node mount, and remove its mount."""

from pathlib import Path

import click

from cli import node_requests, settings_options
from gateway.mountpoint import hidden
from kvfs.base.config import Config
from kvfs.base.control import NoNode
from kvfs.base.errors import Unavailable


@click.command("mount")
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@settings_options.options("store", "mount")
def command(
    config_file: Path | None, directory: Path | None, store: Path | None, mount: Path | None
) -> None:
    """Mount a running node at DIRECTORY.

    Default: the setting `mount`, or that of the running node if none is given here.
    """
    config, origins = settings_options.explain(config_file, store=store, mount=directory or mount)
    params = {} if origins["mount"] == "default" else {"mountpoint": str(config.mount)}
    answer = node_requests.ask(config, "mount", params, deadline_s=node_requests.MOUNT_DEADLINE_S)
    reason = f" ({answer['reason']})" if answer["reason"] else ""
    click.echo(f"mounted {answer['mountpoint']}: {answer['mode']}{reason}")
    if answer["hides"]:
        click.echo(f"kvfs: {hidden(answer['mountpoint'], answer['hides'])}", err=True)


@click.command("umount")
@settings_options.configured("store")
@click.option(
    "--lazy", is_flag=True, help="Unmount even while it is in use; open files are closed."
)
def umount(config: Config, lazy: bool) -> None:
    """Unmount; the node keeps running."""
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
