"""The transport rdma: chunks that movers bring, over loopback; and what comes over TCP instead."""

import os
import select
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import NotSupported, Unavailable
from kvfs.cluster.peer_protocol import CHUNK_BYTES, Ask
from kvfs.transfer.rdma import exporter, port_guard, transfer_process
from kvfs.transfer.rdma.rdma_transport import Rdma
from kvfs.transfer.rdma.registered_memory import BYTES, Memory
from kvfs.transfer.rdma.transfer_process import Mover
from tests.cluster.waiting import until
from tests.contract.peers import Peer, content, peers
from tests.integration.clients.environments import mooncake

SMALL = 3 * CHUNK_BYTES + 5
LARGE = 16 * CHUNK_BYTES - 9


def run(root: Path, count: int, test: Callable[..., Awaitable[None]]) -> None:
    interpreter = mooncake()

    async def main() -> None:
        async with peers(root, count, interpreter) as made:
            await test(*made)

    trio.run(main)


def rdma(peer: Peer) -> Rdma:
    assert peer.rdma is not None
    return peer.rdma


def is_wiped(peer: Peer) -> bool:
    return os.pread(rdma(peer).mover.memory.fd, BYTES, 0) == bytes(BYTES)


def test_movers_bring_the_bytes_and_forget_them(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(holder: Peer, reader: Peer) -> None:
        assert await reader.bring(holder.put(data), [holder.address]) == data
        assert rdma(reader).counters["mover_bytes"] == LARGE == rdma(holder).counters["lent_bytes"]
        assert not rdma(reader).counters["mover_over_tcp"]
        await until(lambda: is_wiped(holder) and is_wiped(reader), "both have wiped what they lent")
        assert not rdma(holder).counters["lent_expired"]

    run(tmp_path, 2, test)


def test_a_small_file_comes_in_the_answer(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        assert await reader.bring(holder.put(b"few"), [holder.address]) == b"few"
        assert not rdma(holder).counters["lent_bytes"]
        assert not rdma(reader).counters["mover_over_tcp"]

    run(tmp_path, 2, test)


@pytest.mark.parametrize("without", ["holder", "reader"])
def test_a_node_without_a_mover_is_served_over_tcp(tmp_path: Path, without: str) -> None:
    data = content(SMALL)
    interpreter = mooncake()

    async def main() -> None:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        with_it = peers(tmp_path / "one", 1, interpreter)
        without_it = peers(tmp_path / "two", 2)
        async with with_it as (one,), without_it as (_, two):
            holder, reader = (two, one) if without == "holder" else (one, two)
            assert await reader.bring(holder.put(data), [holder.address]) == data
            counters = rdma(one).counters
            assert not counters["lent_bytes"]
            assert bool(counters["mover_over_tcp"]) == (without == "holder")

    trio.run(main)


@pytest.mark.parametrize("whose", ["holder", "reader"])
def test_a_mover_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path, whose: str) -> None:
    data = content(LARGE)

    async def test(holder: Peer, reader: Peer) -> None:
        victim = rdma(holder if whose == "holder" else reader)
        wanted = holder.put(data)
        arriving = reader.fetch(wanted, [holder.address])
        await until(lambda: arriving.transfer.plan.here, "the first chunk is here")
        victim.mover.kill()
        await arriving.whole()
        assert os.pread(arriving.fd, LARGE, 0) == data
        arriving.close()
        await until(lambda: victim.mover.restarts and victim.mover.pid, "it has a new mover")

    run(tmp_path, 2, test)


def test_wrong_bytes_on_the_way_are_not_the_holders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reaches a mover may write to its memory."""
    data = content(SMALL)
    fill = Memory.fill

    def spoil(memory: Memory, at: int, fd: int, offset: int, length: int) -> None:
        fill(memory, at, fd, offset, length)
        os.pwrite(memory.fd, b"rot", at)

    async def test(holder: Peer, reader: Peer) -> None:
        monkeypatch.setattr(Memory, "fill", spoil)
        assert await reader.bring(holder.put(data), [holder.address]) == data
        assert rdma(reader).counters["mover_failures"]
        assert not reader.fetches.counters["fetches_wrong_bytes"]

    run(tmp_path, 2, test)


def test_what_is_not_given_back_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(SMALL))
        ask = Ask(wanted.ino, wanted.version, SMALL, 0, 2, sealed=True)
        async with reader.client.data(holder.address, ask, mover=b"tcp") as incoming:
            assert incoming.lent is not None
            assert not is_wiped(holder)
        monkeypatch.setattr(exporter, "LENT_S", 0.0)
        await until(lambda: is_wiped(holder), "the holder has wiped what it lent")
        assert rdma(holder).counters["lent_expired"] == 1

    run(tmp_path, 2, test)


def test_more_than_there_are_pieces_for_comes_over_tcp(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(LARGE))
        ask = Ask(wanted.ino, wanted.version, LARGE, 0, 4, sealed=True)
        held = []
        while not rdma(holder).counters["lent_refused"]:
            async with reader.client.data(holder.address, ask, mover=b"tcp") as incoming:
                held.append(incoming.lent is not None)
        assert held == [True] * 4 + [False]
        assert incoming.count == 4

    run(tmp_path, 2, test)


def test_strangers_do_not_reach_a_mover(tmp_path: Path) -> None:
    """Until a peer of their address has proven who it is and was promised something."""

    async def test(holder: Peer, reader: Peer) -> None:
        with socket.socket() as stranger:
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", rdma(holder).mover.port))
            assert not select.select([], [stranger], [], 0.2)[1]
            await reader.bring(holder.put(content(SMALL)), [holder.address])
            assert rdma(reader).counters["mover_bytes"] == SMALL
            # The kernel says again that it wants to connect.
            await until(lambda: select.select([], [stranger], [], 0)[1], "it is connected")
            assert not stranger.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)

    run(tmp_path, 2, test)


def test_a_mover_that_cannot_be_says_why_and_what_helps(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o700)

    async def main() -> None:
        found = Mover("127.0.0.1", str(broken))
        with pytest.raises(NotSupported, match=r"kvfs\[rdma\].*libibverbs1"):
            await found.run()
        with pytest.raises(Unavailable):
            await found.admit("127.0.0.1")

    trio.run(main)


def test_without_the_package_the_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{transfer_process.__name__}.importlib.util.find_spec", lambda _name: None)
    with pytest.raises(NotSupported, match=r"pip install 'kvfs\[rdma\]'"):
        transfer_process.require()


def test_a_filter_fits_as_many_hosts_as_are_admitted() -> None:
    hosts = [f"10.0.{number >> 8}.{number & 255}" for number in range(port_guard.MOST + 1)]
    code = port_guard.program(hosts)
    assert len(code) <= 4096 * 8
    addresses = {struct.unpack("HBBI", code[at : at + 8])[3] for at in range(0, len(code), 8)}
    assert 10 << 24 not in addresses  # the oldest makes room
    assert (10 << 24) + port_guard.MOST in addresses
