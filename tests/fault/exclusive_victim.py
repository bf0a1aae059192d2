"""A process of a node that works in a strict namespace until it is killed, for the tests that do
so. Before each look it reads how many files the other node has made: it must see the last of them.
It prints each name that it closed, and `stale` where a look missed one.

usage: exclusive_victim.py DIRECTORY URL ROUND COUNT_FILE
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.contract.hosts import TOP, Host


def main(directory: str, url: str, round_: str, count_file: str) -> None:
    host = Host(Path(directory), url, 1)
    engine = host.mirror.engine
    number = looks = 0
    while True:
        others = Path(count_file).read_text()
        asked = host.trips
        host.mirror.call(lambda: engine.fresh(1))
        looks += host.trips == asked
        if others and host.find(TOP, b"other-%b" % others.encode()) is None:
            print(f"stale {others}", flush=True)
        number += 1
        if number % 10 == 0:
            name = f"{round_}-{number}"
            host.close_file(host.create(TOP, name.encode(), exclusive=number % 40 == 0))
            print(f"{name} {looks}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
