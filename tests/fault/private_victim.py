"""A process of a node that makes and closes files in a cache namespace until it is killed, for the
tests that do so. It prints each name that was closed.

usage: private_victim.py DIRECTORY URL ROUND
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.contract.hosts import TOP, Host


def main(directory: str, url: str, round_: str) -> None:
    host = Host(Path(directory), url, 1)
    number = 0
    while True:
        number += 1
        name = f"{round_}-{number}"
        ino = host.create(TOP, name.encode(), exclusive=number % 3 == 0)
        host.create(TOP, f"open-{name}".encode())
        host.close_file(ino, behind=number % 5 != 0)
        print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
