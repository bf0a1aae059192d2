"""Processes beside a node whose daemon is killed: they wait for the next one, as its mount does."""

import os
import signal
from collections.abc import Iterator

import pytest

from kvfs import Client
from kvfs.base.errors import Unavailable
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, wait_for_exit
from tests.integration.several import Several, several
from tests.integration.takeover.successor import WAIT, follow


@pytest.fixture(scope="module")
def pair() -> Iterator[Several]:
    with several(2, *WAIT) as made:
        yield made


def _end(node: Node) -> int:
    """Kills the daemon, and returns when it has gone, and the next one is not there yet."""
    assert node.pid is not None
    dead, watch = node.pid, os.pidfd_open(node.pid)
    try:
        os.kill(dead, signal.SIGKILL)
        wait_for_exit(watch)
    finally:
        os.close(watch)
    return dead


def test_clients_of_a_cluster_wait_for_the_next_daemon(pair: Several) -> None:
    node, other = pair.nodes
    with Client(node.store) as client, Client(other.store) as elsewhere:
        client.put("/models/before", b"x")
        for turn in range(2):
            path = f"/models/theirs-{turn}"
            elsewhere.put(path, b"y" * 100_000)
            dead = _end(node)
            assert client.get(path) == b"y" * 100_000  # whose data are on the other node
            follow(node, [dead])
            dead = _end(node)
            client.put(f"/models/mine-{turn}", b"%d" % turn)
            follow(node, [dead])
            dead = _end(node)
            client.rename("/models/before", "/models/after")
            client.rename("/models/after", "/models/before")
            names = [[each.name for each in one.list("/models")] for one in (client, elsewhere)]
            assert names[0] == names[1]
            follow(node, [dead])
            assert elsewhere.get(f"/models/mine-{turn}") == b"%d" % turn
    wait_until(lambda: (node.mount / "models" / "mine-1").exists(), "the mount has it")


def test_where_no_daemon_follows_a_client_is_told(pair: Several) -> None:
    node = pair.add()  # whose mount ends with it
    with Client(node.store) as client:
        client.put("/models/once", b"x")
        node.kill()
        with pytest.raises(Unavailable, match="no node runs"):
            client.put("/models/once", b"y")
