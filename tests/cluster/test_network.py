"""The network that the tests of clusters stand on does what they believe of it."""

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import need_namespaces
from tests.cluster.network import Network, Ways, network

_PORT = 7000
_NOTHING_S = 0.3
"""How long nothing must come for it to be lost: on a link without speed limits answers take less
than a millisecond, and only `nothing comes` is concluded from it."""


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    need_namespaces()
    with network(f"t{os.getpid()}", ["1", "2"]) as made:
        yield made


def connected(net: Network) -> tuple[socket.socket, socket.socket]:
    """Ends of a connection from host 1 to host 2."""
    with net.socket("2") as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((net.address("2"), _PORT))
        listening.listen()
        one = net.socket("1")
        one.settimeout(30)
        one.connect((net.address("2"), _PORT))
        two, _ = listening.accept()
        two.settimeout(30)
        return one, two


@pytest.mark.parametrize("ways", ["both", "in", "out"])
def test_what_is_cut_off_arrives_after_heal(net: Network, ways: Ways) -> None:
    one, two = connected(net)
    with one, two:
        net.cut("2", ways)
        assert not net.is_whole("2")
        one.sendall(b"a")
        two.settimeout(_NOTHING_S)
        with pytest.raises(TimeoutError):
            # Out alone: it comes, and then no acknowledgement leaves; the answer is lost.
            assert two.recv(1) == (b"a" if ways == "out" else b"")
            two.sendall(b"b")
            one.settimeout(_NOTHING_S)
            one.recv(1)
        net.heal("2")
        assert net.is_whole("2")
        one.settimeout(60)
        two.settimeout(60)
        if ways != "out":
            assert two.recv(1) == b"a"
            two.sendall(b"b")
        assert one.recv(1) == b"b"


def test_a_limited_link_has_that_speed(net: Network) -> None:
    size = 5_000_000
    net.limit("1", 100)
    one, two = connected(net)
    with one, two:
        began = time.monotonic()
        sender = threading.Thread(target=lambda: one.sendall(bytes(size)))
        sender.start()
        left = size
        while left:
            left -= len(two.recv(1 << 20))
        took_s = time.monotonic() - began
        sender.join()
    net.limit("1", 0)
    assert size * 8 / took_s < 110e6


def test_removed_leaves_nothing() -> None:
    need_namespaces()
    with network(f"g{os.getpid()}", ["1"]) as made:
        assert made.hosts() == ["1"]
    assert not made.exists
    assert made.hosts() == []
