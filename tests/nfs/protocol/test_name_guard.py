"""The guard of NFS-Ganesha's names, around a program that makes the calls that Ganesha does."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.nfs import name_guard

REPOSITORY = Path(__file__).resolve().parents[3]
BEGIN = """
import ctypes, os, socket, sys
from gateway.nfs import name_guard
PR_SET_NO_NEW_PRIVS = 38
ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
channel = socket.socket(fileno=int(sys.argv[1]))
channel.set_inheritable(False)
name_guard.begin(channel)
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""
CALLS = """
import errno, json, os, sys
for line in sys.stdin:
    name, arguments, places = json.loads(line)
    at = os.open(".", os.O_RDONLY)
    try:
        getattr(os, name)(*arguments, **dict.fromkeys(places, at))
        print("done", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
    os.close(at)
"""


class Guarded:
    """A guarded program."""

    def __init__(self, place: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BEGIN, str(theirs.fileno()), CALLS],
                cwd=place,
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        name_guard.guard(ours, self.process.pid)

    def call(self, name: str, *arguments: object, at: tuple[str, ...] = ("dir_fd",)) -> str:
        """What a function of `os` came to, relative to an open directory."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, arguments, at]) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").touch()
    made = Guarded(tmp_path)
    with made.process:
        yield made
        made.process.kill()


BOTH = ("src_dir_fd", "dst_dir_fd")


def test_names_pass(guarded: Guarded, tmp_path: Path) -> None:
    assert guarded.call("stat", "d") == "done"
    assert guarded.call("stat", "none") == "ENOENT"
    assert guarded.call("stat", "n" * 255) == "ENOENT"
    assert guarded.call("open", "file", os.O_CREAT | os.O_WRONLY) == "done"
    assert guarded.call("mkdir", "made") == "done"
    assert guarded.call("rename", "file", "moved", at=BOTH) == "done"
    assert guarded.call("link", "moved", "linked", at=BOTH) == "done"
    assert guarded.call("unlink", "moved") == "done"
    assert guarded.call("symlink", "../any/where", "symlink") == "done"
    assert sorted(os.listdir(tmp_path)) == ["d", "linked", "made", "symlink"]


def test_paths_are_refused(guarded: Guarded, tmp_path: Path) -> None:
    for path in ("d/x", "d/..", "../..", "/", "/etc/passwd", "d/"):
        assert guarded.call("stat", path) == "EACCES"
        assert guarded.call("mkdir", path) == "EACCES"
        assert guarded.call("unlink", path) == "EACCES"
        assert guarded.call("symlink", "target", path) == "EACCES"
        assert guarded.call("open", path, os.O_CREAT | os.O_WRONLY) == "EACCES"
        for two in (("d", path), (path, "new")):
            assert guarded.call("rename", *two, at=BOTH) == "EACCES"
            assert guarded.call("link", *two, at=BOTH) == "EACCES"
    assert guarded.call("stat", "n" * 256) == "ENAMETOOLONG"
    assert os.listdir(tmp_path) == ["d"]


def test_own_files_have_paths(guarded: Guarded, tmp_path: Path) -> None:
    assert guarded.call("stat", "/etc/passwd", at=()) == "done"
    assert guarded.call("mkdir", str(tmp_path / "d" / "own"), at=()) == "done"
    assert guarded.call("rename", "d/own", "d/other", at=()) == "done"
