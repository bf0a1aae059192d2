"""Files that others were to hear of when the process died: each that was closed is there for all,
and the books are right."""

import random
import subprocess
import sys
from pathlib import Path

from kvfs.meta.records import unpack_inode
from kvfs.tree import namespaces
from tests.contract.hosts import NOW, TOP, Host, usage
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer, killed

VICTIM = Path(__file__).parent.parent / "private_victim.py"


def test_what_was_closed_before_a_kill_reaches_all(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with killed(RedisServer(tmp_path / "redis")) as server:
        other = Host(tmp_path / "other", server.url, 2)
        try:
            other.write(lambda t: namespaces.format(t, NOW, 0, 0))
            other.write(lambda t: namespaces.create(t, b"ns", kind="cache", uid=0, gid=0, now=NOW))
            closed = [
                name
                for round_ in range(4)
                for name in close_and_kill(server, tmp_path, round_, chance.randrange(1, 60))
            ]
            again = Host(tmp_path / "victim", server.url, 1)
            try:
                again.settle()
                again.drop_unclosed()
                again.settle()
                other.mirror.catch_up()
                assert everything(again.mirror) == everything(other.mirror) == in_redis(server.url)
            finally:
                again.mirror.close()
            assert [name for name in closed if other.find(TOP, name.encode()) is None] == []
            records = [
                unpack_inode(value) for key, value in everything(other.mirror) if key[:1] == b"i"
            ]
            files = len(records) - 2  # the root and the top
            assert len(closed) <= files <= len(closed) + 4
            assert usage(other) == (512 * sum(each.blocks for each in records), files)
        finally:
            other.mirror.close()


def close_and_kill(server: RedisServer, tmp_path: Path, round_: int, count: int) -> list[str]:
    """Have a process close so many files, and kill it; the names that it said were closed."""
    process = subprocess.Popen(
        [sys.executable, str(VICTIM), str(tmp_path / "victim"), server.url, str(round_)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        names = [process.stdout.readline() for _ in range(count)]
    finally:
        process.kill()
        process.wait()
    names += process.stdout.readlines()
    process.stdout.close()
    return [name.rstrip() for name in names if name.endswith("\n")]
