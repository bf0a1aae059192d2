"""`kvfs mount`: has a running node without a mount mount."""

from pathlib import Path

import click

from cli import node_requests, settings_options
from gateway.mountpoint import hidden


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
