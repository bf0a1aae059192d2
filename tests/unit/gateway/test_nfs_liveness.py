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


async def watched(answers: int, deadline_s: float) -> tuple[bool, int]:
    """Whether it was found silent, and how often it was asked."""
    server = Server(answers)
    own_ports: set[int] = set()
    with server.listener, trio.move_on_after(deadline_s) as until:
        address = await server.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            await liveness.until_silent(address, own_ports, every_s=0.01, patience_s=0.1)
            nursery.cancel_scope.cancel()
    assert not own_ports
    return not until.cancelled_caught, server.asked


def test_silence_after_answers_is_noticed() -> None:
    assert trio.run(watched, 3, 10) == (True, 4)


def test_what_never_answered_is_not_blamed() -> None:
    was_found, asked = trio.run(watched, 0, 0.5)
    assert not was_found
    assert asked > 1


def test_the_call_is_a_whole_record() -> None:
    record = liveness.call(7)
    message = Unpacker(record[4:])
    assert int.from_bytes(record[:4], "big") == len(record) - 4 | 1 << 31
    assert [message.uint() for _ in range(7)] == [7, 0, 2, 100_003, 4, 1, 1]
    assert len(message.opaque()) == 24
    assert message.uint() == 0
