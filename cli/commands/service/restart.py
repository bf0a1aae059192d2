"""`kvfs restart`: has another daemon go on with the mount of the running one."""

import subprocess
import sys

import click

from cli import node_requests, settings_options
from gateway.holder import mount_journal
from gateway.node_start import HAND_OVER, Successor
from kvfs.base.config import Config
from kvfs.base.errors import NotSupported, Unavailable


@click.command("restart")
@settings_options.configured("store")
def command(config: Config) -> None:
    """Replace the daemon; the mount and its files stay open.

    Needs the setting takeover_s. The other daemon is of the version that is installed now. The S3
    port stays open too, and what is asked for meanwhile waits. Settings of the
    mount itself stay as they are.
    """
    answer = node_requests.ask(config, "successor")
    if not mount_journal.can_go_on(int(node_requests.ask(config, "status")["pid"])):
        raise NotSupported(
            "the running node is of a version whose mount this one cannot go on with: stop the"
            " programs that use it, then `kvfs down` and `kvfs up`"
        )
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
