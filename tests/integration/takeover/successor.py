"""The next daemon of a mount whose own has ended."""

import os
import signal
import time
from collections.abc import Sequence

from kvfs.base import control
from kvfs.base.errors import KvfsError
from tests.integration.harness import Node, wait_for_exit

DEADLINE_S = 60
WAIT = ("--takeover-s", "60")


def kill(node: Node) -> None:
    """Kills the daemon, and returns when another serves the mount."""
    assert node.pid is not None
    dead, watch = node.pid, os.pidfd_open(node.pid)
    try:
        os.kill(node.pid, signal.SIGKILL)
        wait_for_exit(watch)
    finally:
        os.close(watch)
    follow(node, [dead])


def follow(node: Node, dead: Sequence[int]) -> None:
    """Returns when a daemon serves that is none of these."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            status = control.call(node.store / "run" / "control.sock", "status")
        except KvfsError:
            status = None
        if status is not None and status["mount"] and status["pid"] not in dead:
            node.pid = int(status["pid"])
            return
        assert time.monotonic() < end, f"no daemon has followed:\n{node.log}"
        time.sleep(0.05)
