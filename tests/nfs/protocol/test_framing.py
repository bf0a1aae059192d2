"""XDR and RPC framing, without a server: values and bytes as the RFCs give them, and what a peer
may send that is wrong."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.nfs.rpc import (
    AuthSys,
    Connection,
    RpcError,
    call_message,
    framed,
    results,
)
from tests.nfs.xdr import Packer, Unpacker, XdrError

# ---- values


def test_numbers_are_big_endian() -> None:
    packed = bytes(Packer().uint(1).int32(-2).uint64(1 << 40).int64(-1).boolean(True))
    assert packed == struct.pack(">IiQqI", 1, -2, 1 << 40, -1, 1)
    found = Unpacker(packed)
    assert (found.uint(), found.int32(), found.uint64(), found.int64()) == (1, -2, 1 << 40, -1)
    assert found.boolean() is True
    found.done()


@given(st.binary(max_size=40))
def test_opaque_values_are_padded_to_words(value: bytes) -> None:
    packed = bytes(Packer().opaque(value))
    assert len(packed) % 4 == 0
    assert packed[4 : 4 + len(value)] == value
    assert not any(packed[4 + len(value) :])
    found = Unpacker(packed)
    assert found.opaque() == value
    found.done()


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_arrays_options_and_chains(values: list[bytes]) -> None:
    packer = Packer().array(values, Packer.opaque).optional(None, Packer.uint)
    packer.optional(7, Packer.uint)
    for value in values:
        packer.boolean(True).opaque(value)
    found = Unpacker(bytes(packer.boolean(False)))
    assert found.array(Unpacker.opaque) == values
    assert found.optional(Unpacker.uint) is None
    assert found.optional(Unpacker.uint) == 7
    assert found.chain(Unpacker.opaque) == values
    found.done()


def test_a_name_that_is_no_text_comes_back_the_same() -> None:
    name = b"caf\xe9\xff".decode("utf-8", "surrogateescape")
    assert Unpacker(bytes(Packer().string(name))).string() == name


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (b"\0\0\0", Unpacker.uint),
        (b"\0\0\0\2", Unpacker.boolean),
        (b"\0\0\0\5abcd", Unpacker.opaque),
        (b"\0\0\0\1a\0\0\1", Unpacker.opaque),
        (b"\xff\xff\xff\xff", Unpacker.opaque),
        (b"\xff\xff\xff\xff", lambda each: each.array(Unpacker.uint)),
        (b"\0\0\0\2\0\0\0\1", lambda each: each.array(Unpacker.uint)),
        (b"\0\0\0\x0aabcdefghij\0\0", lambda each: each.opaque(longest=9)),
        (b"\0\0\0\0", Unpacker.done),
    ],
)
def test_what_is_no_value_is_an_error(data: bytes, read: Callable[[Unpacker], object]) -> None:
    with pytest.raises(XdrError):
        read(Unpacker(data))


# ---- records and messages


@given(st.binary(max_size=100), st.integers(min_value=1, max_value=40))
def test_a_message_is_cut_into_fragments(message: bytes, longest: int) -> None:
    record, found, last = framed(message, longest), bytearray(), False
    while record:
        assert not last
        head = int.from_bytes(record[:4], "big")
        length, last = head & 0x7FFF_FFFF, bool(head >> 31)
        found += record[4 : 4 + length]
        record = record[4 + length :]
    assert last
    assert found == message


def test_a_call_tells_who_calls() -> None:
    caller = AuthSys(uid=7, gid=8, groups=range(16), machine="host")
    call = Unpacker(call_message(1, 100003, 3, 1, caller))
    assert [call.uint() for _ in range(7)] == [1, 0, 2, 100003, 3, 1, 1]
    body = Unpacker(call.opaque(longest=400))
    assert (body.uint(), body.string()) == (0, "host")
    assert (body.uint(), body.uint()) == (7, 8)
    assert body.array(Unpacker.uint) == list(range(16))
    assert (call.uint(), call.opaque()) == (0, b"")
    call.done()


def test_a_call_of_nobody() -> None:
    call = Unpacker(call_message(1, 100003, 3, 0, None))
    assert [call.uint() for _ in range(10)] == [1, 0, 2, 100003, 3, 0, 0, 0, 0, 0]
    call.done()


_ACCEPTED = (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*_ACCEPTED, 1), "PROG_UNAVAIL"),
        ((*_ACCEPTED, 2, 3, 4), "PROG_MISMATCH"),
        ((*_ACCEPTED, 3), "PROC_UNAVAIL"),
        ((*_ACCEPTED, 4), "GARBAGE_ARGS"),
        ((*_ACCEPTED, 5), "SYSTEM_ERR"),
        ((*_ACCEPTED, 99), "status 99"),
        ((1, 1, 0, 2, 2), "RPC_MISMATCH"),
        ((1, 1, 1, 1), "AUTH_BADCRED"),
        ((1, 1, 1, 5), "AUTH_TOOWEAK"),
    ],
)
def test_what_a_server_refuses_is_named(words: tuple[int, ...], name: str) -> None:
    with pytest.raises(RpcError) as caught:
        results(Unpacker(struct.pack(f">{len(words)}I", *words)))
    assert caught.value.name == name


# ---- a connection


def _success(xid: int, body: bytes = b"") -> bytes:
    return struct.pack(">6I", xid, 1, 0, 0, 0, 0) + body


@contextmanager
def _server(
    answer: Callable[[int], list[bytes]], wait_s: float = 20.0, goes: bool = False
) -> Iterator[Connection]:
    """A connection to a server that answers one call with these pieces, then goes or waits for
    the caller to go."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer, peer.makefile("rb") as calls:
            head = int.from_bytes(calls.read(4), "big") & 0x7FFF_FFFF
            for piece in answer(int.from_bytes(calls.read(head)[:4], "big")):
                peer.sendall(piece)
            if not goes:
                calls.read()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with Connection(*listener.getsockname(), wait_s=wait_s) as connection:
            yield connection
    finally:
        thread.join()
        listener.close()


def test_a_reply_in_many_fragments_and_pieces() -> None:
    def answer(xid: int) -> list[bytes]:
        record = framed(_success(xid, b"\0\0\0\7"), longest=5)
        return [record[at : at + 1] for at in range(len(record))]

    with _server(answer) as connection:
        assert connection.call(1, 2, 3).uint() == 7


def test_replies_to_others_are_passed_over() -> None:
    def answer(xid: int) -> list[bytes]:
        return [framed(_success(xid - 1, b"\0\0\0\1")), framed(_success(xid, b"\0\0\0\2"))]

    with _server(answer) as connection:
        assert connection.call(1, 2, 3).uint() == 2


def test_a_server_that_says_nothing_is_not_waited_for_longer() -> None:
    with _server(_part_of_a_reply, wait_s=0.05) as connection, pytest.raises(TimeoutError):
        connection.call(1, 2, 3)


def test_a_server_that_goes_is_an_error() -> None:
    with _server(_part_of_a_reply, goes=True) as connection, pytest.raises(ConnectionResetError):
        connection.call(1, 2, 3)


def _part_of_a_reply(xid: int) -> list[bytes]:
    return [framed(_success(xid))[:7]]


def test_a_record_without_end_is_an_error() -> None:
    with _server(lambda _: [b"\x7f\xff\xff\xff"]) as connection, pytest.raises(XdrError):
        connection.call(1, 2, 3)
