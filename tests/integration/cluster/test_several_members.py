"""Nodes that come, go, crash and are turned away, with their mounts."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.cluster import membership
from kvfs.cluster.membership import About, joined
from kvfs.datastore import layout
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import RedisServer, killed
from tests.integration.conftest import start
from tests.integration.harness import CannotStart, Node, best_mode, is_mounted, kvfs, wait_for_exit
from tests.integration.several import Several, members, several
from tests.ports import free_port

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def first(cluster: Several) -> Node:
    return cluster.nodes[0]


@contextlib.contextmanager
def made(*flags: str) -> Iterator[Node]:
    """A node that is not started."""
    node = Node.make(best_mode(), *flags)
    try:
        yield node
    finally:
        node.remove()


def refusal(node: Node) -> tuple[int, str]:
    """Of a start."""
    with pytest.raises(CannotStart) as caught:
        node.up()
    assert "Traceback" not in str(caught.value)
    return caught.value.code, str(caught.value)


def test_a_killed_node_is_the_same_one_when_it_starts_again(cluster: Several, first: Node) -> None:
    with made(*cluster.flags("second")) as second:
        start(second)
        wait_until(lambda: members(first).get("second", {}).get("free_bytes", 0) > 0, "it is seen")
        (second.mount / "models" / "kept").write_bytes(b"kept")
        before = members(first)["second"]
        assert before["lease"] == "held"
        assert before["free_bytes"] <= before["capacity_bytes"]
        second.kill()
        start(second)
        assert (second.mount / "models" / "kept").read_bytes() == b"kept"
        after = members(second)["second"]
        assert (after["number"], after["incarnation"]) == (
            before["number"],
            before["incarnation"] + 1,
        )
        shown = kvfs("status", "--store", str(second.store)).stdout
        assert "second" in shown
        assert "n1" in shown
        (second.mount / "models" / "kept").unlink()
        second.down()
        # It says so if it can within a second.
        wait_until(lambda: members(first)["second"]["lease"] != "held", "it has left")
        assert kvfs("node", "remove", "second", "--store", str(first.store)).returncode == 0


def test_who_has_a_killed_nodes_store_is_that_node_though_its_lease_goes_on(
    cluster: Several, first: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "TERM_S", 1e9)

    async def start_again(store: layout.Store) -> tuple[int, int]:
        about, secret = About(name="killed"), cluster.home / "cluster.key"
        with trio.fail_after(PATIENCE_S):
            async with joined(store, cluster.server.url, about, secret_file=secret) as member:
                return member.node, member.incarnation

    with made(*cluster.flags("killed")) as node:
        start(node)
        before = members(node)["killed"]
        node.kill()
        store = layout.open_store(node.store)
        store.lock()
        try:
            found = trio.run(start_again, store)
        finally:
            store.unlock()
        assert found == (before["number"], before["incarnation"] + 1)
        assert kvfs("node", "remove", "killed", "--store", str(first.store)).returncode == 0


def test_a_removed_node_leaves_nothing_and_comes_back_as_a_new_one(
    cluster: Several, first: Node
) -> None:
    secret = kvfs("node", "secret", "--store", str(first.store)).stdout
    with made(*cluster.flags("third")) as third:
        start(third)
        (third.mount / "models" / "lost").write_bytes(b"lost")
        (third.mount / "cache" / "gone").write_bytes(b"gone")
        wait_until((first.mount / "cache" / "gone").exists, "the name is known")
        third.down()
        refused = kvfs("node", "remove", "third", "--store", str(first.store))
        assert (refused.returncode, "durable" in refused.stderr) == (4, True)
        forced = kvfs("node", "remove", "third", "--force", "--store", str(first.store))
        assert forced.returncode == 0, forced.stderr
        wait_until(
            lambda: not (first.mount / "cache" / "gone").exists(), "what only it had is evicted"
        )
        wait_until(lambda: "third" not in members(first), "it is listed no more")
        assert (first.mount / "models" / "lost").stat().st_size == 4

        code, message = refusal(third)
        assert (code, "kvfs node join --again" in message) == (4, True)
        joined = kvfs(
            *("node", "join", "--again", "--store", str(third.store)),
            *("--engine", cluster.server.url),
            given=secret,
        )
        assert joined.returncode == 0, joined.stderr
        start(third)
        assert sorted(os.listdir(third.mount)) == sorted(os.listdir(first.mount))
        (third.mount / "models" / "new").write_bytes(b"new")
        assert (first.mount / "models" / "new").read_bytes() == b"new"
        (first.mount / "models" / "lost").unlink()

        # One that runs is told by its lease, and ends.
        assert third.pid is not None
        watch = os.pidfd_open(third.pid)
        try:
            forced = kvfs("node", "remove", "third", "--force", "--store", str(first.store))
            assert forced.returncode == 0, forced.stderr
            wait_for_exit(watch)
        finally:
            os.close(watch)
        assert not is_mounted(third.mount)
        third.pid = None
        (first.mount / "models" / "new").unlink()


def test_who_does_not_belong_is_turned_away(cluster: Several) -> None:
    peer = ("--peer", "127.0.0.1:0")
    with made("--engine", cluster.server.url, *peer) as stranger:
        code, message = refusal(stranger)
        assert (code, "kvfs node join" in message) == (5, True)
        assert not is_mounted(stranger.mount)
    with made() as lone:
        start(lone)
        lone.down()
        lone.flags = cluster.flags("lone")
        code, message = refusal(lone)
        assert (code, "a lone node's" in message) == (2, True)
        lone.flags = ()
        start(lone)
        lone.down()
    with made(*cluster.flags("member")) as member:
        start(member)
        member.down()
        member.flags = ()
        code, message = refusal(member)
        assert (code, "--engine" in message) == (4, True)
        elsewhere = f"{cluster.server.url}?prefix=elsewhere"
        member.flags = ("--engine", elsewhere, *peer)
        code, message = refusal(member)
        assert (code, "kvfs rebuild" in message) == (7, True)


def test_a_start_without_its_engine_waits_for_it_and_says_so(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--engine", f"redis://127.0.0.1:{port}", "--node-name", "early")
    with made(*flags, "--peer", "127.0.0.1:0") as node:
        log = tmp_path / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from cli.main import main; main()"),
                    *("up", *node.place(), "--mode", node.mode, "--no-s3", *node.flags),
                ],
                stdout=output,
                stderr=output,
                cwd=Path(__file__).resolve().parents[3],
            )
        watch = os.pidfd_open(process.pid)
        try:
            wait_until(lambda: "is tried again" in log.read_text(), "it says that it waits")
            assert not is_mounted(node.mount)
            with killed(RedisServer(tmp_path / "redis", port=port)):
                wait_until(lambda: is_mounted(node.mount), "it is mounted")
                assert log.read_text().count("is tried again") == 1
                (node.mount / "models" / "x").write_bytes(b"x")
                process.send_signal(signal.SIGINT)
                wait_for_exit(watch)
                assert process.wait() in (0, 130)
                assert not is_mounted(node.mount)
        finally:
            os.close(watch)
            process.kill()
            process.wait()
