"""A process that cleans up after a benchmark, whatever becomes of it.

The benchmark tells it of every mount, process and directory it makes. When the benchmark ends (also
by SIGKILL: its end of the pipe closes), mounts are detached, processes killed and directories
removed. A mount that hangs cannot take the run with it: a watch that is not renewed in time aborts
the mounts by force, upon which the hung call fails with an error and the run goes on.

It is a process and not a thread, because a page fault on a hung mapping holds the interpreter lock
of the benchmark.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from gateway.bare_directory import open_to_writers

_TERM_GRACE_S: Final = 5.0
_CLEAN_S: Final = 60.0


class Guard:
    """The benchmark's end: a context manager; leaving it waits until everything is cleaned, but no
    longer than a minute: the rest is cleaned behind the program, whose figures are not lost."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, *_: object) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
        try:
            self._process.wait(timeout=_CLEAN_S)
        except subprocess.TimeoutExpired:
            print("its files are still being removed", file=sys.stderr, flush=True)

    def mount(self, path: Path) -> None:
        self._tell(f"mount {path}")

    def process(self, pid: int) -> None:
        self._tell(f"process {pid}")

    def directory(self, path: Path) -> None:
        """To be removed with all it holds (after the mounts have gone)."""
        self._tell(f"directory {path}")

    def file(self, path: Path) -> None:
        """To be removed, if it is there."""
        self._tell(f"file {path}")

    def watch(self, seconds: float) -> None:
        """Unless called again within `seconds`, all mounts are aborted."""
        self._tell(f"watch {seconds}")

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(line + "\n")
        pipe.flush()


def unmount(path: Path) -> None:
    """Aborts and detaches what is mounted there, if anything; never blocks on the filesystem's
    daemon.
    """
    for _ in range(4):  # mounts may be stacked
        if not _is_mounted(path):
            return
        for command in (["umount", "-f"], ["umount", "-l"], ["fusermount3", "-uz"]):
            if _run([*command, str(path)]) and not _is_mounted(path):
                break


def _run(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _is_mounted(path: Path) -> bool:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    return any(line.split()[4] == str(path) for line in lines.splitlines())


class _Charge:
    """What the guard process has to clean."""

    def __init__(self) -> None:
        self.mounts: list[Path] = []
        self.directories: list[Path] = []
        self.files: list[Path] = []
        self.pidfds: list[int] = []
        self.watch_until: float | None = None

    def hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "mount":
            self.mounts.append(Path(rest))
        elif word == "directory":
            self.directories.append(Path(rest))
        elif word == "file":
            self.files.append(Path(rest))
        elif word == "process":
            with contextlib.suppress(ProcessLookupError):
                self.pidfds.append(os.pidfd_open(int(rest)))
        elif word == "watch":
            self.watch_until = time.monotonic() + float(rest)

    def abort_mounts(self) -> None:
        for path in self.mounts:
            unmount(path)

    def clean(self) -> None:
        self.abort_mounts()
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + _TERM_GRACE_S
        alive = set(self.pidfds)
        while alive and time.monotonic() < deadline:
            ended, _, _ = select.select(list(alive), [], [], max(0, deadline - time.monotonic()))
            alive -= set(ended)
        self._signal(signal.SIGKILL)
        for path in self.files:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in self.mounts:
            open_to_writers(path)
        for path in self.directories:
            if not any(mount.is_relative_to(path) and _is_mounted(mount) for mount in self.mounts):
                shutil.rmtree(path, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        for pidfd in self.pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)


def main() -> None:
    charge, unread = _Charge(), b""
    while True:
        wait_s = None
        if charge.watch_until is not None:
            wait_s = max(0.0, charge.watch_until - time.monotonic())
        readable, _, _ = select.select([0], [], [], wait_s)
        if not readable:
            print("benchmark: a call takes too long; aborting the mounts", file=sys.stderr)
            charge.abort_mounts()
            charge.watch_until = None
            continue
        received = os.read(0, 1 << 16)
        if not received:
            break
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            charge.hear(os.fsdecode(line))
    charge.clean()


if __name__ == "__main__":
    main()
