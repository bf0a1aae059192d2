"""A process with a mirror, which counts in the metadata until it is killed, for the tests that do
so. It prints each number that was acknowledged.

usage: mirror_victim.py DIRECTORY URL NODE
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.meta.interface import Transaction
from tests.contract.mirrors import Mirror


def main(directory: str, url: str, node: str) -> None:
    mirror = Mirror(Path(directory), url, node=int(node))
    key = b"victim " + node.encode()

    def count(t: Transaction) -> int:
        value = int(t.get(key) or b"0") + 1
        t.put(key, b"%d" % value)
        t.put(b"%b %d" % (key, value % 100), bytes(200))
        return value

    while True:
        print(mirror.transact_now(count), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
