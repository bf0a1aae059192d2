"""Runs real nodes for the tests: the command line as a subprocess, a real daemon, a real mount.

A `Node` owns a directory of its own with the store and the mountpoint in it. Whatever a test did to
the daemon (a SIGKILL included), `Node.remove` unmounts and deletes. Only processes that a node
started are ever signalled.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.root import COMMANDS
from gateway.bare_directory import open_to_writers
from gateway.fuse.channel.mode_probe import probe_modes
from kvfs.base import control
from tests import fork_server

ROOT = Path(__file__).resolve().parent.parent.parent
MODES = ("passthrough", "relay", "libfuse")
START_S = 120
CALL_S = 120
_MAIN = "from cli.main import main; main()"
_COMMANDS = (
    *sorted({module.partition(":")[0] for module in COMMANDS.values()}),
    *("gateway.fuse.mount", "gateway.nfs.serving", "s3api.server.companion"),
)
"""What commands import."""
_CLOSED: set[Path] = set()
"""Mountpoints, which their nodes close to writers."""


def open_mountpoints() -> None:
    """Whoever removes the directories of these tests can, also those of a test's own."""
    for each in _CLOSED:
        open_to_writers(each)


class CannotStart(Exception):
    """`kvfs up` refused; the message is what it printed."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def kvfs(
    *arguments: str, timeout_s: float = CALL_S, inside: Sequence[str] = (), given: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command line, of the running interpreter and this checkout; it serves no S3 unless it is
    told to. `inside` stands before the command and says where it runs; `given` is its input."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    environment["KVFS_S3"] = "off"
    environment["PYTHONPATH"] = str(ROOT)
    environment["KVFS_CONFIG"] = os.devnull
    if not inside and not given:
        done = fork_server.run(_COMMANDS, _MAIN, arguments, environment, timeout_s)
        if done is not None:
            texts = done.stdout.decode(), done.stderr.decode()
            return subprocess.CompletedProcess(done.args, done.returncode, *texts)
    return subprocess.run(
        [*inside, sys.executable, "-c", _MAIN, *arguments],
        cwd="/",
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def base_directory() -> str:
    """Where stores and mountpoints are made: `KVFS_TEST_BASE`, else the temporary directory."""
    return os.environ.get("KVFS_TEST_BASE", tempfile.gettempdir())


def best_mode() -> str:
    """The mode for tests that run in one only: the first that was picked and that this machine can
    do."""
    picked = os.environ.get("KVFS_TEST_MODES", ",".join(MODES)).split(",")
    able = {found.name for found in probe_modes(base_directory()) if found.available}
    return next((mode for mode in picked if mode in able), picked[0])


def is_mounted(path: Path) -> bool:
    with open("/proc/self/mountinfo", "rb") as table:
        points = {line.split()[4] for line in table}
    return os.fsencode(path).replace(b"\\", b"\\134").replace(b" ", b"\\040") in points


@dataclass
class Node:
    """A store, a mountpoint and, while it runs, the daemon between them."""

    mode: str
    home: Path
    flags: tuple[str, ...] = ()
    pid: int | None = None
    killed: list[int] = field(default_factory=list)
    inside: tuple[str, ...] = ()
    """What stands before the command that starts it, and says where it runs."""

    @classmethod
    def make(cls, mode: str, *flags: str) -> "Node":
        home = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir=base_directory())).resolve()
        home.chmod(0o755)  # other users reach the mount through it
        (home / "mnt").mkdir()
        return cls(mode, home, flags)

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def mount(self) -> Path:
        return self.home / "mnt"

    @property
    def log(self) -> str:
        path = self.store / "run" / "kvfs.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def up(self) -> "Node":
        """Start the daemon; returns when the mount answers. Raises CannotStart."""
        place = (*self.place(), "--mode", self.mode)
        done = kvfs("up", "--daemon", *place, *self.flags, timeout_s=START_S, inside=self.inside)
        if done.returncode:
            raise CannotStart(done.returncode, (done.stderr or done.stdout).strip())
        self.pid = int(control.call(self.store / "run" / "control.sock", "status")["pid"])
        _CLOSED.add(self.mount)
        return self

    def place(self) -> tuple[str, ...]:
        return "--store", str(self.store), "--mount", str(self.mount)

    def status(self) -> dict[str, Any]:
        status = control.call(self.store / "run" / "control.sock", "status")
        assert isinstance(status, dict)
        return status

    def down(self) -> None:
        """Stop it as a user does; the mount is gone afterwards."""
        done = kvfs("down", *self.place())
        assert done.returncode == 0, done.stderr
        assert not is_mounted(self.mount)
        self.pid = None

    def kill(self) -> None:
        """SIGKILL the daemon and wait until it is gone. The mount stays behind, stale."""
        assert self.pid is not None
        watch = os.pidfd_open(self.pid)
        try:
            os.kill(self.pid, signal.SIGKILL)
            wait_for_exit(watch)
        finally:
            os.close(watch)
        self.killed.append(self.pid)
        self.pid = None

    def remove(self) -> None:
        """Unmount and delete everything, whatever state the node is in."""
        if self.pid is not None:
            try:
                kvfs("down", *self.place())
            except subprocess.TimeoutExpired:
                pass
        if is_mounted(self.mount):
            subprocess.run(["umount", "-l", str(self.mount)], check=False, capture_output=True)
        if self.pid is not None and Path(f"/proc/{self.pid}").exists():
            self.kill()
        open_to_writers(self.mount)
        shutil.rmtree(self.home, ignore_errors=True)


@contextlib.contextmanager
def with_small_cache(capacity: int) -> Iterator[Node]:
    """A running node whose namespace `cache` holds so many bytes."""
    made = Node.make(best_mode())
    try:
        made.up()
        place = ("--store", str(made.store))
        done = kvfs("namespace", "set", "cache", "--capacity", str(capacity), *place)
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        made.remove()


def watchdog_of(pid: int) -> int:
    """The process that looks after the mount of a daemon."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (each / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/watchdog_process.py") for word in words):
                parent = (each / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    return int(each.name)
    raise LookupError(f"the daemon {pid} has no watchdog")


def wait_for_exit(pidfd: int, timeout_s: float = 30) -> None:
    ready, _, _ = select.select([pidfd], [], [], timeout_s)
    assert ready, "the process did not end"
