"""Makes a namespace on a cluster, and dies at one of the steps: URL, step, whether before or
after the server did it. Or it is paused before that, until it is told a line."""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from kvfs.meta.redis import scripts
from kvfs.meta.redis.connecting import Server
from kvfs.meta.redis.engine import RedisEngine
from kvfs.meta.redis.scripts import Item, Script
from kvfs.tree import namespaces

STEPS = {
    "intent": (scripts.COMMIT, b"intent"),
    "point": (scripts.COMMIT, b"point"),
    "settle": (scripts.SETTLE, None),
    "forget": (scripts.FORGET, None),
}


def main(url: str, step: str, when: str) -> None:
    engine = RedisEngine(url)
    wanted, kind = STEPS[step]
    left = 1
    send = Server.script

    async def dying(
        self: Server, script: Script, shard: int, arguments: Sequence[Item], end: float
    ) -> Any:
        nonlocal left
        hit = script is wanted and (kind is None or arguments[3] == kind)
        if hit and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if hit and when == "paused" and left:
            left -= 1
            print("paused", flush=True)
            sys.stdin.readline()
        answer = await send(self, script, shard, arguments, end)
        if hit and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    Server.script = dying  # type: ignore[method-assign]
    engine.transact_now(lambda t: namespaces.create(t, b"new", uid=0, gid=0, now=2))
    engine.close()


main(*sys.argv[1:])
