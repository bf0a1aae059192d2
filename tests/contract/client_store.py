"""Stores for the tests of the Python API: with a node in a process of its own, or without."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import trio

from kvfs.admin.fsck import Fsck
from kvfs.base import control
from kvfs.base.config import Config
from kvfs.datastore.files import DataFiles
from kvfs.datastore.index import NAME, Index
from kvfs.datastore.layout import open_store
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.node import open_node
from tests import fork_server

IMPORTED = ("kvfs.client.blocking", "tests.fault.victim", "tests.fault.engine_writer")
"""By the server of which the programs here are forks."""
_LONGEST_S = 120.0
ROOT = Path(__file__).resolve().parent.parent.parent
_NODE = """
import sys, trio
from pathlib import Path
from kvfs.base.config import Config
from kvfs.node import open_node
from kvfs.base.units import parse_capacity

async def main():
    config = Config(store=Path(sys.argv[1]), capacity=parse_capacity(sys.argv[2]))
    async with open_node(config) as node:
        print("ready", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def make(root: Path) -> Path:
    """A store with the namespaces `cache` and `models`, as a node leaves it that stopped."""

    async def main() -> None:
        async with open_node(Config(store=root)):
            pass

    trio.run(main)
    return root


@contextlib.contextmanager
def sound(root: Path, *, beside_node: bool = False) -> Iterator[Path]:
    """A store that is made, and in which fsck finds nothing afterwards. `beside_node`: a node runs
    on it meanwhile."""
    make(root)
    with running_node(root) if beside_node else contextlib.nullcontext():
        yield root
    restart(root)
    assert problems(root) == []


def restart(root: Path) -> dict[str, int] | None:
    """Start and stop a node: what it had to mend."""

    async def main() -> dict[str, int] | None:
        async with open_node(Config(store=root)) as node:
            return node.recovery

    return trio.run(main)


@contextlib.contextmanager
def running_node(root: Path, capacity: str = "90%") -> Iterator[int]:
    """A node without a mount, in another process; its pid."""
    child = python(_NODE, str(root), capacity)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def python(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Run a program text in another interpreter, its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, env=_environment()
    )


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), inherited)))
    environment["KVFS_CONFIG"] = os.devnull
    return environment


def run(program: str, *arguments: str) -> bytes:
    """As `python`, to its end; what it printed."""
    code, output = _run_to_its_end(program, *arguments)
    assert code == 0, output
    return output


def run_killed(program: str, *arguments: str) -> bytes:
    """As `run`, for a program that kills itself."""
    code, output = _run_to_its_end(program, *arguments)
    assert code == -signal.SIGKILL, output
    return output


def _run_to_its_end(program: str, *arguments: str) -> tuple[int, bytes]:
    """Its exit code, and what it printed."""
    done = fork_server.run(IMPORTED, program, arguments, _environment(), _LONGEST_S)
    if done is None:
        child = python(program, *arguments)
        output, _ = child.communicate(timeout=_LONGEST_S)
        return child.returncode, output
    sys.stderr.write(done.stderr.decode(errors="replace"))
    return done.returncode, done.stdout


def problems(root: Path) -> list[str]:
    """What fsck finds; nobody may use the store."""
    store = open_store(root)
    engine, files = EmbeddedEngine(store.meta), DataFiles(store.data)
    try:
        found = Fsck(engine, files, Index(engine.database(NAME)), checksums=True).check()
        return [f"{each.kind}: {each.subject}: {each.detail}" for each in found]
    finally:
        files.close()
        engine.close()


def data_files(root: Path) -> int:
    """How many there are."""
    return sum(len(names) for _, _, names in os.walk(root / "data"))


def node_of(root: Path) -> dict[str, object]:
    """The status of the node that runs."""
    status = control.call(root / "run" / "control.sock", "status")
    assert isinstance(status, dict)
    return status
