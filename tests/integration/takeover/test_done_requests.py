"""Requests that a daemon has done and not answered when it dies: they are answered as the first
time, and not done twice."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from gateway.fuse.codec.protocol import Op
from tests.conftest import LONG
from tests.integration.conftest import why_not
from tests.integration.harness import ROOT, Node, best_mode
from tests.integration.several import several
from tests.integration.takeover.successor import WAIT, follow

_VICTIM = """
import os, signal, subprocess, sys
from gateway.fuse.channel.dispatch import FastPath
from gateway.fuse.codec.protocol import IN_HEADER
from kvfs.meta.redis.log_requests import LogRequests

asked, serve, write, send = set(), FastPath._dispatch, os.write, LogRequests.send
moment, meanwhile = {moment!r}, {meanwhile!r}

def die():
    if meanwhile:
        subprocess.run(meanwhile, check=True, timeout=30)
    os.kill(os.getpid(), signal.SIGKILL)

def noted(path, n):
    _, opcode, unique, *_ = IN_HEADER.unpack_from(path._buffer)
    if opcode == {opcode} and b"victim" in bytes(path._buffer[:n]):
        asked.add(unique)
    serve(path, n)

def dying(fd, message):
    if moment == "answer" and int.from_bytes(message[8:16], "little") in asked:
        die()
    return write(fd, message)

async def sending(requests, mark, request):
    if asked and moment == "unsent":
        die()
    answer = await send(requests, mark, request)
    if asked and moment == "sent":
        die()
    return answer

FastPath._dispatch, os.write, LogRequests.send = noted, dying, sending
from cli.main import main
main()
"""


def _start(node: Node, opcode: int, moment: str = "answer", meanwhile: Sequence[str] = ()) -> None:
    """Starts a node that dies of the first such request: in place of its answer, when the engine
    has been asked for it (sent), or just before (unsent). `meanwhile`: a command that is run just
    before it dies."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    environment |= {"KVFS_S3": "off", "KVFS_CONFIG": os.devnull, "PYTHONPATH": str(ROOT)}
    program = _VICTIM.format(opcode=opcode, moment=moment, meanwhile=list(meanwhile))
    words = ["up", "--daemon", *node.place(), "--mode", node.mode, *node.flags, *WAIT]
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


def _setxattr(top: Path) -> None:
    os.setxattr(top / "there", "user.victim", b"x", os.XATTR_CREATE)
    assert os.getxattr(top / "there", "user.victim") == b"x"


def _removexattr(top: Path) -> None:
    os.setxattr(top / "there", "user.victim", b"x")
    os.removexattr(top / "there", "user.victim")
    assert os.listxattr(top / "there") == []


STEPS: dict[int, Callable[[Path], None]] = {
    Op.CREATE: _create,
    Op.MKDIR: _mkdir,
    Op.MKNOD: _mknod,
    Op.SYMLINK: _symlink,
    Op.LINK: _link,
    Op.UNLINK: _unlink,
    Op.RMDIR: _rmdir,
    Op.RENAME: _rename,
    Op.SETXATTR: _setxattr,
    Op.REMOVEXATTR: _removexattr,
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


MOMENTS: Final = [(opcode, moment) for opcode in STEPS for moment in ("answer", "sent", "unsent")]
SAMPLE: Final = [(Op.MKDIR, "sent"), (Op.RENAME, "unsent")]


@pytest.mark.parametrize(
    ("opcode", "moment"),
    MOMENTS if LONG else SAMPLE,
    ids=lambda given: given if isinstance(given, str) else Op(given).name,
)
def test_in_a_cluster_it_is_done_once_whenever_the_daemon_dies(opcode: int, moment: str) -> None:
    with several(1) as cluster:
        node = Node.make(best_mode(), *cluster.flags("victim"))
        cluster.nodes.append(node)
        _start(node, opcode, moment)
        first = node.pid
        assert first is not None
        top = node.mount / "models"
        (top / "there").touch()
        STEPS[opcode](top)
        if (opcode, moment) not in _MADE_HERE:
            follow(node, [first])  # it has died of it


_MADE_HERE = {(Op.CREATE, "sent"), (Op.CREATE, "unsent")}
"""O_EXCL asks the engine; what is made without it does not."""


@pytest.mark.parametrize("moment", ["sent", "unsent"])
def test_another_node_that_removes_the_name_meanwhile_has_removed_it(moment: str) -> None:
    """Of two that remove one file, one did, whatever the names say afterwards."""
    with several(1) as cluster:
        other = cluster.nodes[0]
        victim = other.mount / "models" / "victim"
        if moment == "sent":  # ours was first; the other's file of that name stays
            meanwhile = ["sh", "-c", f"echo theirs > {victim}"]
        else:
            meanwhile = ["rm", str(victim)]
        victim.write_bytes(b"x")
        node = Node.make(best_mode(), *cluster.flags("victim"))
        cluster.nodes.append(node)
        _start(node, Op.UNLINK, moment, meanwhile)
        ours = node.mount / "models" / "victim"
        if moment == "sent":
            ours.unlink()
            assert ours.read_bytes() == b"theirs\n"
        else:
            with pytest.raises(FileNotFoundError):
                ours.unlink()


MAKERS: Final[dict[int, tuple[str, Callable[[Path], None]]]] = {
    Op.MKDIR: ("rmdir", Path.mkdir),
    Op.SYMLINK: ("rm", lambda path: path.symlink_to("elsewhere")),
    Op.MKNOD: ("rm", os.mkfifo),
}


@pytest.mark.parametrize(
    "opcode", MAKERS if LONG else [Op.MKDIR, Op.SYMLINK], ids=lambda opcode: Op(opcode).name
)
def test_what_another_node_removed_meanwhile_is_not_made_again(opcode: int) -> None:
    remove, make = MAKERS[opcode]
    with several(1) as cluster:
        victim = cluster.nodes[0].mount / "models" / "victim"
        node = Node.make(best_mode(), *cluster.flags("victim"))
        cluster.nodes.append(node)
        _start(node, opcode, "sent", [remove, str(victim)])
        first = node.pid
        assert first is not None
        ours = node.mount / "models" / "victim"
        ours.with_name("before").mkdir()  # so that there are inode numbers, which are asked for too
        make(ours)
        follow(node, [first])
        assert not os.path.lexists(ours)
        assert not os.path.lexists(victim)
