"""The commands that move files, beside a running node and without one."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Node, best_mode, kvfs

MODE = best_mode()
MAIN = "from cli.main import main; main()"
ODD = b"not utf-8 \xff\xfe"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node.make(MODE)
    made.up()
    yield made
    made.remove()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "local.bin"
    path.write_bytes(os.urandom(300_000))
    path.chmod(0o640)
    return path


def run(node: Node, *arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
    """The command line with arguments and output as bytes."""
    return subprocess.run(
        [sys.executable, "-c", "from cli.main import main; main()", *arguments],
        env={**os.environ, "KVFS_STORE": str(node.store), "KVFS_CONFIG": os.devnull},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def good(node: Node, *arguments: str | bytes) -> bytes:
    done = run(node, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(node: Node, *arguments: str | bytes) -> tuple[int, bytes]:
    done = run(node, *arguments)
    assert done.returncode != 0
    assert done.stderr.count(b"\n") == 1, done.stderr
    return done.returncode, done.stderr


def test_what_is_put_is_on_the_mount_and_back(node: Node, local: Path, tmp_path: Path) -> None:
    good(node, "put", str(local), "/models/weights")
    there = node.mount / "models" / "weights"
    assert there.read_bytes() == local.read_bytes()
    assert there.stat().st_mode & 0o777 == 0o640
    good(node, "get", "/models/weights", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == local.read_bytes()


def test_put_replaces_atomically_unless_it_must_not(node: Node, local: Path) -> None:
    target = node.mount / "models" / "replaced"
    target.write_bytes(b"old")
    with open(target, "rb") as reader:
        code, message = refused(node, "put", "--exclusive", str(local), "/models/replaced")
        assert code == 4
        assert b"/models/replaced" in message
        good(node, "put", str(local), "/models/replaced")
        assert reader.read() == b"old"
    assert target.read_bytes() == local.read_bytes()


def test_a_directory_as_target_keeps_the_name(node: Node, local: Path, tmp_path: Path) -> None:
    code, _ = refused(node, "put", str(local), "/cache/new/dir/")
    assert code == 3
    good(node, "put", "--parents", str(local), "/cache/new/dir/")
    assert (node.mount / "cache/new/dir/local.bin").read_bytes() == local.read_bytes()
    (tmp_path / "into").mkdir()
    good(node, "get", "/cache/new/dir/local.bin", str(tmp_path / "into"))
    assert (tmp_path / "into" / "local.bin").read_bytes() == local.read_bytes()


def test_pipes_at_both_ends(node: Node, local: Path) -> None:
    script = (
        f"cat {local} | {sys.executable} -c 'from cli.main import main; main()' put - /cache/piped"
        f" && {sys.executable} -c 'from cli.main import main; main()' get /cache/piped - | cat"
    )
    done = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "KVFS_STORE": str(node.store), "KVFS_CONFIG": os.devnull},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == local.read_bytes(), done.stderr


def test_names_are_bytes(node: Node, local: Path) -> None:
    good(node, "put", str(local), b"/cache/" + ODD)
    assert ODD in os.listdir(os.fsencode(node.mount / "cache"))
    assert ODD in good(node, "ls", "/cache").splitlines()
    assert json.loads(good(node, "stat", "--json", b"/cache/" + ODD))["name"].startswith("not utf")
    good(node, "rm", b"/cache/" + ODD)
    assert ODD not in os.listdir(os.fsencode(node.mount / "cache"))


def test_a_terminal_gets_no_orders_from_names(node: Node) -> None:
    (node.mount / "cache" / "t").mkdir()
    (node.mount / "cache" / "t" / "a\x1b[2Jb").symlink_to("c\nd")
    assert good(node, "ls", "/cache/t") == b"a\x1b[2Jb\n"
    assert rb"c\nd" in good(node, "stat", "/cache/t/a\x1b[2Jb")
    assert rb"/cache/t/a\x1b[2Jc" in refused(node, "stat", "/cache/t/a\x1b[2Jc")[1]
    leader, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "ls", "-l", "/cache/t"],
        env={**os.environ, "KVFS_STORE": str(node.store), "KVFS_CONFIG": os.devnull},
        stdout=terminal,
        timeout=60,
        check=False,
    )
    os.close(terminal)
    told = os.read(leader, 1000)
    os.close(leader)
    assert done.returncode == 0
    assert told.endswith(rb"a\x1b[2Jb -> c\nd" + b"\r\n")


def test_ls_shows_directories_and_details(node: Node) -> None:
    top = node.mount / "cache" / "listed"
    (top / "sub").mkdir(parents=True)
    (top / "file").write_bytes(b"x" * 1234)
    (top / "link").symlink_to("file")
    assert good(node, "ls", "/cache/listed").splitlines() == [b"file", b"link", b"sub/"]
    long = good(node, "ls", "-l", "/cache/listed").splitlines()
    assert long[0].startswith(b"-rw")
    assert b" 1234 " in long[0]
    assert long[1].endswith(b"link -> file")
    assert long[2].endswith(b" sub/")
    facts = json.loads(good(node, "ls", "--json", "/cache/listed/file"))
    assert (facts["kind"], facts["size_bytes"]) == ("file", 1234)
    assert b"cache/" in good(node, "ls").splitlines()


def test_stat_agrees_with_the_mount(node: Node) -> None:
    file = node.mount / "models" / "agreed"
    file.write_bytes(b"y" * 5000)
    facts = json.loads(good(node, "stat", "--json", "/models/agreed"))
    seen = file.stat()
    assert facts["inode"] == seen.st_ino
    assert facts["size_bytes"] == seen.st_size
    assert facts["mtime_ns"] == seen.st_mtime_ns
    assert facts["mode"] == f"{seen.st_mode & 0o777:04o}"
    assert b"5000 bytes" in good(node, "stat", "/models/agreed")


def test_rm_takes_what_it_is_told_to(node: Node) -> None:
    top = node.mount / "cache" / "tree"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "c").touch()
    (top / "d").touch()
    code, message = refused(node, "rm", "/cache/tree")
    assert code == 4
    assert b"-r removes it" in message
    good(node, "rm", "/cache/tree/d")
    assert not (top / "d").exists()
    good(node, "rm", "-r", "/cache/tree")
    assert not top.exists()
    assert refused(node, "rm", "/cache/tree")[0] == 3
    good(node, "rm", "-f", "/cache/tree")


@pytest.mark.parametrize("path", ["/", "", "//", ".", "..", "/cache/..", "/cache/kept/../.."])
def test_rm_of_everything_is_refused_before_anything_is_gone(node: Node, path: str) -> None:
    kept = node.mount / "cache" / "kept"
    kept.mkdir(exist_ok=True)
    (kept / "file").touch()
    for force in ("-r", "-rf"):
        assert refused(node, "rm", force, path)[0] == 2
    assert (kept / "file").exists()
    assert (node.mount / "models").is_dir()


def test_what_is_not_there(node: Node, local: Path) -> None:
    for command in (["get", "/cache/none"], ["stat", "/cache/none"], ["ls", "/cache/none"]):
        code, message = refused(node, *command)
        assert code == 3
        assert b"/cache/none" in message
    code, message = refused(node, "put", str(local) + ".gone", "/cache/x")
    assert code == 3
    assert b"No such file" in message
    code, _ = refused(node, "put", str(local), "/no-such-namespace/x")
    assert code == 3


@pytest.mark.parametrize("destination", ["/dev/full", "-"])
def test_a_full_destination_is_named(node: Node, local: Path, destination: str) -> None:
    good(node, "put", str(local), "/models/full")
    with open("/dev/full", "wb") as output:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "get", "/models/full", destination],
            env={**os.environ, "KVFS_STORE": str(node.store), "KVFS_CONFIG": os.devnull},
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    named = b"standard output" if destination == "-" else b"/dev/full"
    assert done.returncode == 6
    assert done.stderr == b"kvfs: " + named + b": No space left on device\n"


@pytest.mark.parametrize("path", ["/x", "x", "/models/../x", "/../x"])
def test_a_file_at_the_top_level_is_refused(node: Node, local: Path, path: str) -> None:
    code, message = refused(node, "put", str(local), path)
    assert code == 5
    assert path.encode() + b": a file stands in a namespace" in message


def test_who_names_a_directory_is_told_how_to_put_a_file_into_it(node: Node, local: Path) -> None:
    good(node, "put", "-p", str(local), "/models/there/file")
    for path in ("/models", "/models/there"):
        code, message = refused(node, "put", str(local), path)
        assert code == 4
        assert f"{path} is a directory: write {path}/ to put the file into it".encode() in message
        good(node, "put", str(local), path + "/")


def test_a_long_transfer_shows_progress_on_a_terminal(node: Node) -> None:
    """Bytes that arrive slowly: a pipe whose writer waits until the bar has been seen."""
    leader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from cli.main import main; main()", "put", "-", "/cache/slow"],
        env={
            **os.environ,
            "KVFS_STORE": str(node.store),
            "KVFS_CONFIG": os.devnull,
            "TERM": "xterm",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    assert process.stdin is not None
    os.set_blocking(leader, False)
    seen = b""
    for _ in range(600):
        process.stdin.write(b"z" * 65536)
        process.stdin.flush()
        try:
            seen += os.read(leader, 65536)
        except BlockingIOError:
            pass
        if b"put -" in seen:
            break
        assert process.poll() is None
        subprocess.run(["sleep", "0.05"], check=True)
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    os.close(leader)
    assert b"put -" in seen


def test_all_of_it_works_without_a_node(local: Path) -> None:
    made = Node.make(MODE)
    try:
        made.up()
        made.down()
        good(made, "put", str(local), "/models/offline")
        assert good(made, "ls", "/models") == b"offline\n"
        made.up()
        assert (made.mount / "models" / "offline").read_bytes() == local.read_bytes()
    finally:
        made.remove()


def test_a_store_that_is_none_is_named(tmp_path: Path) -> None:
    done = kvfs("ls", "--store", str(tmp_path / "nothing"))
    assert done.returncode == 3
    assert "kvfs up --store" in done.stderr
