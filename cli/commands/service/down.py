"""`kvfs down`: stops the node of a store, and removes a mount that a killed one left."""

import errno
import os
import select
import time
from pathlib import Path
from typing import Final

import click

from cli import node_requests, settings_options
from cli.commands.upkeep import lock_holder
from kvfs.base.config import Config
from kvfs.base.control import NoNode
from kvfs.base.errors import Unavailable
from kvfs.datastore.layout import is_locked

_POLL_S: Final = 0.02


@click.command("down")
@settings_options.options("store", "mount")
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait.",
)
def command(
    config_file: Path | None,
    store: Path | None,
    mount: Path | None,
    timeout_s: float,
) -> None:
    """Stop the node of the store, and wait until it has gone.

    If none runs, a stale mount left by a kill is removed; nothing to do is no error.
    """
    config = settings_options.resolve(config_file, store=store, mount=mount)
    stopped = _stop(config, timeout_s)
    recovered = _recover_mount(config)
    if stopped:
        click.echo(f"stopped the node on {config.store}")
    elif recovered:
        click.echo(f"removed the stale mount at {config.mount}")
    else:
        click.echo(f"no node runs on {config.store}")


def _stop(config: Config, timeout_s: float) -> bool:
    """Returns whether a node ran and has gone. Raises Unavailable when it does not go in time.

    The node is asked before its lock is looked at: on a disk that has failed the lock cannot be
    read, and the socket still answers.
    """
    from gateway import mountpoint

    lock = config.store / "lock"
    mountpoint.end_dead(config.mount, lock)
    end = time.monotonic() + timeout_s
    pid: int | None = None
    try:
        pid = node_requests.ask(config, "stop", deadline_s=timeout_s).get("pid")
    except NoNode:
        # It may be on its way in, which may take long where it waits for its engine, or out: the
        # lock tells.
        if not is_locked(lock):
            return False
        lock_holder.ask_to_stop(lock)
    except Unavailable:
        pass  # It may hang, or be on its way out.
    try:
        _wait_for_lock(lock, end)
        return True
    except TimeoutError:
        pid_text = lock.read_text("ascii").strip()
    except OSError as error:
        if error.errno != errno.EIO or pid is None:
            raise
        if _has_ended(pid, end):
            return True
        pid_text = str(pid)
    raise Unavailable(
        f"the node on {config.store} (process {pid_text}) has not stopped "
        f"after {timeout_s:g} s; `kill -9 {pid_text}` and `kvfs down` end it"
    )


def _wait_for_lock(lock: Path, end: float) -> None:
    """Returns when no node holds the store. Raises TimeoutError past `end`."""
    while is_locked(lock):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(_POLL_S)


def _has_ended(pid: int, end: float) -> bool:
    """Waits for the end of a process, until `end`."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        left = max(end - time.monotonic(), 0)
        return bool(select.select([process], [], [], left)[0])
    finally:
        os.close(process)


def _recover_mount(config: Config) -> bool:
    from gateway.fuse.channel import device

    return device.recover_stale(str(config.mount))
