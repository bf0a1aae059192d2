"""The backups that a node makes by itself: `kvfs backup create`, run as a process of low priority.

The place says when the last one was made, so a restart of the node makes none too early, and leaves
none out. What fails is reported, and tried again.
"""

import json
import logging
import os
import subprocess
import sys
import time
from typing import Any, Final

import trio

from kvfs.base.config import Config
from kvfs.base.errors import Unavailable
from kvfs.base.retry import Persistence
from kvfs.node.composition import Node

log = logging.getLogger(__name__)
_PROGRAM: Final = (
    "from kvfs.base import priority; priority.raise_to(19); from cli.main import main; main()"
)
_RETRY_S: Final = 300.0
_LEAST_S: Final = 1.0


class BackupSchedule:
    """A companion of the node (`gateway.service`). Cancelled: the process under way is ended; the
    next one goes on where it was."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._last: dict[str, Any] | None = None
        self._problem: str | None = None

    async def __call__(self, node: Node, *, task_status: trio.TaskStatus[None]) -> None:
        node.reports["backup"] = self._report
        task_status.started()
        making = Persistence(log.error, "no backup was made")
        every_s = float(self._config.backup_every_s)
        try:
            while True:
                if await making.attempt(self._make, min(every_s, _RETRY_S)):
                    await trio.sleep(self._wait_s(every_s))
        finally:
            del node.reports["backup"]

    async def _make(self) -> None:
        """Makes a backup, if it is time for one. Raises Unavailable."""
        config = self._config
        command = [sys.executable, "-c", _PROGRAM, "backup", "create", "--json"]
        command += ["--store", str(config.store), "--backup", config.backup]
        command += ["--backup-endpoint", config.backup_endpoint] if config.backup_endpoint else []
        command += ["--backup-keep", str(config.backup_keep)]
        command += ["--if-older-than", str(config.backup_every_s)]
        done = await trio.run_process(
            command,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            start_new_session=True,
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        )
        if done.returncode:
            self._problem = _last_line(done)
            raise Unavailable(self._problem)
        made = json.loads(done.stdout)
        if self._last is None or made["name"] != self._last["name"]:
            log.info("the newest backup in %s is %s", config.backup, made["name"])
        self._last, self._problem = made, None

    def _wait_s(self, every_s: float) -> float:
        """Returns the seconds until the next one is due."""
        made_ns = self._last["made_ns"] if self._last is not None else 0
        return min(max(made_ns / 1e9 + every_s - time.time(), _LEAST_S), every_s)

    async def _report(self) -> dict[str, Any]:
        return {
            "place": self._config.backup,
            "every_s": self._config.backup_every_s,
            "last": self._last,
            "problem": self._problem,
        }


def _last_line(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("kvfs: ") if lines else f"it ended with {done.returncode}"
