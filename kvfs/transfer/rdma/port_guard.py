"""Admits hosts to the ports that this process listens on.

The engine listens on every address of the host and knows no authentication. A socket filter on each
listening socket drops the packets of all hosts but the admitted ones, before a connection is made:
to others the port seems not to answer. This needs no privileges.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

MOST: Final = 1000
"""Most hosts: a filter has at most 4096 instructions."""
_INSTRUCTION: Final = struct.Struct("HBBI")
_PROGRAM: Final = struct.Struct("HxxxxxxP")
_ATTACH_FILTER: Final = 26
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06
_NETWORK_HEADER: Final = 0xFFF00000
_SOURCE: Final = _NETWORK_HEADER + 12
_VERSION_4: Final = 0x40
_ALL: Final = 0xFFFFFFFF


def program(hosts: Sequence[str]) -> bytes:
    """Returns a filter that keeps only the IPv4 packets of these addresses."""
    steps = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 1, 0, _VERSION_4),
        (_RETURN, 0, 0, 0),
        (_LOAD_WORD, 0, 0, _SOURCE),
    ]
    for host in hosts[-MOST:]:
        (address,) = struct.unpack("!I", socket.inet_aton(host))
        steps += [(_JUMP_IF_EQUAL, 0, 1, address), (_RETURN, 0, 0, _ALL)]
    return b"".join(_INSTRUCTION.pack(*each) for each in (*steps, (_RETURN, 0, 0, 0)))


def admit(hosts: Sequence[str]) -> int:
    """Admits these IPv4 addresses, and from now on no others, to the ports of this process;
    existing connections stay. Returns how many sockets have no filter; 0 is well."""
    code = program(hosts)
    memory = ctypes.create_string_buffer(code, len(code))
    filters = _PROGRAM.pack(len(code) // _INSTRUCTION.size, ctypes.addressof(memory))
    failed = 0
    for listener in _listeners():
        try:
            listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filters)
        except OSError:
            failed += 1
    return failed


def _listeners() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the engine's threads close descriptors meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found
