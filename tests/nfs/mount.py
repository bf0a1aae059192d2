"""The MOUNT protocol, version 3 (RFC 1813, appendix I), and the portmapper's question for a port
(RFC 1833)."""

from dataclasses import dataclass
from typing import Final

from tests.nfs.rpc import Connection
from tests.nfs.status import check_mount
from tests.nfs.xdr import Packer, Unpacker

PROGRAM: Final = 100005
VERSION: Final = 3
PORTMAPPER: Final = 100000
PORTMAPPER_PORT: Final = 111

_LONGEST_HANDLE: Final = 64
_LONGEST_PATH: Final = 1024
_LONGEST_NAME: Final = 255
_TCP: Final = 6
_MNT, _DUMP, _UMNT, _EXPORT = 1, 2, 3, 5


@dataclass(frozen=True)
class Mounted:
    """The handle of an export's root; `flavors`: the kinds of credentials that are taken."""

    handle: bytes
    flavors: list[int]


@dataclass(frozen=True)
class Export:
    path: str
    groups: list[str]


class MountClient:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def null(self) -> None:
        self._call(0).done()

    def mount(self, path: str) -> Mounted:
        reply = self._call(_MNT, bytes(Packer().string(path)))
        check_mount(reply.uint(), f"MNT {path}")
        mounted = Mounted(reply.opaque(_LONGEST_HANDLE), reply.array(Unpacker.uint))
        reply.done()
        return mounted

    def unmount(self, path: str) -> None:
        self._call(_UMNT, bytes(Packer().string(path))).done()

    def mounts(self) -> list[tuple[str, str]]:
        """Hosts and paths, as far as the server remembers them."""
        return self._call(_DUMP).chain(_mount)

    def exports(self) -> list[Export]:
        return self._call(_EXPORT).chain(_export)

    def _call(self, procedure: int, arguments: bytes = b"") -> Unpacker:
        return self._connection.call(PROGRAM, VERSION, procedure, arguments)


def _mount(reply: Unpacker) -> tuple[str, str]:
    return reply.string(_LONGEST_NAME), reply.string(_LONGEST_PATH)


def _export(reply: Unpacker) -> Export:
    path = reply.string(_LONGEST_PATH)
    return Export(path, reply.chain(lambda each: each.string(_LONGEST_NAME)))


def port_of(portmapper: Connection, program: int, version: int) -> int:
    """Where a program of that host listens by TCP; 0: it does not."""
    asked = Packer().uint(program).uint(version).uint(_TCP).uint(0)
    reply = portmapper.call(PORTMAPPER, 2, 3, bytes(asked))
    return reply.uint()
