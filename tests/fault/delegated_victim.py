"""A process of a node that makes a file in each directory that it sees, closes it and goes on,
until it is killed, for the tests that do so. It prints each name that was closed.

usage: delegated_victim.py DIRECTORY URL ROUND
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.base.errors import NotFound
from kvfs.tree import tree
from tests.contract.hosts import TOP, Host


def main(directory: str, url: str, round_: str) -> None:
    host = Host(Path(directory), url, 1)
    done = set[int]()
    number = 0
    while True:
        host.mirror.catch_up()
        children = host.mirror.read_now(lambda t: tree.list_children(t, TOP, b"", 1000))
        for child in children:
            if child.ino in done:
                continue
            done.add(child.ino)
            number += 1
            name = f"{round_}-{number}"
            try:
                ino = host.create(child.ino, name.encode(), exclusive=number % 4 == 0)
                host.create(child.ino, f"open-{name}".encode())
                host.close_file(ino, behind=True)
            except NotFound:
                continue  # it went before
            print(f"{child.name.decode()}/{name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
