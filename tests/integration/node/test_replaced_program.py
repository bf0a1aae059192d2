"""The program is replaced beneath a running node: what the node starts from then on is another
version's, and says so."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gateway.nfs import jail_process
from kvfs.transfer.rdma import engine_process
from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.harness import ROOT, Node, best_mode, watchdog_of

_PACKAGES: Final = ("kvfs", "gateway", "s3api", "gds", "cli")
_REPLACED: Final = "the program was replaced beneath the running node"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A copy of this program, which a test may replace."""
    for name in _PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "program" / name, ignore=ignored)
    return tmp_path / "program"


@pytest.fixture
def node(program: Path) -> Iterator[Node]:
    made = Node.make(best_mode(), "--s3", "127.0.0.1:0", "--s3-workers", "1")
    made.inside = ("env", f"PYTHONPATH={program}")
    start(made)
    yield made
    made.remove()


def replace(file: Path) -> None:
    """With one whose messages are of the next version."""
    text, count = re.subn(
        r"^(VERSION.*) = (\d+)$",
        lambda m: f"{m[1]} = {int(m[2]) + 1}",
        file.read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    file.write_text(text)


def test_another_version_s_worker_says_why_it_does_not_serve(node: Node, program: Path) -> None:
    replace(program / "s3api" / "server" / "worker_messages.py")
    (worker,) = workers_of(node)
    os.kill(worker, signal.SIGKILL)
    said = f"{_REPLACED}, which gives its S3 workers plans of version 1; this one reads 2: restart"
    wait_until(lambda: said in node.log, "the worker says it")
    assert "Traceback" not in node.log


def test_another_version_s_watchdog_is_not_started_again(node: Node, program: Path) -> None:
    assert node.pid is not None
    replace(program / "gateway" / "watchdog_process.py")
    os.kill(watchdog_of(node.pid), signal.SIGKILL)
    said = f"{_REPLACED}: nobody ends the mount {node.mount} should the node die; restart"
    wait_until(lambda: said in node.log, "the node says it")
    assert "Traceback" not in node.log
    assert (node.mount / "models").is_dir()


def test_another_version_s_transfer_process_says_it() -> None:
    node, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = (str(theirs.fileno()), "0", "0", "127.0.0.1", str(engine_process.VERSION - 1))
    command = [sys.executable, "-m", engine_process.__name__, *told]
    with node, theirs:
        subprocess.run(command, cwd=ROOT, pass_fds=[theirs.fileno()], timeout=60, check=True)
        assert node.recv(1 << 16).decode() == f"!{_REPLACED}: restart the node"


def test_another_version_s_jail_says_it() -> None:
    told = (str(ROOT), str(jail_process.VERSION - 1), "what", "else", "there", "was")
    command = [sys.executable, "-I", "-S", "-c", jail_process.BEGIN, *told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert f"{_REPLACED}: restart the node" in done.stderr
    assert "Traceback" not in done.stderr


def workers_of(node: Node) -> list[int]:
    pids: list[int] = node.status()["s3"]["workers"]
    return pids
