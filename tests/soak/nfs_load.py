"""What an NFS client of a host does while a soak lasts: files are written, get their names when
they are whole, and are read."""

import contextlib
import random
from collections.abc import Callable
from typing import Final

from tests.cluster.cluster import Host
from tests.nfs.door import Door
from tests.nfs.files import Raw41
from tests.nfs.rpc import RpcError
from tests.nfs.status import NfsError

FILES: Final = "exported"
"""The namespace."""
NFS_PORT: Final = 2049
SERVES_NFS: Final = ("--nfs", f"127.0.0.1:{NFS_PORT}")
FAILURES: Final = (NfsError, RpcError)
"""Beside OSError."""
_NAMES: Final = 30


class NfsLoad:
    """The client of one host, for one thread there; it connects anew after each failure, as a
    kernel does."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._door: Door | None = None
        self._files: Raw41 | None = None
        self._there: set[str] = set()

    def step(
        self, draw: random.Random, content: Callable[[str], bytes]
    ) -> tuple[str, bytes] | None:
        """Writes a file, or reads one: then it returns its name and what it has. A file that was
        written whole is there. Raises OSError and FAILURES."""
        files = self._connected()
        try:
            name = f"{self._host.number}-{draw.randrange(_NAMES)}"
            if name in self._there and draw.random() < 0.6:
                return name, files.read(name)
            draft = f".{name}"
            files.write(draft, content(name))
            files.replace(draft, name)
            self._there.add(name)
        except (OSError, *FAILURES):
            self.close()
            raise
        return None

    def close(self) -> None:
        """The connection ends; idempotent."""
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._door.close()
        self._door = self._files = None

    def _connected(self) -> Raw41:
        if self._files is None:
            self._door = Door(self._host, NFS_PORT, 0)
            try:
                self._files = Raw41(self._door, FILES)
            except BaseException:
                self.close()
                raise
        return self._files
