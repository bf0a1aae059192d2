"""Writes of version 4 with little work in Python: of each WRITE the offset alone is made anew.

4.0.0 of libnfs encodes no WRITE of version 4 that has 4 KiB or more.
"""

import socket
from typing import Final

from benchmarks._libnfs import MIB, USER
from tests.nfs import v4_operations as op
from tests.nfs.rpc import AuthSys, Connection, call_message
from tests.nfs.status import check_v4
from tests.nfs.v3_types import Stability
from tests.nfs.v4 import PROGRAM, VERSION, Client40, Owner
from tests.nfs.xdr import Packer

_COMPOUND: Final = 1
_OFFSET_BYTES, _BEHIND_OFFSET_BYTES = 8, 8 + MIB
"""Behind it: how stable, and the data with their length."""
_LAST_FRAGMENT: Final = 1 << 31


class Writer:
    """One connection, one call at a time."""

    def __init__(self, port: int, export: str) -> None:
        self._socket = socket.socket()
        self._user = AuthSys(USER, USER)
        self._connection = Connection("127.0.0.1", port, self._user, made=self._socket)
        self._client = Client40(self._connection)
        self._root = self._client.walk(export)

    def write(self, path: str, size: int) -> None:
        """A new file of as many bytes, in the export's directory, committed."""
        client = self._client
        creation = op.Unchecked()
        opened = client.open(self._root, path.strip("/"), Owner(), creation=creation)
        data = bytes(MIB)
        writing = op.putfh(opened.handle), op.write(opened.stateid, 0, data, Stability.UNSTABLE)
        message = Packer().string("").uint(client.minor).uint(len(writing))
        for each in writing:
            message.uint(each.number).raw(each.arguments)
        arguments = bytearray(bytes(message))
        at = len(arguments) - _BEHIND_OFFSET_BYTES - _OFFSET_BYTES
        for offset in range(0, size, MIB):
            arguments[at : at + _OFFSET_BYTES] = offset.to_bytes(_OFFSET_BYTES, "big")
            self._call(arguments)
        client.commit(opened.handle)
        client.close(opened)

    def close(self) -> None:
        self._connection.close()

    def _call(self, arguments: bytearray) -> None:
        xid = self._connection.fresh_xid()
        head = call_message(xid, PROGRAM, VERSION, _COMPOUND, self._user)
        length = _LAST_FRAGMENT | len(head) + len(arguments)
        self._socket.send(length.to_bytes(4, "big") + head, socket.MSG_MORE)
        self._socket.sendall(arguments)
        check_v4(self._connection.receive(xid).uint(), "WRITE")
