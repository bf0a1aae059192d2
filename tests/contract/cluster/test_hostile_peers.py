"""A node whose peer does not speak as nodes do: each request ends, with an error."""

import contextlib
from collections.abc import Awaitable, Callable

import pytest
import trio

from kvfs.base.errors import KvfsError
from kvfs.cluster.handshake import Party
from kvfs.cluster.peer_client import PeerClient
from kvfs.cluster.peer_protocol import PeerAddress, PeerIdentity
from tests.contract.peers import CLUSTER, OURS

DEADLINE_S = 0.3
Serve = Callable[[trio.SocketStream], Awaitable[None]]


async def read_nothing(_stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def tell_nonsense(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"nonsense\r\n\r\n" * 1000)


async def promise_much(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    await trio.sleep_forever()


async def never_end_a_head(stream: trio.SocketStream) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        await stream.send_all(b"x" * 1000)


async def say_hello_again(stream: trio.SocketStream) -> None:
    """It sends back what it was sent."""
    while data := await stream.receive_some():
        _, _, body = data.partition(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        await stream.send_all(head + body)


@pytest.mark.parametrize(
    "serve", [read_nothing, tell_nonsense, promise_much, never_end_a_head, say_hello_again]
)
def test_a_request_to_a_peer_that_speaks_otherwise_ends(serve: Serve) -> None:
    async def attend(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):
            await serve(stream)

    async def main() -> None:
        me = PeerAddress(1, "127.0.0.1", 1)
        client = PeerClient(PeerIdentity(Party(CLUSTER, 1, 1, "host-1"), lambda: OURS, me))
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, attend, [listener])
            peer = PeerAddress(2, *listener.socket.getsockname()[:2])
            with trio.fail_after(60):
                for _ in range(2):
                    with pytest.raises(KvfsError):
                        await client.call(peer, "tell-names", [bytes(900_000)], DEADLINE_S)
            nursery.cancel_scope.cancel()
        client.close()

    trio.run(main)
