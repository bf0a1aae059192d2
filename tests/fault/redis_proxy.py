"""A proxy before a server that cuts connections, at bytes drawn from a seed: before a request has
gone through, in its middle, or when it was done and its answer is on the way."""

import contextlib
import random
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16


class CuttingProxy:
    """Listens on the socket `path` and connects to the socket `server`."""

    def __init__(self, path: Path, server: Path, seed: int, most_bytes: int) -> None:
        self.path = path
        self.cuts = 0
        """Connections cut so far."""
        self.most_bytes = most_bytes
        """After at most so many bytes, of both ways together, a connection is cut; 0: never."""
        self._server = server
        self._seed = seed
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for thread in self._threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            draw = random.Random(f"{self._seed} {len(self._threads)}")
            left = draw.randrange(self.most_bytes) if self.most_bytes else None
            thread = threading.Thread(target=self._serve, args=(client, left, draw))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket, left: int | None, draw: random.Random) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._server))
            self._move(client, server, left, draw)

    def _move(
        self,
        client: socket.socket,
        server: socket.socket,
        left: int | None,
        draw: random.Random,
    ) -> None:
        while True:
            for source in select.select([client, server], [], [])[0]:
                block = source.recv(_BLOCK)
                if not block:
                    return
                other = server if source is client else client
                if left is None or len(block) < left:
                    other.sendall(block)
                    left = None if left is None else left - len(block)
                    continue
                # Nothing of the last one, a part, or all: then it is done, and nobody hears.
                other.sendall(block[: draw.choice([0, left, len(block)])])
                self.cuts += 1
                return


@contextlib.contextmanager
def cutting(path: Path, server: Path, seed: int, most_bytes: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(path, server, seed, most_bytes)
    try:
        yield proxy
    finally:
        proxy.close()
