"""Requests that a daemon has done and not answered when it dies: they are answered as the first
time, and not done twice."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.fuse.codec.protocol import Op
from tests.integration.conftest import why_not
from tests.integration.harness import ROOT, Node, best_mode
from tests.integration.takeover.successor import WAIT, follow

_VICTIM = """
import os, signal, sys
from gateway.fuse.channel.dispatch import FastPath
from gateway.fuse.codec.protocol import IN_HEADER

asked, serve, write = set(), FastPath._dispatch, os.write

def noted(path, n):
    _, opcode, unique, *_ = IN_HEADER.unpack_from(path._buffer)
    if opcode == {opcode} and b"victim" in bytes(path._buffer[:n]):
        asked.add(unique)
    serve(path, n)

def dying(fd, message):
    if len(message) >= 16 and int.from_bytes(message[8:16], "little") in asked:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, message)

FastPath._dispatch, os.write = noted, dying
from cli.main import main
main()
"""


def _start(node: Node, opcode: int) -> None:
    """Starts a node that dies in place of its first answer to such a request."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    environment |= {"KVFS_S3": "off", "KVFS_CONFIG": os.devnull, "PYTHONPATH": str(ROOT)}
    program = _VICTIM.format(opcode=opcode)
    words = ["up", "--daemon", *node.place(), "--mode", node.mode, *WAIT]
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(why_not(node))
    node.pid = node.status()["pid"]


def _create(top: Path) -> None:
    with (top / "victim").open("xb", buffering=0) as file:
        file.write(b"content")
    assert (top / "victim").read_bytes() == b"content"


def _mkdir(top: Path) -> None:
    (top / "victim").mkdir()
    (top / "victim" / "within").touch()


def _mknod(top: Path) -> None:
    os.mknod(top / "victim", 0o100600)
    assert (top / "victim").read_bytes() == b""


def _symlink(top: Path) -> None:
    (top / "victim").symlink_to("elsewhere")
    assert os.readlink(top / "victim") == "elsewhere"


def _link(top: Path) -> None:
    os.link(top / "there", top / "victim")
    assert (top / "there").stat().st_nlink == 2


def _unlink(top: Path) -> None:
    os.link(top / "there", top / "victim")
    (top / "victim").unlink()
    assert (top / "there").stat().st_nlink == 1


def _rmdir(top: Path) -> None:
    (top / "victim").mkdir()
    (top / "victim").rmdir()
    assert not (top / "victim").exists()


def _rename(top: Path) -> None:
    (top / "there").rename(top / "victim")
    assert sorted(os.listdir(top)) == ["victim"]


STEPS: dict[int, Callable[[Path], None]] = {
    Op.CREATE: _create,
    Op.MKDIR: _mkdir,
    Op.MKNOD: _mknod,
    Op.SYMLINK: _symlink,
    Op.LINK: _link,
    Op.UNLINK: _unlink,
    Op.RMDIR: _rmdir,
    Op.RENAME: _rename,
}


@pytest.mark.parametrize("opcode", STEPS, ids=lambda opcode: Op(opcode).name)
def test_it_is_answered_as_the_first_time(opcode: int) -> None:
    node = Node.make(best_mode())
    try:
        _start(node, opcode)
        first = node.pid
        assert first is not None
        top = node.mount / "models"
        (top / "there").touch()
        STEPS[opcode](top)
        follow(node, [first])  # it has died of it
    finally:
        with contextlib.suppress(Exception):
            node.pid = node.status()["pid"]
        node.remove()
