"""`kvfs down`: stops the node of a store, and removes a mount that a killed one left."""

import contextlib
import errno
import os
import select
import signal
import time
from pathlib import Path
from typing import Final

import click

from cli import node_requests, settings_options
from kvfs.base.config import Config
from kvfs.base.control import DEADLINE_S, NoNode
from kvfs.base.errors import Unavailable
from kvfs.datastore.kernel.ownership import require_directory, trusted
from kvfs.datastore.layout import is_locked

_POLL_S: Final = 0.02
_LOCKS: Final = Path("/proc/locks")


@click.command("down")
@settings_options.configured("store", "mount")
@click.option(
    "--timeout",
    "timeout_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait.",
)
def command(
    config: Config,
    timeout_s: float,
) -> None:
    """Stop the node of the store, and wait until it has gone.

    If none runs, a stale mount left by a kill is removed; nothing to do is no error.
    """
    stopped = stop(config, timeout_s)
    recovered = _recover_mount(config)
    if stopped:
        click.echo(f"stopped the node on {config.store}")
    elif recovered:
        click.echo(f"removed the stale mount at {config.mount}")
    else:
        click.echo(f"no node runs on {config.store}")


def stop(config: Config, timeout_s: float, *, ends_waiting: bool = True) -> bool:
    """Stops the node of a store; returns whether one ran, and has gone. Raises Unavailable when it
    does not go in time. `ends_waiting`: if none runs, ends a mount that waits for one, too.

    The node is asked before its lock is looked at: on a disk that has failed the lock cannot be
    read, and the socket still answers.
    """
    from gateway import mountpoint

    lock = config.store / "lock"
    mountpoint.end_dead(config.mount, lock)
    end = time.monotonic() + timeout_s
    pid: int | None = None
    try:
        answer_s = min(timeout_s / 2, DEADLINE_S)
        pid = node_requests.ask(config, "stop", deadline_s=answer_s).get("pid")
    except NoNode:
        # It may be on its way in, which may take long where it waits for its engine, or out: the
        # lock tells.
        if ends_waiting:
            _end_waiting(config)
        if not is_locked(lock):
            return False
        _ask_to_stop(lock)
    except Unavailable:  # it may hang, have no descriptor left for a caller, or be on its way out
        _ask_to_stop(lock)
    wait_for_end(config, end - time.monotonic(), pid)
    return True


def wait_for_end(config: Config, timeout_s: float, pid: int | None = None) -> None:
    """Returns when no node holds the store. `pid`: the node, if it was asked. Raises Unavailable
    when it does not go in time."""
    lock, end = config.store / "lock", time.monotonic() + timeout_s
    try:
        _wait_for_lock(lock, end)
        return
    except TimeoutError:
        pid_text = lock.read_text("ascii").strip()
    except OSError as error:
        if error.errno != errno.EIO or pid is None:
            raise
        if _has_ended(pid, end):
            return
        pid_text = str(pid)
    raise Unavailable(
        f"the node on {config.store} (process {pid_text}) has not stopped "
        f"after {timeout_s:g} s; `kill -9 {pid_text}` and `kvfs down` end it"
    )


def _end_waiting(config: Config) -> None:
    """Ends the wait of a mount for another daemon, which it would find or be given, and first of an
    NFS-Ganesha that serves it."""
    from gateway.holder import claim
    from gateway.nfs.jail_control import JailControl

    with contextlib.suppress(OSError):  # there is none
        JailControl(config.store / "run").kill()
    claim.give_up(config.store / "run")


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


def _holder_of(lock: Path) -> int | None:
    """Returns the process that holds the lock, as the kernel names it: a node that serves, or is
    starting or stopping. None: no process holds it, or one that cannot be seen from here (of
    another container). Raises OSError of the lock itself."""
    found = os.lstat(lock)
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in _LOCKS.read_text().splitlines():
        fields = line.split()
        # 7: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF; a waiting one has '->' before FLOCK
        if fields[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and fields[5] == where:
            return int(fields[4]) if int(fields[4]) > 0 else None
    return None


def _ask_to_stop(lock: Path) -> bool:
    """Sends SIGTERM to the node that holds the lock, which ends it in order, even while it waits
    for its engine. False: no node may be told. A process that holds the lock and did not write its
    number into it is no node: a backup, say. Raises AccessDenied: the store belongs to another
    user, who may have put another program's lock there."""
    require_directory(lock.parent, "the store", trusted())
    try:
        pid = _holder_of(lock)
        if pid is None or pid != int(lock.read_text("ascii")):
            return False
        process = os.pidfd_open(pid)
    except (OSError, ValueError, IndexError):
        return False
    try:
        if _holder_of(lock) != pid:  # it ended, and its number may be another's
            return False
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError:
        return False
    finally:
        os.close(process)
    return True
