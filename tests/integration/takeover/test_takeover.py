"""A mount whose daemon is killed, or replaced: programs go on with what they have open."""

import contextlib
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs import Client
from tests.integration.conftest import why_not
from tests.integration.harness import (
    ROOT,
    CannotStart,
    Node,
    best_mode,
    is_mounted,
    kvfs,
    wait_for_exit,
)
from tests.integration.takeover.successor import DEADLINE_S, WAIT, kill

NATIVE_MODES = ("passthrough", "relay")
_MAIN = "from cli.main import main; main()"


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node.make(getattr(request, "param", best_mode()), *WAIT)
    try:
        if made.mode not in NATIVE_MODES:
            pytest.skip(f"libfuse was asked for, whose mount ends with its daemon: {made.mode}")
        try:
            made.up()
        except CannotStart:
            pytest.skip(why_not(made))
        yield made
    finally:
        made.remove()


@pytest.mark.parametrize("node", NATIVE_MODES, indirect=True)
def test_programs_go_on_with_open_files(node: Node) -> None:
    top = node.mount / "models"
    content = os.urandom(100_000)
    (top / "read").write_bytes(content)
    with (
        (top / "read").open("rb", buffering=0) as reader,
        mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        (top / "written").open("wb", buffering=0) as writer,
        (top / "log").open("ab", buffering=0) as log,
        (top / "both").open("w+b", buffering=0) as both,
        (top / "unlinked").open("w+b", buffering=0) as unlinked,
    ):
        unlinked.write(b"nameless")
        (top / "unlinked").unlink()
        both.write(b"first")
        assert reader.read(1000) == content[:1000]
        for turn in range(2):
            writer.write(b"%d" % turn)
            log.write(b"%d\n" % turn)
            kill(node)
            assert reader.read(1000) == content[1000 * (turn + 1) : 1000 * (turn + 2)]
            assert mapped[:] == content
            assert os.pread(unlinked.fileno(), 100, 0) == b"nameless"
            assert os.fstat(unlinked.fileno()).st_nlink == 0
            os.pwrite(both.fileno(), b"F", turn)
            writer.write(b"-")
            log.write(b"-\n")
    assert (top / "written").read_bytes() == b"0-1-"
    assert (top / "log").read_bytes() == b"0\n-\n1\n-\n"
    assert (top / "both").read_bytes() == b"FFrst"
    with Client(node.store) as client:  # what was written is published, by its close
        assert client.get("/models/written") == b"0-1-"
    assert sorted(os.listdir(top)) == ["both", "log", "read", "written"]
    assert len(os.listdir(f"/proc/{node.pid}/fd")) < 200
    node.down()
    done = kvfs("fsck", "--store", str(node.store))
    assert done.returncode == 0, done.stdout


def test_a_listing_goes_on_where_it_was(node: Node) -> None:
    directory = node.mount / "models" / "d"
    directory.mkdir()
    names = {f"name-{i:04}" for i in range(1500)}
    for name in names:
        (directory / name).touch()
    with os.scandir(directory) as listing:
        told = [next(listing).name for _ in range(700)]
        kill(node)
        told += [each.name for each in listing]
    assert len(told) == len(names)
    assert set(told) == names


def test_what_others_removed_meanwhile_hides_no_other_name(node: Node) -> None:
    directory = node.mount / "models" / "d"
    directory.mkdir()
    for i in range(1500):
        (directory / f"name-{i:04}").touch()
    with os.scandir(directory) as listing:
        told = [next(listing).name for _ in range(700)]
        kill(node)
        gone = set(told[:100])
        for name in gone:
            (directory / name).unlink()
        told += [each.name for each in listing]
    assert set(told) >= {f"name-{i:04}" for i in range(1500)} - gone


def test_what_a_client_changes_while_no_daemon_runs_is_seen(node: Node) -> None:
    path = node.mount / "models" / "file"
    path.write_bytes(b"old")
    assert path.read_bytes() == b"old"
    assert not (node.mount / "models" / "new").exists()
    assert node.pid is not None
    watch = os.pidfd_open(node.pid)
    os.kill(node.pid, signal.SIGKILL)
    wait_for_exit(watch)
    os.close(watch)
    with Client(node.store) as client:
        client.put("/models/file", b"newer")
        client.put("/models/new", b"made")
    assert path.read_bytes() == b"newer"
    assert (node.mount / "models" / "new").read_bytes() == b"made"
    assert "new" in os.listdir(node.mount / "models")


def test_a_mount_that_nobody_has_looked_at_goes_on(node: Node) -> None:
    for words in (["umount"], ["mount", str(node.mount)]):
        done = kvfs(*words, "--store", str(node.store))
        assert done.returncode == 0, done.stderr
    kill(node)  # the next daemon may not ask a mount that waits for it
    assert sorted(os.listdir(node.mount)) == ["cache", "models"]


def test_a_restart_keeps_the_mount(node: Node) -> None:
    top = node.mount / "models"
    mounted = os.stat(top).st_dev
    with (top / "file").open("w+b", buffering=0) as file:
        file.write(b"one")
        before = node.pid
        done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        node.pid = node.status()["pid"]
        assert node.pid != before
        file.write(b"two")
        assert os.pread(file.fileno(), 10, 0) == b"onetwo"
    assert os.stat(top).st_dev == mounted
    assert (top / "file").read_bytes() == b"onetwo"


def test_a_mount_of_another_setting_is_made_anew(node: Node) -> None:
    top = node.mount / "models"
    (top / "file").write_bytes(b"content")
    with (top / "file").open("rb", buffering=0) as reader:
        done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        assert reader.read(3) == b"con"
        node.down()
        node.flags = (*WAIT, "--dev")
        node.up()
        with pytest.raises(OSError, match=r"not connected|connection abort") as refused:
            os.fstat(reader.fileno())
        assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert (top / "file").read_bytes() == b"content"


def _in_foreground(node: Node, *flags: str) -> "subprocess.Popen[str]":
    """A node that nobody starts again; it has said that it is up."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFS_")}
    environment |= {"KVFS_S3": "off", "KVFS_CONFIG": os.devnull, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, "up", *node.place(), "--mode", node.mode, *flags],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "is up" in process.stdout.readline()
    return process


def _kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def lonely() -> Iterator[Node]:
    made = Node.make("relay")
    try:
        yield made
    finally:
        made.remove()


def test_a_mount_that_no_daemon_takes_over_ends(lonely: Node) -> None:
    process = _in_foreground(lonely, "--takeover-s", "1")
    file = os.open(lonely.mount / "models" / "file", os.O_CREAT | os.O_RDWR)
    try:
        _kill(process)
        with pytest.raises(OSError, match=r"not connected|connection abort") as refused:
            os.stat(lonely.mount / "models" / "other")
        assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    finally:
        with contextlib.suppress(OSError):
            os.close(file)
    assert _in_foreground_again(lonely) == ["cache", "models"]


def _in_foreground_again(node: Node) -> list[str]:
    process = _in_foreground(node)
    try:
        return sorted(os.listdir(node.mount))
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def test_down_ends_a_mount_that_waits(lonely: Node) -> None:
    process = _in_foreground(lonely, "--takeover-s", "3600")
    _kill(process)
    done = kvfs("down", *lonely.place(), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "removed the stale mount" in done.stdout
    assert not is_mounted(lonely.mount)


def test_a_mount_of_a_node_that_stops_in_order_waits_for_none(node: Node) -> None:
    begun = time.monotonic()
    node.down()
    assert time.monotonic() - begun < DEADLINE_S
    assert _holders(node.store) == []


def _holders(store: Path) -> list[str]:
    """The processes that keep a mount of a store, once those that end have had time for that."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = each.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.endswith(b"/holder_process.py") for word in words) and any(
                word == os.fsencode(store / "run") for word in words
            ):
                found.append(each.parent.name)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.05)


def test_doctor_and_status_tell_of_it(node: Node) -> None:
    assert node.status()["mount"]["takeover_s"] == 60
    done = kvfs("doctor", "--store", str(node.store))
    assert "takeover" in done.stdout


def test_a_program_that_cannot_go_on_with_the_mount_says_so_and_leaves_it(
    node: Node, tmp_path: Path
) -> None:
    other = tmp_path / "sitecustomize.py"
    other.write_text("from gateway.holder import mount_journal\nmount_journal.SIZES_OF.clear()\n")
    inside = ("env", f"PYTHONPATH={tmp_path}:{ROOT}")
    pid, place = node.pid, ("--store", str(node.store))
    with (node.mount / "models" / "open").open("w+b", buffering=0) as file:
        file.write(b"before")
        done = kvfs("upgrade", "--check", "--json", *place, inside=inside)
        assert json.loads(done.stdout)["pause"] == "ends"
        done = kvfs("restart", *place, inside=inside)
        assert (done.returncode, "`kvfs down` and `kvfs up`" in done.stderr) == (2, True), done
        assert node.status()["pid"] == pid
        file.write(b", after")
        assert os.pread(file.fileno(), 100, 0) == b"before, after"
