"""A server that answers no more is found; one that never did is not blamed."""

import contextlib

import trio

from gateway.nfs import liveness
from kvfs.base.config import Address
from tests.nfs.xdr import Unpacker


class Server:
    """Answers as often as it is to."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.asked = 0
        self.listener = trio.socket.socket()

    async def listen(self) -> Address:
        await self.listener.bind(("127.0.0.1", 0))
        self.listener.listen()
        return Address(*self.listener.getsockname())

    async def run(self) -> None:
        with contextlib.ExitStack() as connections:
            while True:
                caller, _ = await self.listener.accept()
                connections.enter_context(caller)
                self.asked += 1
                if self.asked <= self.answers:
                    call = await caller.recv(4096)
                    await caller.send(b"\x80\0\0\x04" + call[4:8])


async def watched(answers: int, patience_s: float, enough: int) -> tuple[bool, int]:
    """Whether it was found silent, and how often it was asked: until then, or so often."""
    server = Server(answers)
    own_ports: set[int] = set()
    was_found = False
    with server.listener, trio.fail_after(60):
        address = await server.listen()
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal was_found
                await liveness.until_silent(address, own_ports, every_s=0.01, patience_s=patience_s)
                was_found = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(server.run)
            nursery.start_soon(watch)
            while server.asked < enough:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    assert not own_ports
    return was_found, server.asked


def test_silence_after_answers_is_noticed() -> None:
    # In this time a busy machine answers, too.
    assert trio.run(watched, 3, 2.0, 100) == (True, 4)


def test_what_never_answered_is_not_blamed() -> None:
    assert trio.run(watched, 0, 0.1, 4) == (False, 4)


def test_the_call_is_a_whole_record() -> None:
    record = liveness.call(7)
    message = Unpacker(record[4:])
    assert int.from_bytes(record[:4], "big") == len(record) - 4 | 1 << 31
    assert [message.uint() for _ in range(7)] == [7, 0, 2, 100_003, 4, 1, 1]
    assert len(message.opaque()) == 24
    assert message.uint() == 0
