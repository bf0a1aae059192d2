"""A process with a mirror, which counts in the metadata until it is killed, for the tests that do
so. It prints each number that was acknowledged.

usage: mirror_victim.py DIRECTORY URL NODE [STEP CALL]

STEP: `before NAME` or `after NAME` of STEPS; it kills itself at that step's call of number CALL.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvfs.meta.engine import Transaction
from kvfs.meta.replica.applier import Applier
from kvfs.meta.replica.committer import Proposer
from kvfs.meta.replica.follower import Follower
from tests.contract.mirrors import Mirror

STEPS: Final[dict[str, tuple[type, str]]] = {
    "propose": (Proposer, "_ask"),  # what was run is sent; a coroutine: there is no `after`
    "hear": (Follower, "take"),  # the server has answered
    "apply": (Applier, "apply"),  # with the mark, in one commit of the mirror
    "begin": (Applier, "begin"),  # a new mirror is to be read
    "load": (Applier, "load"),  # a part of it was
    "finish": (Applier, "finish"),  # all of it was
}


def stop_at(step: str, call: int) -> None:
    when, _, name = step.partition(" ")
    owner, method = STEPS[name]
    original = getattr(owner, method)
    calls = count(1)

    def stopping(*arguments: Any, **options: Any) -> Any:
        is_it = next(calls) == call
        if is_it and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, stopping)


def main(directory: str, url: str, node: str, step: str = "", call: str = "") -> None:
    if step:
        stop_at(step, int(call))
    mirror = Mirror(Path(directory), url, node=int(node))
    key = b"victim " + node.encode()

    def increase(t: Transaction) -> int:
        value = int(t.get(key) or b"0") + 1
        t.put(key, b"%d" % value)
        t.put(b"%b %d" % (key, value % 100), bytes(200))
        return value

    while True:
        print(mirror.transact_now(increase), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
