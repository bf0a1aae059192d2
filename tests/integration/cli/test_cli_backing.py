"""`kvfs backing`: data files that stay under their names as long as somebody needs them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import AccessDenied
from kvfs.client import Client
from kvfs.client.mount.backing_file import lease
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs, with_small_cache
from tests.integration.posix import as_user
from tests.integration.several import several

MIB = 1 << 20
CAPACITY = 32 * MIB
MAIN = "from cli.main import main; main()"
BLOCK = b"kv" * (MIB // 2)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with with_small_cache(CAPACITY) as made:
        yield made


class Holding:
    """A running `kvfs backing`, and what it printed."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        assert process.stdout is not None
        self.data_file = Path(process.stdout.readline().decode().removesuffix("\n"))


@contextlib.contextmanager
def holding(node: Node, *arguments: str, stdin: int = subprocess.PIPE) -> Iterator[Holding]:
    """Its standard input is a pipe, where nothing else is said."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "backing", *arguments],
        env={**os.environ, "KVFS_STORE": str(node.store), "KVFS_CONFIG": os.devnull},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            yield Holding(process)
        finally:
            process.kill()


def backing(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return kvfs("backing", "--store", str(node.store), *arguments)


def printed(node: Node, *arguments: str) -> str:
    done = backing(node, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evicted(node: Node) -> int:
    return int(node.status()["counters"]["evicted_files_namespace_full"])


def fill(node: Node) -> None:
    """Write more than the cache holds, twice, so that what nobody holds goes."""
    before = evicted(node)
    for number in range(2 * CAPACITY // (2 * MIB)):
        (node.mount / "cache" / f"filler{number}").write_bytes(bytes(2 * MIB))
    wait_until(lambda: evicted(node) > before, "the cache evicts")


def test_it_prints_the_data_file_of_a_path_on_the_mount_and_within(node: Node) -> None:
    path = node.mount / "models" / "weights"
    path.write_bytes(BLOCK)
    on_mount = printed(node, "--for", "0", str(path))
    data_file = Path(on_mount.removesuffix("\n"))
    assert data_file.is_relative_to(node.store)
    assert data_file.read_bytes() == BLOCK
    assert printed(node, "--for", "0", "/models/weights") == on_mount
    told = json.loads(printed(node, "--for", "0", "--json", "/models/weights"))
    assert told == {
        "path": "/models/weights",
        "data_file": str(data_file),
        "size_bytes": len(BLOCK),
        "store": str(node.store),
    }
    assert printed(node, "--for", "0", "-0", str(path), "/models/weights") == f"{data_file}\0" * 2


def test_a_full_cache_does_not_evict_what_is_held(node: Node) -> None:
    path = node.mount / "cache" / "held"
    path.write_bytes(BLOCK)
    with holding(node, str(path)) as held:
        fill(node)
        assert held.data_file.read_bytes() == BLOCK
        assert path.read_bytes() == BLOCK
        held.process.kill()
        held.process.wait()
        for _ in range(3):
            fill(node)
        wait_until(lambda: not path.exists(), "what a killed process held is evicted")
        wait_until(lambda: not held.data_file.exists(), "and its data file goes")


def test_what_is_removed_and_held_is_in_the_status(node: Node) -> None:
    wait_until(lambda: node.status()["held"]["files"] == 0, "what others held has gone")
    path = node.mount / "models" / "gone"
    path.write_bytes(BLOCK)
    with holding(node, str(path)) as held:
        assert node.status()["held"] == {"files": 0, "bytes": 0}
        path.unlink()
        found = node.status()["held"]
        assert (found["files"], found["bytes"] >= len(BLOCK)) == (1, True)
        done = kvfs("status", "--store", str(node.store))
        assert "removed, but held open by programs: 1 files" in done.stdout
        held.process.kill()
        held.process.wait()
        wait_until(lambda: node.status()["held"]["files"] == 0, "it goes with its lease")


@pytest.mark.parametrize("how", ["renamed over", "unlinked", "put by a client"])
def test_what_is_replaced_or_removed_keeps_its_data_file(node: Node, how: str) -> None:
    path = node.mount / "cache" / "replaced"
    path.write_bytes(BLOCK)
    with holding(node, str(path)) as held:
        if how == "renamed over":
            (path.parent / "new").write_bytes(b"new")
            (path.parent / "new").rename(path)
        elif how == "unlinked":
            path.unlink()
        else:
            with Client(node.store) as client:
                client.put("/cache/replaced", b"new")
        # What was removed meanwhile, and nobody holds, goes at the same time or after it.
        other = path.parent / "not held"
        other.write_bytes(b"x")
        theirs = printed(node, "--for", "0", str(other)).removesuffix("\n")
        other.unlink()
        wait_until(lambda: not os.path.exists(theirs), "a data file nobody holds goes")
        assert held.data_file.read_bytes() == BLOCK
        assert held.process.stdin is not None
        held.process.stdin.close()
        assert held.process.wait(30) == 0
        wait_until(lambda: not held.data_file.exists(), "the data file goes with its lease")


def test_what_is_open_for_writing_is_not_leased(node: Node) -> None:
    path = node.mount / "models" / "appended"
    path.write_bytes(BLOCK)
    with open(path, "r+b", buffering=0) as writer:
        done = backing(node, "--for", "0", str(path))
        assert (done.returncode, done.stdout) == (4, "")
        assert f"{path} is open for writing" in done.stderr
        writer.write(b"new")
    data_file = Path(printed(node, "--for", "0", str(path)).removesuffix("\n"))
    assert data_file.read_bytes() == b"new" + BLOCK[3:]


def test_it_ends_with_its_time_and_with_ctrl_c(node: Node) -> None:
    path = node.mount / "models" / "timed"
    path.write_bytes(BLOCK)
    with holding(node, "--for", "0.1", str(path)) as held:
        assert held.process.wait(30) == 0
    with holding(node, str(path)) as held:
        assert held.process.stderr is not None
        assert b"until Ctrl-C" in held.process.stderr.readline()
        held.process.send_signal(signal.SIGINT)
        assert held.process.wait(30) == 0


def test_of_a_service_only_a_signal_ends_it(node: Node) -> None:
    path, other = (node.mount / "models" / name for name in ("served", "not-served"))
    for each in (path, other):
        each.write_bytes(BLOCK)
    with holding(node, str(path), stdin=subprocess.DEVNULL) as held:
        assert held.process.stderr is not None
        assert held.process.stderr.readline() == b"held until Ctrl-C\n"
        theirs = printed(node, "--for", "0", str(other)).removesuffix("\n")
        path.unlink()
        other.unlink()
        wait_until(lambda: not os.path.exists(theirs), "a data file nobody holds goes")
        assert held.data_file.read_bytes() == BLOCK
        held.process.terminate()
        assert held.process.wait(30) == -signal.SIGTERM
        wait_until(lambda: not held.data_file.exists(), "the data file goes with its lease")


def test_a_command_has_the_lease(node: Node) -> None:
    paths = [node.mount / "cache" / name for name in ("one", "two")]
    for number, path in enumerate(paths):
        path.write_bytes(BLOCK[: 1000 + number])
    names = list(map(str, paths))
    assert printed(node, *names, "--", "wc", "-c", "--", "{}").splitlines()[-1].split()[0] == "2001"
    assert printed(node, *names, "--", "wc", "-c").splitlines()[-1].split()[0] == "2001"
    assert printed(node, names[0], "--", "dd", "if={}", "status=none") == BLOCK[:1000].decode()
    done = backing(node, names[0], "--", "sh", "-c", "unlink $0; read line; exit 7", names[0])
    assert done.returncode == 7
    # It inherits the open data file, whatever becomes of the name.
    script = 'readlink /proc/$$/fd/* | grep -cxF "$0"'
    assert printed(node, names[1], "--", "sh", "-c", script, "{}") == "1\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["/models/nothing"], 3, "no such file"),
        (["/models"], 2, "no regular file"),
        ([os.devnull], 2, "on no mount of KVFS"),
        (["/models/here", "--"], 2, "no command"),
        (["/models/here", "--json", "--", "true"], 2, "without a command"),
        (["/models/here", "/models/here", "--", "dd", "if={}"], 2, "room for one"),
        (["/models/here", "--", "no-such-command"], 3, "no-such-command"),
        (["/models/here", "--for", "nan"], 2, "give seconds"),
        (["/models/here", "--for", "1e300"], 2, "not in the range"),
    ],
)
def test_what_cannot_be_is_said(node: Node, arguments: list[str], code: int, says: str) -> None:
    (node.mount / "models" / "here").write_bytes(b"x")
    done = backing(node, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr


def test_who_may_not_enter_the_store_is_told(node: Node) -> None:
    path = node.mount / "models" / "private"
    path.write_bytes(b"x")
    path.chmod(0o644)
    with as_user(1234), pytest.raises(AccessDenied, match="may not enter"), lease([path]):
        pass


def test_what_another_node_has_is_brought_first() -> None:
    with several(2) as cluster:
        a, b = cluster.nodes
        contents = {name: os.urandom(3 * MIB) for name in ("one", "two")}
        for name, content in contents.items():
            (a.mount / "models" / name).write_bytes(content)
        found = printed(b, "--for", "0", *(str(b.mount / "models" / name) for name in contents))
        for line, content in zip(found.splitlines(), contents.values(), strict=True):
            assert Path(line).is_relative_to(b.store)
            assert Path(line).read_bytes() == content
