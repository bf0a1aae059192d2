"""Nodes of a cluster whose daemons are killed, or replaced: their programs go on, and other nodes
see what they did once."""

import errno
import os
from collections.abc import Iterator

import pytest

from kvfs import Client
from tests.cluster.waiting import wait_until
from tests.integration.harness import kvfs
from tests.integration.posix import refused
from tests.integration.several import Several, several
from tests.integration.takeover.successor import DEADLINE_S, WAIT, follow, kill

MODES = ("passthrough", "relay")


@pytest.fixture(params=MODES)
def pair(request: pytest.FixtureRequest) -> Iterator[Several]:
    with several(2, *WAIT, mode=request.param) as made:
        yield made


@pytest.mark.parametrize("namespace", ["models", "cache"])
def test_programs_go_on_with_open_files(pair: Several, namespace: str) -> None:
    here, there = (node.mount / namespace for node in pair.nodes)
    content = os.urandom(100_000)
    (here / "read").write_bytes(content)
    (there / "theirs").write_bytes(content)
    wait_until(lambda: (here / "theirs").exists(), "the other node's file is known")
    node = pair.nodes[0]
    with (
        (here / "read").open("rb", buffering=0) as reader,
        (here / "theirs").open("rb", buffering=0) as fetched,
        (here / "written").open("wb", buffering=0) as writer,
        (here / "log").open("ab", buffering=0) as log,
        (here / "both").open("w+b", buffering=0) as both,
        (here / "unlinked").open("w+b", buffering=0) as unlinked,
    ):
        unlinked.write(b"nameless")
        (here / "unlinked").unlink()
        both.write(b"first")
        for turn in range(2):
            writer.write(b"%d" % turn)
            log.write(b"%d\n" % turn)
            kill(node)
            assert reader.read(1000) == content[1000 * turn : 1000 * (turn + 1)]
            assert fetched.read(1000) == content[1000 * turn : 1000 * (turn + 1)]
            assert os.pread(unlinked.fileno(), 100, 0) == b"nameless"
            assert os.fstat(unlinked.fileno()).st_nlink == 0
            os.pwrite(both.fileno(), b"F", turn)
            writer.write(b"-")
            log.write(b"-\n")
    names = ["both", "log", "read", "theirs", "written"]
    for top in (here, there):
        wait_until(lambda top=top: sorted(os.listdir(top)) == names, "what was closed is known")
        assert (top / "written").read_bytes() == b"0-1-"
        assert (top / "log").read_bytes() == b"0\n-\n1\n-\n"
        assert (top / "both").read_bytes() == b"FFrst"


def test_what_the_other_node_did_meanwhile_is_seen(pair: Several) -> None:
    node, other = pair.nodes
    here, there = node.mount / "models", other.mount / "models"
    (here / "file").write_bytes(b"old")
    (here / "gone").write_bytes(b"x")
    assert (here / "file").read_bytes() == b"old"
    assert not (here / "new").exists()
    with (here / "file").open("rb", buffering=0) as held:
        os.kill(node.pid or 0, 9)
        with Client(other.store) as client:
            client.put("/models/file", b"newer")
            client.put("/models/new", b"made")
        (there / "gone").unlink()
        assert (here / "file").read_bytes() == b"newer"
        assert (here / "new").read_bytes() == b"made"
        assert not (here / "gone").exists()
        assert os.pread(held.fileno(), 10, 0) == b"old"
        follow(node, [node.pid or 0])
        # What was open stays so through another death, beside what took its name.
        with (here / "file").open("rb", buffering=0) as again:
            kill(node)
            assert os.pread(held.fileno(), 10, 0) == b"old"
            assert os.pread(again.fileno(), 10, 0) == b"newer"
            assert (here / "file").read_bytes() == b"newer"
    assert (here / "file").read_bytes() == b"newer"


def test_what_was_cut_to_nothing_goes_past_newer_closes_also_by_the_next_daemon(
    pair: Several,
) -> None:
    """And by the one after it; once it is published, it goes past nobody any more."""
    here, there = (node.mount / "models" / "cut" for node in pair.nodes)
    there.write_bytes(b"at first")
    wait_until(here.exists, "both nodes know it")
    with here.open("wb", buffering=0) as cut:
        cut.write(b"mine")
        there.write_bytes(b"theirs")
        kill(pair.nodes[0])
        kill(pair.nodes[0])
        os.fsync(cut.fileno())
        assert there.read_bytes() == b"mine"
        there.write_bytes(b"theirs again")
        kill(pair.nodes[0])
        cut.write(b"more")
        with refused(errno.ESTALE):
            os.fsync(cut.fileno())
        with refused(errno.ESTALE):
            cut.close()
    assert here.read_bytes() == there.read_bytes() == b"theirs again"


def test_a_restart_keeps_mount_and_lease(pair: Several) -> None:
    node, other = pair.nodes
    top = node.mount / "models"
    with (top / "log").open("ab", buffering=0) as log:
        log.write(b"one\n")
        before = node.pid
        done = kvfs("restart", "--store", str(node.store), timeout_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        node.pid = node.status()["pid"]
        assert node.pid != before
        log.write(b"two\n")
        done = kvfs("node", "list", "--store", str(other.store))
        assert "left" not in done.stdout
    assert (other.mount / "models" / "log").read_bytes() == b"one\ntwo\n"
