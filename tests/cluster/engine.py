"""The metadata server of a cluster: a redis-server on a host of its own, which keeps what it was
told on its disk."""

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, Final

from tests.cluster.network import Network
from tests.cluster.waiting import end_all, wait_until
from tests.contract.redis_servers import ask, program

HOST: Final = "engine"
PORT: Final = 6379
_PATIENCE_S: Final = 60.0


class Engine:
    """It goes on when the process that started it ends; another one finds it again."""

    def __init__(self, directory: Path, network: Network, fsync: str = "always") -> None:
        """With another `fsync` a kill may lose what it answered while the disk was slow."""
        self.directory = directory
        self._fsync = fsync
        self._network = network

    @property
    def url(self) -> str:
        return f"redis://{self._network.address(HOST)}:{PORT}"

    def is_running(self) -> bool:
        return bool(self._network.processes(HOST))

    def start(self) -> None:
        """Does nothing where it runs; returns when it has loaded what it kept."""
        if not self.is_running():
            self._start()
        wait_until(self._answers, "the engine answers", _PATIENCE_S)

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [
            *(*self._network.inside(HOST), program("redis-server")),
            *("--bind", self._network.address(HOST), "--port", str(PORT)),
            *("--protected-mode", "no", "--dir", str(self.directory)),
            *("--unixsocket", str(self.directory / "s"), "--logfile", str(self.directory / "log")),
            *("--save", "", "--appendonly", "yes", "--appendfsync", self._fsync),
            *("--daemonize", "yes"),
        ]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        wait_until(self.is_running, "the engine's process is there", _PATIENCE_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.call("PING") == "PONG")
        assert self.is_running(), (self.directory / "log").read_text()[-2000:]
        return False

    def kill(self) -> None:
        end_all(lambda: self._network.processes(HOST), signal.SIGKILL)

    def stop(self) -> None:
        """In order: what it acknowledged is on its disk."""
        end_all(lambda: self._network.processes(HOST), signal.SIGTERM)

    def signal(self, number: int) -> None:
        for pid in self._network.processes(HOST):
            os.kill(pid, number)

    def call(self, *command: str | bytes | int) -> Any:
        """What it answers; an error is returned as text. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.connect(str(self.directory / "s"))
            return ask(connection, *command)
