"""Programs that use a namespace on several nodes while its coherence is changed."""

import hashlib
import random
import threading
from pathlib import Path

from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, kvfs

FILES = 600
DIRECTORIES = 4


class Clients:
    """Programs that write, read and remove files on all nodes until they are stopped."""

    def __init__(self, tops: list[Path]) -> None:
        self.tops = tops
        self.there: dict[str, int] = {}
        """The names that are there, and the numbers of their writers' nodes."""
        self.gone: list[str] = []
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(len(tops))
        ]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def write(self, node: int, name: str) -> None:
        path = self.tops[node] / name
        new = path.with_suffix(".new")
        new.write_bytes(content(name))
        new.rename(path)
        self.there[name] = node

    def _work(self, node: int) -> None:
        """Writes new files, and reads and removes those of this node that were there before."""
        old = [name for name, writer in self.there.items() if writer == node]
        random.Random(node).shuffle(old)
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self.write(node, f"d{count % DIRECTORIES}/new{node}-{count}")
                if len(old) > FILES // 4:
                    name = old.pop()
                    del self.there[name]
                    (self.tops[node] / name).unlink()
                    self.gone.append(name)
                name = old[count % len(old)]
                if (self.tops[node] / name).read_bytes() != content(name):
                    self.failures.append(f"{name} has other content")
            except OSError as error:
                self.failures.append(f"node {node}: {error!r}")


def content(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest() * 100


def change(node: Node, *flags: str) -> None:
    done = kvfs("namespace", *flags, "--store", str(node.store))
    assert done.returncode == 0, done.stderr


def waits_for(node: Node, name: str) -> str:
    done = kvfs("namespace", "show", name, "--store", str(node.store))
    return next(line for line in done.stdout.splitlines() if line.startswith("coherence"))


def changed_while_used(node: Node, clients: Clients, coherence: str) -> None:
    """Files of both nodes, also one that is open, outlive a change of the namespace `blocks`; what
    was removed stays so."""
    for number in range(FILES):
        clients.write(number % 2, f"d{number % DIRECTORIES}/old{number}")
    with (clients.tops[1] / "open").open("wb") as file:
        file.write(b"before ")
        with clients:
            wait_until(lambda: len(clients.gone) > 20, "they work")
            change(node, "set", "blocks", "--coherence", coherence)
            wait_until(lambda: "waits" not in waits_for(node, "blocks"), "it is done", 60)
        file.write(b"after")
    assert clients.failures == []
    assert (clients.tops[1] / "open").read_bytes() == b"before after"
    for top in clients.tops:
        for name in clients.there:
            wait_until(lambda top=top, name=name: is_there(top / name, name), f"{name} is there")
        gone = [top / name for name in clients.gone]
        wait_until(lambda gone=gone: not any(map(Path.exists, gone)), "what was removed is gone")


def is_there(path: Path, name: str) -> bool:
    try:
        return path.read_bytes() == content(name)
    except FileNotFoundError:
        return False
