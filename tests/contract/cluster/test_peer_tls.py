"""TLS between nodes, over loopback: who speaks with whom, secrets that are replaced, what crosses
the wire."""

import contextlib
import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.config import PeerTlsMode
from kvfs.base.errors import AccessDenied, Unavailable
from kvfs.cluster import secrets
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.cluster.secrets import Secrets
from kvfs.cluster.tls import certificates
from tests.cluster.waiting import until
from tests.contract.peers import CLUSTER, OURS, Peer, content, peers

OTHERS = Secrets([secrets.generate(CLUSTER)])


async def echo(_peer: Party, params: object) -> object:
    return params


async def ask(one: Peer, other: Peer) -> object:
    return await one.client.call(other.address, "echo", "word")


def together(root: Path, *modes: PeerTlsMode) -> contextlib.AbstractAsyncContextManager[list[Peer]]:
    return peers(root, len(modes), methods={"echo": echo}, tls=modes)


@pytest.mark.parametrize(
    ("one", "other"),
    [("accept", "accept"), ("require", "require"), ("accept", "require"), ("require", "accept")],
)
def test_a_file_crosses_encrypted(tmp_path: Path, one: PeerTlsMode, other: PeerTlsMode) -> None:
    async def main() -> None:
        async with together(tmp_path, one, other) as (holder, reader):
            data = content(9 << 20)
            wanted = holder.put(data)
            with wiretap(holder.address) as (address, seen):
                assert await reader.bring(wanted, [holder.address._replace(port=address)]) == data
            assert len(seen) > len(data)
            assert data[5 << 20 : (5 << 20) + 64] not in seen
            assert b"HTTP/1.1" not in seen

    trio.run(main)


@pytest.mark.parametrize("size", [0, 1, 16 << 10, (4 << 20) - 1, (4 << 20) + 1, 40 << 20])
def test_a_file_of_any_size_crosses_whole(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with together(tmp_path, "require", "require") as (holder, reader):
            data = content(size)
            assert await reader.bring(holder.put(data), [holder.address]) == data

    trio.run(main)


@pytest.mark.parametrize("mode", ["off", "accept"])
def test_a_node_of_the_version_before_is_met_without_tls(tmp_path: Path, mode: PeerTlsMode) -> None:
    async def main() -> None:
        async with together(tmp_path, mode, "off") as (ours, earlier):
            ours.plain.add(earlier.address.node)
            assert await ask(ours, earlier) == await ask(earlier, ours) == "word"

    trio.run(main)


def test_where_tls_is_required_a_plain_node_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with together(tmp_path, "require", "off") as (ours, earlier):
            ours.plain.add(earlier.address.node)
            with pytest.raises(AccessDenied, match="peer_tls"):
                await ask(earlier, ours)
            with pytest.raises(Unavailable, match="TLS"):
                await ask(ours, earlier)

    trio.run(main)
    (complaint,) = caplog.records
    assert complaint.levelno == logging.WARNING
    assert "peer_tls" in complaint.message


def test_a_node_with_another_secret_is_refused_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with together(tmp_path, "accept", "accept") as (ours, stranger):
            stranger.known = OTHERS
            for one, other in ((stranger, ours), (ours, stranger)):
                for _ in range(2):
                    with pytest.raises(AccessDenied, match="kvfs node join"):
                        await ask(one, other)
            await until(lambda: ours.server.counters["peers_refused"] == 2, "it counts them")

    trio.run(main)
    assert ["kvfs node join" in each.message for each in caplog.records] == [True, True]


@pytest.mark.parametrize("is_named", [False, True])
def test_a_stranger_without_a_certificate_sees_nothing(tmp_path: Path, is_named: bool) -> None:
    """Not even with the name of the secret, which is public."""

    name = f"{OURS[0].digest.hex()}.kvfs" if is_named else None

    def dial(address: PeerAddress) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection((address.host, address.port), timeout=20)
        with context.wrap_socket(plain, server_hostname=name) as sock:
            sock.sendall(b"POST /v1/hello HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
            return sock.recv(100)

    async def main() -> None:
        async with together(tmp_path, "accept") as (ours,):
            with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
                await trio.to_thread.run_sync(dial, ours.address)
            await until(lambda: ours.server.counters["peers_refused"] == 1, "it counts it")

    trio.run(main)


def test_a_secret_is_replaced_node_by_node(tmp_path: Path) -> None:
    """New connections go on at each step, and those that are open with them."""
    new = OURS.with_new()
    only_new = Secrets(new[:1])

    async def main() -> None:
        async with together(tmp_path, "require", "require") as (one, other):
            assert await ask(one, other) == "word"
            for known in ((new, OURS), (new, new), (only_new, new), (only_new, only_new)):
                one.known, other.known = known
                assert await ask(one, other) == "word"
                assert one.client.connected == 1, "the connection stays"
                for dialing, asked in ((one, other), (other, one)):
                    fresh = type(one.client)(dialing.identity, dialing.tls)
                    assert await fresh.call(asked.address, "echo", "word") == "word"
                    fresh.close()

    trio.run(main)


@pytest.mark.parametrize(
    ("ahead_s", "agree"),
    [
        (0.9 * certificates.BEFORE_S, True),
        (1.1 * certificates.BEFORE_S, False),
        (-0.9 * certificates.AFTER_S, True),
        (-1.1 * certificates.AFTER_S, False),
    ],
)
def test_clocks_may_differ_by_weeks(tmp_path: Path, ahead_s: float, agree: bool) -> None:
    """A certificate that a node issues by its clock, at another one's."""

    async def main() -> None:
        async with together(tmp_path, "require", "require") as (ours, other):
            other.tls._clock = lambda: time.time() + ahead_s
            if agree:
                assert await ask(ours, other) == await ask(other, ours) == "word"
            else:
                with pytest.raises(AccessDenied, match="clock"):
                    await ask(ours, other)

    trio.run(main)


def test_a_certificate_is_renewed_daily_and_after_a_clock_was_set(tmp_path: Path) -> None:
    async def main() -> None:
        async with together(tmp_path, "require") as (ours,):
            days = [1.0, 1.9, 2.1, 0.5]
            ours.tls._clock = lambda: days[0] * 86400
            ends = []
            while days:
                ends.append(ours.tls.report()["certificate_expires_s"] - certificates.AFTER_S)
                del days[0]
            assert ends == [86400, 86400, 2.1 * 86400, 0.5 * 86400]

    trio.run(main)


def test_without_a_certificate_nodes_are_away_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when no descriptor is left on the day of its renewal."""

    def none_is_left(_name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        async with together(tmp_path, "require", "require") as (one, other):
            monkeypatch.setattr(os, "memfd_create", none_is_left)
            with pytest.raises(Unavailable, match=r"peer_tls.*Too many open files"):
                await ask(one, other)
            monkeypatch.undo()
            assert await ask(one, other) == "word"

    trio.run(main)


@contextlib.contextmanager
def wiretap(to: PeerAddress) -> Iterator[tuple[int, bytearray]]:
    """A port that leads to `to`, and all that came from there."""
    seen, ends = bytearray(), list[socket.socket]()

    def carry(one: socket.socket, other: socket.socket, *, listens: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if listens:
                    seen.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((to.host, to.port))
                ends.extend((near, far))
                for one, other, listens in ((near, far, False), (far, near, True)):
                    threading.Thread(
                        target=carry, args=(one, other), kwargs={"listens": listens}, daemon=True
                    ).start()

    with socket.create_server((to.host, 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield listener.getsockname()[1], seen
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in ends:
                each.close()
