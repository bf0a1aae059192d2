"""`kvfs down`: stop the node of a store, and take away what a killed one left mounted."""

import fcntl
import os
import time
from pathlib import Path
from typing import Final

import click

from cli import node, settings
from cli.up import refuse_s3
from kvfs.config import Config
from kvfs.errors import Unavailable

_POLL_S: Final = 0.02


@click.command("down")
@settings.options("store", "mount")
@click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait.")
@click.option("--s3", metavar="HOST:PORT", help="Not built yet: refused.")
def command(
    config_file: Path | None,
    store: Path | None,
    mount: Path | None,
    timeout_s: float,
    s3: str | None,
) -> None:
    """Stop the node that runs on the store, and wait until it has gone.

    Where none runs, a stale mount left by a kill is taken away; nothing to do is no error.
    """
    refuse_s3(s3)
    config = settings.resolve(config_file, store=store, mount=mount)
    stopped = _stop(config, timeout_s)
    recovered = _recover_mount(config)
    if stopped:
        click.echo(f"stopped the node on {config.store}")
    elif recovered:
        click.echo(f"took away the stale mount at {config.mount}")
    else:
        click.echo(f"no node runs on {config.store}")


def _stop(config: Config, timeout_s: float) -> bool:
    """Whether a node ran and has gone. Raises Unavailable when it does not go in time."""
    lock = config.store / "lock"
    if not is_locked(lock):
        return False
    end = time.monotonic() + timeout_s
    try:
        node.ask(config, "stop", deadline_s=timeout_s)
    except Unavailable:
        # It may be on its way out already, or hang: the lock tells.
        pass
    while is_locked(lock):
        if time.monotonic() > end:
            pid = lock.read_text("ascii").strip()
            raise Unavailable(
                f"the node on {config.store} (process {pid}) has not stopped "
                f"after {timeout_s:g} s; `kill -9 {pid}` and `kvfs down` end it"
            )
        time.sleep(_POLL_S)
    return True


def is_locked(path: Path) -> bool:
    """Whether a running node holds the lock file of a store."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _recover_mount(config: Config) -> bool:
    from gateway.fuse import device

    return device.recover_stale(str(config.mount))
