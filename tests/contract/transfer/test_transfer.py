"""Files that come from other nodes, over loopback; and what goes wrong on the way."""

import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from kvfs.base.errors import (
    AccessDenied,
    Busy,
    Conflict,
    Corrupt,
    Invalid,
    KvfsError,
    NotFound,
    NotSupported,
    Unavailable,
)
from kvfs.base.version import PROTOCOL
from kvfs.cluster import handshake, peer_protocol, secrets
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_protocol import CHUNK_BYTES, Ask, PeerAddress
from kvfs.cluster.peer_server import Method, OfFile
from kvfs.cluster.secrets import Secrets
from kvfs.datastore import checksum
from kvfs.http.api import FileRange, Head, Response
from kvfs.transfer import chunk_receiver, peer_fetch, sources
from kvfs.transfer.transfer import WantedFile
from tests.cluster.waiting import until
from tests.contract.peers import (
    CLUSTER,
    INO,
    VERSION,
    Peer,
    content,
    open_files,
    peers,
    read_back,
)
from tests.fault.proxy import Proxy, proxied

SIZES = [0, 1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES - 7]
SMALL = 3 * CHUNK_BYTES + 5
LARGE = 16 * CHUNK_BYTES - 9


def run(
    root: Path,
    count: int,
    test: Callable[..., Awaitable[None]],
    interpreter: Path | None = None,
    **methods: Method,
) -> None:
    """The test, with so many nodes; `interpreter`, `methods`: as `peers` has them."""

    async def main() -> None:
        async with peers(root, count, interpreter, methods) as made:
            await test(*made)

    trio.run(main)


@contextlib.contextmanager
def before(peer: Peer) -> Iterator[tuple[Proxy, PeerAddress]]:
    """A proxy on the way to a node."""
    with proxied(("127.0.0.1", 0), peer.address[1:]) as proxy:
        yield proxy, PeerAddress(peer.address.node, "127.0.0.1", proxy.port)


def spoil(peer: Peer) -> None:
    """Each chunk of the data file rots."""
    fd = peer.files.open(INO, VERSION, os.O_WRONLY)
    for offset in range(0, os.fstat(fd).st_size, CHUNK_BYTES):
        os.pwrite(fd, b"rot", offset + 1)
    os.close(fd)


# --- whole ---


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(
    ("over", "size"),
    [*(("tcp", size) for size in SIZES), *(("rdma", size) for size in SIZES[-2:])],
    indirect=["over"],
)
def test_a_file_comes_whole(tmp_path: Path, over: Path | None, size: int, sealed: bool) -> None:
    data = content(size)

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data, sealed=sealed)
        assert await reader.bring(wanted, [holder.address]) == data

    run(tmp_path, 2, test, over)


def test_all_holders_of_a_large_file_bring_a_part(tmp_path: Path, over: Path | None) -> None:
    data = content(LARGE)

    async def test(one: Peer, two: Peer, three: Peer, reader: Peer) -> None:
        holders = [one, two, three]
        wanted, *_ = [holder.put(data) for holder in holders]
        with contextlib.ExitStack() as stack:
            ways = [stack.enter_context(before(holder)) for holder in holders]
            for proxy, _ in ways:
                proxy.bytes_s = 64 << 20
            assert await reader.bring(wanted, [address for _, address in ways]) == data
        assert all(holder.server.counters["peers_sent_bytes"] > 0 for holder in holders)

    run(tmp_path, 4, test, over)


def test_what_is_zero_does_not_travel(tmp_path: Path) -> None:
    data = bytes(peer_protocol.MOST_SUMS * CHUNK_BYTES) + b"end"

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data)
        assert await reader.bring(wanted, [holder.address]) == data
        assert holder.server.counters["peers_sent_bytes"] < len(data)
        assert reader.files.stat(INO, VERSION).st_blocks * 512 < CHUNK_BYTES

    run(tmp_path, 2, test)


@pytest.mark.parametrize("size", [1000, SMALL])
def test_a_holder_whose_index_is_new_serves_what_it_has(tmp_path: Path, size: int) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        fd = holder.files.create(INO, VERSION)
        os.ftruncate(fd, size)
        os.pwrite(fd, b"some", size // 2)
        sums = checksum.checksum(fd, size)
        os.close(fd)
        assert sums is not None
        wanted = WantedFile(INO, VERSION, size, sums.combined)
        data = await reader.bring(wanted, [holder.address])
        assert data == bytes(size // 2) + b"some" + bytes(size - size // 2 - 4)

    run(tmp_path, 2, test)


def test_very_many_files_at_once_come_in_turn(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        files = [holder.put(content(1000, number), ino=INO + number) for number in range(200)]

        async def bring(number: int) -> None:
            assert await reader.bring(files[number], [holder.address]) == content(1000, number)

        async with trio.open_nursery() as nursery:
            for number in range(len(files)):
                nursery.start_soon(bring, number)
        assert reader.client.connected < len(files) // 2

    run(tmp_path, 2, test)


def test_what_has_come_is_handed_on_before_the_rest_has(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(holder: Peer, middle: Peer, last: Peer) -> None:
        wanted = holder.put(data)
        with before(holder) as (proxy, address):
            first = middle.fetch(wanted, [address])
            await first.has(2)
            proxy.held = "out"
            second = last.fetch(wanted, [middle.address])
            await second.span(0, CHUNK_BYTES)
            assert not first.transfer.plan.is_whole
            proxy.held = None
            await second.whole()
        assert read_back(second) == data
        first.close()
        second.close()

    run(tmp_path, 3, test)


def test_readers_at_once_take_from_each_other(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(holder: Peer, *readers: Peer) -> None:
        wanted = holder.put(data)
        with before(holder) as (proxy, address):
            proxy.bytes_s = 32 << 20

            async def read(reader: Peer) -> None:
                assert await reader.bring(wanted, [address]) == data

            async with trio.open_nursery() as nursery:
                for reader in readers:
                    nursery.start_soon(read, reader)
        assert holder.server.counters["peers_sent_bytes"] < len(readers) * LARGE // 2
        assert holder.server.counters["peers_redirected"]

    run(tmp_path, 7, test)


def test_holders_that_gave_it_to_each_other_a_moment_ago_all_give_it(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(first: Peer, second: Peer, third: Peer, reader: Peer) -> None:
        wanted = first.put(data)
        assert await second.bring(wanted, [first.address]) == data
        assert await third.bring(wanted, [first.address, second.address]) == data
        holders = first, second, third
        before_it = [each.server.counters["peers_sent_bytes"] for each in holders]
        with contextlib.ExitStack() as stack:
            addresses = []
            for each in holders:
                proxy, address = stack.enter_context(before(each))
                proxy.bytes_s = 32 << 20
                addresses.append(address)
            assert await reader.bring(wanted, addresses) == data
        gave = [each.server.counters["peers_sent_bytes"] for each in holders]
        assert all(now > then for then, now in zip(before_it, gave, strict=True))

    run(tmp_path, 4, test)


def test_nothing_is_left_open(tmp_path: Path, over: Path | None) -> None:
    data = content(SMALL)

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data)
        await reader.bring(wanted, [holder.address])
        while open_files(tmp_path):
            await trio.sleep(0.01)

    run(tmp_path, 2, test, over)


# --- wrong ---


def test_rot_is_refused_and_the_good_copy_taken(tmp_path: Path, over: Path | None) -> None:
    data = content(LARGE)

    async def test(rotten: Peer, good: Peer, reader: Peer) -> None:
        wanted = rotten.put(data)
        good.put(data)
        spoil(rotten)
        assert await reader.bring(wanted, [rotten.address, good.address]) == data
        assert reader.fetches.counters["fetches_wrong_bytes"]

    run(tmp_path, 3, test, over)


@pytest.mark.parametrize("size", [100, SMALL])
def test_rot_alone_is_corrupt(tmp_path: Path, over: Path | None, size: int) -> None:
    async def test(rotten: Peer, reader: Peer) -> None:
        wanted = rotten.put(content(size))
        spoil(rotten)
        with pytest.raises(Corrupt):
            await reader.bring(wanted, [rotten.address])

    run(tmp_path, 2, test, over)


@pytest.mark.parametrize("size", [100, SMALL])
def test_checksums_that_the_record_does_not_vouch_for_are_corrupt(
    tmp_path: Path, size: int
) -> None:
    async def test(liar: Peer, reader: Peer) -> None:
        wanted = liar.put(content(size))
        with pytest.raises(Corrupt):
            await reader.bring(wanted._replace(checksum=bytes(16)), [liar.address])

    run(tmp_path, 2, test)


@pytest.mark.parametrize("sealed", [True, False])
def test_content_of_another_size_is_a_conflict(tmp_path: Path, sealed: bool) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(1000), sealed=sealed)
        with pytest.raises(Conflict):
            await reader.bring(wanted._replace(size=1001), [holder.address])

    run(tmp_path, 2, test)


def test_content_that_changes_meanwhile_is_a_conflict(tmp_path: Path, over: Path | None) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(LARGE), sealed=False)
        with before(holder) as (proxy, address):
            proxy.bytes_s = 32 << 20
            arriving = reader.fetch(wanted, [address])
            await arriving.span(0, 1)
            fd = holder.files.open(INO, VERSION, os.O_WRONLY)
            os.pwrite(fd, b"new", 0)
            os.utime(fd, ns=(1, 1))
            os.close(fd)
            with pytest.raises(Conflict):
                await arriving.whole()
        arriving.close()

    run(tmp_path, 2, test, over)


@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_written_is_busy(tmp_path: Path, sealed: bool) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(SMALL), sealed=sealed)
        holder.written.add(INO)
        with pytest.raises(Busy):
            await reader.bring(wanted, [holder.address])

    run(tmp_path, 2, test)


def test_nobody_has_it(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(SMALL))
        holder.files.unlink(INO, VERSION)
        for addresses in ([], [holder.address], [reader.address]):
            with pytest.raises(NotFound):
                await reader.bring(wanted, addresses)

    run(tmp_path, 2, test)


def dead() -> PeerAddress:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return PeerAddress(9, *listener.getsockname())


def test_a_dead_holder_is_left_for_another(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data)
        with pytest.raises(Unavailable, match="node 9"):
            await reader.bring(wanted, [dead()])
        assert await reader.bring(wanted, [dead(), holder.address]) == data

    run(tmp_path, 2, test)


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_holder_that_stops_is_left_for_another(tmp_path: Path, how: str) -> None:
    data = content(LARGE)

    async def test(leaving: Peer, staying: Peer, reader: Peer) -> None:
        wanted = leaving.put(data)
        staying.put(data)
        with before(leaving) as (proxy, address), before(staying) as (other, second):
            proxy.bytes_s = other.bytes_s = 32 << 20
            arriving = reader.fetch(wanted, [address, second])
            await arriving.has(2)
            if how == "killed":
                proxy.is_refusing = True
                proxy.cut()
            else:
                proxy.held = "both"
            await arriving.whole()
        assert read_back(arriving) == data
        arriving.close()

    run(tmp_path, 3, test)


def test_a_connection_that_breaks_is_made_again(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data)
        with before(holder) as (proxy, address):
            proxy.bytes_s = 64 << 20
            arriving = reader.fetch(wanted, [address])
            for chunks in (1, 6, 11):
                await arriving.has(chunks)
                proxy.cut()
            await arriving.whole()
        assert read_back(arriving) == data
        arriving.close()

    run(tmp_path, 2, test)


def test_a_silent_holder_is_left_for_another(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(silent: Peer, other: Peer, reader: Peer) -> None:
        wanted = silent.put(data)
        other.put(data)
        with before(silent) as (proxy, address):
            proxy.bytes_s = 16 << 20
            arriving = reader.fetch(wanted, [address])
            await arriving.has(1)
            proxy.held = "out"
            arriving.close()
            assert await reader.bring(wanted, [address, other.address]) == data

    run(tmp_path, 3, test)


def test_what_is_waited_for_is_not_asked_of_who_was_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be reached holds a reader up once, however often it is tried."""
    monkeypatch.setattr(sources, "_REST_S", 0.0)
    data = content(LARGE)

    async def test(silent: Peer, other: Peer, reader: Peer) -> None:
        wanted = silent.put(data)
        other.put(data)
        with before(silent) as (proxy, address):
            proxy.held = "both"
            arriving = reader.fetch(wanted, [address, other.address])
            for offset in range(0, LARGE, CHUNK_BYTES):
                await arriving.span(offset, 1)
        assert read_back(arriving) == data
        # A machine that is very busy is silent now and then, too; of 16 chunks.
        assert reader.fetches.counters["fetches_hedged"] <= 6
        arriving.close()

    run(tmp_path, 3, test)


def test_who_was_silent_is_asked_last_for_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_fetch, "_DOUBT_S", 3600.0)

    async def test(silent: Peer, other: Peer, reader: Peer) -> None:
        with before(silent) as (proxy, address):
            proxy.held = "both"
            for number in range(20):
                data = content(1000, number)
                wanted = other.put(data, ino=INO + number)
                assert await reader.bring(wanted, [address, other.address]) == data
            assert reader.fetches.counters["fetches_hedged"] <= 8
            proxy.held = None
            wanted = silent.put(data, ino=INO + 100)
            assert await reader.bring(wanted, [address]) == data, "it is not given up"

    run(tmp_path, 3, test)


def test_a_slow_holder_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    data = content(LARGE)

    async def test(slow: Peer, fast: Peer, reader: Peer) -> None:
        wanted = slow.put(data)
        fast.put(data)
        with before(slow) as (proxy, address):
            proxy.bytes_s = 100_000  # a chunk would take 40 s, the file 11 minutes
            assert await reader.bring(wanted, [address, fast.address]) == data
        assert reader.fetches.counters["fetches_hedged"]

    run(tmp_path, 3, test)


def test_silence_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(silent: Peer, reader: Peer) -> None:
        wanted = silent.put(content(LARGE))
        with before(silent) as (proxy, address):
            proxy.bytes_s = 64 << 20
            arriving = reader.fetch(wanted, [address])
            await arriving.has(1)
            proxy.held = "out"
            monkeypatch.setattr(chunk_receiver, "STALL_S", 0.3)
            monkeypatch.setattr(peer_fetch, "STALL_S", 0.3)
            with pytest.raises(Unavailable):
                await arriving.whole()
            arriving.close()

    run(tmp_path, 2, test)


def test_a_full_disk_is_told(tmp_path: Path, over: Path | None) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(SMALL))
        fd = os.open("/dev/full", os.O_WRONLY)
        arriving = reader.fetch_into(fd, wanted, [holder.address])
        with pytest.raises(OSError, match="No space left"):
            await arriving.whole()
        arriving.close()

    run(tmp_path, 2, test, over)


# --- peers that say what is not so ---


class Liar(Peer):
    """A node of the cluster that answers requests for data as it likes."""

    def __init__(self, node: int, root: Path) -> None:
        super().__init__(node, root)
        self.answer: Callable[[Peer], Response] | None = None
        true = self.server._data

        async def data(head: Head, peer: Party) -> Response:
            return await true(head, peer) if self.answer is None else self.answer(self)

        self.server._data = data  # type: ignore[method-assign]


def _sums(peer: Peer) -> list[tuple[bytes, bytes]]:
    entry = peer.index.get(INO)
    assert entry is not None
    return [(peer_protocol.SUMS, peer_protocol.render_sums(entry.chunks))]


def _cut_short(peer: Peer) -> Response:
    fd = peer.files.open(INO, VERSION, os.O_RDWR)
    os.ftruncate(fd, 1000)
    return Response(200, _sums(peer), FileRange(fd, 0, CHUNK_BYTES, lambda: os.close(fd)))


def _redirect(*addresses: PeerAddress) -> Response:
    return Response(307, [], peer_protocol.render_addresses(addresses))


LIES: dict[str, tuple[Callable[[Peer], Response], type[KvfsError]]] = {
    "another length": (lambda peer: Response(200, _sums(peer), b"12345"), Corrupt),
    "no bytes": (lambda peer: Response(200, _sums(peer), b""), Corrupt),
    "lent, unasked": (
        lambda peer: Response(200, [*_sums(peer), (peer_protocol.LENT, b"9 1 a b c d")], b""),
        Corrupt,
    ),
    "no checksums": (lambda _peer: Response(200, [], bytes(CHUNK_BYTES)), Corrupt),
    "odd checksums": (
        lambda _peer: Response(200, [(peer_protocol.SUMS, b"zz")], bytes(CHUNK_BYTES)),
        Corrupt,
    ),
    "other bytes": (lambda peer: Response(200, _sums(peer), bytes(CHUNK_BYTES)), Corrupt),
    "less than it said": (_cut_short, Unavailable),
    "an error that is none": (lambda _peer: Response(500, [], b"oops"), Unavailable),
    "no content": (lambda _peer: Response(204), Unavailable),
    "a redirect that is none": (lambda _peer: Response(307, [], b"oops"), Invalid),
    "go away": (lambda _peer: _redirect(), Unavailable),
    "ask yourself": (lambda peer: _redirect(peer.address), Unavailable),
    "ask nowhere": (lambda _peer: _redirect(PeerAddress(8, "a..b", 1)), Unavailable),
    "ask at no port": (lambda _peer: _redirect(PeerAddress(8, "host", 70_000)), Invalid),
    "ask the dead": (lambda _peer: _redirect(dead()), Unavailable),
    "later": (lambda _peer: Response(202), Unavailable),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_is_found_out_and_left(
    tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_fetch, "_RELAY_MOST_S", 0.3)
    data = content(SMALL)
    answer, error = LIES[lie]

    async def main() -> None:
        async with peers(tmp_path, 2) as (honest, reader), trio.open_nursery() as nursery:
            liar = Liar(3, tmp_path / "3")
            await nursery.start(liar.run)
            wanted = liar.put(data)
            honest.put(data)
            liar.answer = answer
            with pytest.raises(error):
                await reader.bring(wanted, [liar.address])
            assert await reader.bring(wanted, [liar.address, honest.address]) == data
            nursery.cancel_scope.cancel()

    trio.run(main)


# --- strangers ---


def test_another_secret_is_refused_on_both_sides(tmp_path: Path) -> None:
    async def test(holder: Peer, stranger: Peer) -> None:
        wanted = holder.put(content(100))
        stranger.known = Secrets([secrets.generate(CLUSTER)])
        with pytest.raises(AccessDenied, match="another secret"):
            await stranger.bring(wanted, [holder.address])
        await until(lambda: holder.server.counters["peers_refused"] == 1, "it counts it")
        assert holder.server.counters["peers_sent_bytes"] == 0

    run(tmp_path, 2, test)


def test_a_secret_that_is_being_changed_is_known_to_both(tmp_path: Path) -> None:
    data = content(100)

    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(data)
        reader.known = reader.known.with_new()
        assert await reader.bring(wanted, [holder.address]) == data

    run(tmp_path, 2, test)


def test_another_version_is_refused_with_both_named(tmp_path: Path) -> None:
    async def test(holder: Peer, old: Peer) -> None:
        wanted = holder.put(content(100))
        old.identity.party = Party(CLUSTER, 2, 1, "old", PROTOCOL + 2, "9.9")
        with pytest.raises(NotSupported, match=rf"9\.9 .*protocol {PROTOCOL + 2}.*{PROTOCOL}"):
            await old.bring(wanted, [holder.address])

    run(tmp_path, 2, test)


def test_an_address_that_leads_to_another_node_is_no_holder(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(100))
        with pytest.raises(Conflict, match="node 1 now"):
            await reader.bring(wanted, [holder.address._replace(node=5)])

    run(tmp_path, 2, test)


@pytest.mark.parametrize("sealed", [True, False])
def test_who_has_no_lease_serves_what_changes_no_more(tmp_path: Path, sealed: bool) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        wanted = holder.put(content(100), sealed=sealed)
        holder.serves = False
        if sealed:
            assert await reader.bring(wanted, [holder.address]) == content(100)
            return
        with pytest.raises(Unavailable, match="no lease"):
            await reader.bring(wanted, [holder.address])

    run(tmp_path, 2, test)


HELLO = b"POST /v1/hello HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
ASKED = peer_protocol.data_target(peer_protocol.Ask(INO, VERSION, 100, 0, 1, sealed=True))
STRANGERS = {
    "no hello": (b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % ASKED, 403),
    "a proof without a hello": (
        b"GET %b HTTP/1.1\r\nHost: a\r\nX-Kvfs-Proof: AAAA\r\n\r\n" % ASKED,
        403,
    ),
    "a method without a hello": (b"POST /v1/do/sums HTTP/1.1\r\nHost: a\r\n\r\n", 403),
    "a hello that is none": (HELLO % (3, b"abc"), 400),
    "a hello that is too long": (HELLO % (10_000, bytes(10_000)), 413),
    "another page": (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", 403),
    "a long head": (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "no HTTP": (b"\x00\x01\x02\x03\r\n\r\n", 400),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_gets_nothing(tmp_path: Path, case: str) -> None:
    sent, status = STRANGERS[case]

    async def test(holder: Peer) -> None:
        holder.put(content(100))
        async with await trio.open_tcp_stream(*holder.address[1:]) as stream:
            await stream.send_all(sent)
            answer = await stream.receive_some(65536)
        assert answer.split()[1] == b"%d" % status
        assert holder.server.counters["peers_sent_bytes"] == 0

    run(tmp_path, 1, test)


def test_a_proof_counts_on_its_own_connection_alone(tmp_path: Path) -> None:
    async def test(holder: Peer, reader: Peer) -> None:
        holder.put(content(100))
        dialing = handshake.Dialing(reader.known, reader.identity.party)
        fields = b""
        for _ in range(2):
            async with await trio.open_tcp_stream(*holder.address[1:]) as stream:
                await stream.send_all(HELLO % (len(dialing.hello), dialing.hello))
                reply = await stream.receive_some(65536)
                if not fields:
                    _, proof = dialing.conclude(reply.partition(b"\r\n\r\n")[2])
                    fields = b"Host: a\r\nX-Kvfs-Proof: " + peer_protocol.render_proof(proof)
                    continue  # it is not used here, but kept for the next connection
                await stream.send_all(b"GET %b HTTP/1.1\r\n%b\r\n\r\n" % (ASKED, fields))
                assert (await stream.receive_some(65536)).split()[1] == b"403"

    run(tmp_path, 2, test)


# --- methods ---


async def _double(peer: Party, params: object) -> object:
    return [peer.node, params]


async def _fail(_peer: Party, _params: object) -> object:
    raise Busy("not now")


async def _wait(_peer: Party, _params: object) -> object:
    await trio.sleep(0.5)
    return None


async def _repeat(_peer: Party, params: object) -> object:
    return params


def test_methods_answer_or_raise_what_they_raise(tmp_path: Path) -> None:
    async def test(asked: Peer, asking: Peer) -> None:
        assert await asking.client.call(asked.address, "double", {"a": b"b"}) == [2, {"a": b"b"}]
        with pytest.raises(Busy, match="not now"):
            await asking.client.call(asked.address, "fail", None)
        with pytest.raises(NotSupported):
            await asking.client.call(asked.address, "unknown", None)
        assert asking.client.connected == 1

    run(tmp_path, 2, test, double=_double, fail=_fail)


def test_a_method_that_takes_too_long_is_unavailable(tmp_path: Path) -> None:
    async def test(asked: Peer, asking: Peer) -> None:
        with pytest.raises(Unavailable, match=r"did not answer in 0\.1 s"):
            await asking.client.call(asked.address, "wait", None, 0.1)

    run(tmp_path, 2, test, wait=_wait)


def test_a_node_that_was_started_again_is_met_again(tmp_path: Path) -> None:
    async def test(asked: Peer, asking: Peer) -> None:
        with before(asked) as (proxy, address):
            assert await asking.client.call(address, "answer", 1) == 1
            proxy.cut()
            assert await asking.client.call(address, "answer", 2) == 2
        with pytest.raises(KvfsError):
            await asking.client.call(address, "answer", 3)

    run(tmp_path, 2, test, answer=_repeat)


class About:
    """A method whose result is about one file."""

    def __init__(self) -> None:
        self.ask = Ask(0, 0, 0, 0, 1, sealed=False)

    async def tell(self, _peer: Party, _params: object) -> OfFile:
        return OfFile(["about it"], self.ask)

    def put(self, holder: Peer, data: bytes, *, sealed: bool = True) -> WantedFile:
        wanted = holder.put(data, sealed=sealed)
        self.ask = Ask(INO, VERSION, wanted.size, 0, 1, sealed=sealed)
        return wanted


@pytest.mark.parametrize("sealed", [True, False])
def test_the_bytes_of_a_small_file_come_along_with_what_is_told_of_it(
    tmp_path: Path, sealed: bool
) -> None:
    about = About()

    async def test(here: Peer, there: Peer) -> None:
        async def told(takes: int) -> int:
            found = await here.client.call(there.address, "tell", None, 5.0, takes)
            assert found == ["about it"]
            return here.client.ahead.counters["answers_ahead"]

        data = content(50_000)
        wanted = about.put(there, data, sealed=sealed)
        assert await told(0) == 0
        assert await told(49_999) == 0
        assert await told(50_000) == 1
        there.serves = False
        assert await here.bring(wanted, [there.address]) == data, "without another request"
        there.serves = True
        there.written.add(INO)
        assert await told(50_000) == 1, "who wants the bytes then is told why"

    run(tmp_path, 2, test, tell=about.tell)


def test_bytes_that_come_along_are_compared_with_the_record(tmp_path: Path) -> None:
    about = About()

    async def test(here: Peer, there: Peer) -> None:
        wanted = about.put(there, content(50_000))
        spoil(there)
        await here.client.call(there.address, "tell", None, 5.0, 65_536)
        with pytest.raises(Corrupt):
            await here.bring(wanted, [there.address])

    run(tmp_path, 2, test, tell=about.tell)
