"""Connections to the NFS door, by the kernel's tables of TCP sockets (proc(5))."""

import ipaddress
import socket
from collections import Counter
from collections.abc import Container
from typing import Final

_ESTABLISHED: Final = "01"
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")


def clients(port: int, besides: Container[int]) -> dict[str, int]:
    """Returns the address of each client, and how many connections it has to this port of the host.
    Those from ports `besides` do not count."""
    found: Counter[str] = Counter()
    for path in _TABLES:
        try:
            with open(path, encoding="ascii") as table:
                next(table)
                for line in table:
                    fields = line.split()
                    is_ours = fields[3] == _ESTABLISHED and _port(fields[1]) == port
                    if is_ours and _port(fields[2]) not in besides:
                        found[_address(fields[2])] += 1
        except OSError:  # no IPv6
            continue
    return dict(sorted(found.items()))


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _address(end: str) -> str:
    """Returns an address; each of its 32 bits are a number in the machine's order, in hexadecimal
    digits."""
    digits = end.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    packed = b"".join(socket.htonl(word).to_bytes(4, "big") for word in words)
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
