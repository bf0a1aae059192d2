"""Tells whether an NFS server answers, by asking it over the network as its clients do.

A server whose threads all wait for each other runs on, and only its clients would notice.
"""

import itertools
import struct
from collections.abc import MutableSet
from typing import Final

import trio

from kvfs.base.config import Address

_words: Final = struct.Struct(">I").pack
_LAST: Final = 1 << 31
"""The bit of a record's mark for its last fragment; the rest is its length (RFC 5531, 11)."""
_CALL, _RPC, _NFS, _VERSION, _COMPOUND = 0, 2, 100_003, 4, 1
_AUTH_NONE, _AUTH_SYS, _NOBODY = 0, 1, 65534
_PUTROOTFH, _GETATTR, _TYPE = 24, 9, 1 << 1
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where it listens at all of them
_LONGEST: Final = 4096


def call(number: int) -> bytes:
    """Returns a record that asks for the type of the root (RFC 7530, 15.2)."""
    name = b"kvfs"
    who = _packed(0, len(name)) + name + _packed(_NOBODY, _NOBODY, 0)
    head = _packed(number, _CALL, _RPC, _NFS, _VERSION, _COMPOUND, _AUTH_SYS, len(who)) + who
    operations = _packed(0, 0, 2, _PUTROOTFH, _GETATTR, 1, _TYPE)
    message = head + _packed(_AUTH_NONE, 0) + operations
    return _packed(_LAST | len(message)) + message


async def until_silent(
    address: Address, own_ports: MutableSet[int], *, every_s: float, patience_s: float
) -> None:
    """Returns when the server has answered and then did not for so long. If nothing answers from
    the beginning (a packet filter may be between), its state is not known, and this does not
    return. `own_ports`: those of connections that are no client's."""
    has_answered = False
    for number in itertools.count(1):
        await trio.sleep(every_s)
        with trio.move_on_after(patience_s) as waiting:
            await _until_answered(address, number & 0xFFFF_FFFF, own_ports, every_s)
            has_answered = True
        if waiting.cancelled_caught and has_answered:
            return


async def _until_answered(
    address: Address, number: int, own_ports: MutableSet[int], every_s: float
) -> None:
    while True:
        try:
            return await _ask(address, number, own_ports)
        except OSError:
            await trio.sleep(every_s)


async def _ask(address: Address, number: int, own_ports: MutableSet[int]) -> None:
    """Asks, and returns when it has answered. Raises OSError."""
    host = _ANY.get(address.host, address.host)
    with trio.socket.socket(
        trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET, trio.socket.SOCK_STREAM
    ) as connection:
        await connection.bind(("::" if ":" in host else "0.0.0.0", 0))  # noqa: S104  any port
        port = connection.getsockname()[1]
        own_ports.add(port)
        try:
            await connection.connect((host, address.port))
            await trio.SocketStream(connection).send_all(call(number))
            if not await connection.recv(_LONGEST):
                raise ConnectionResetError(f"{address} closed the connection")
        finally:
            own_ports.discard(port)


def _packed(*words: int) -> bytes:
    return b"".join(map(_words, words))
