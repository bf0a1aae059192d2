"""`kvfs restart`: has another daemon go on with the mount of the running one."""

import contextlib
import subprocess
import sys
import time
from typing import Final

import click

from cli import node_requests, settings_options
from gateway.holder import mount_journal
from gateway.node_start import HAND_OVER, Successor
from kvfs.base.config import Config
from kvfs.base.errors import NotSupported, Unavailable

_FOLLOWED_S: Final = 60.0
_PAUSE_S: Final = 0.1


@click.command("restart")
@settings_options.configured("store")
def command(config: Config) -> None:
    """Replace the daemon; the mount and its files stay open.

    Needs the setting takeover_s. The other daemon is of the version that is installed now. The S3
    port stays open too, and what is asked for meanwhile waits; a service's is closed until systemd
    has started the next one. Settings of the mount itself stay as they are.
    """
    answer = node_requests.ask(config, "successor")
    if not mount_journal.can_go_on(int(node_requests.ask(config, "status")["pid"])):
        raise NotSupported(
            "the running node is of a version whose mount this one cannot go on with: stop the"
            " programs that use it, then `kvfs down` and `kvfs up`"
        )
    if not answer:
        _hand_over(config)
        return
    successor = Successor(answer["arguments"], answer["directory"])
    done = subprocess.run(
        [*successor.command(), HAND_OVER],
        cwd=successor.directory,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise Unavailable("no other daemon could be started; `kvfs status` shows what runs")
    sys.stdout.flush()


def _hand_over(config: Config) -> None:
    """Ends a daemon that a service manager replaces, and returns when the next one serves. Raises
    Unavailable."""
    before = node_requests.ask(config, "hand-over")["pid"]
    end = time.monotonic() + _FOLLOWED_S
    while time.monotonic() < end:
        with contextlib.suppress(Unavailable):
            status = node_requests.ask(config, "status")
            if status["pid"] != before and status["mount"]:
                click.echo(f"process {status['pid']} serves the mount in place of {before}")
                return
        time.sleep(_PAUSE_S)
    raise Unavailable(
        f"no daemon has followed within {_FOLLOWED_S:g} s; `kvfs status` says how long the mount"
        " waits, `systemctl status` what the service manager does"
    )
