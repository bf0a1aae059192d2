"""Directories that one node removes all the time, while another, which is killed now and then,
makes files in them: each file whose close was acknowledged is there."""

import random
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvfs.base.errors import NotEmpty
from kvfs.tree import namespaces
from tests.contract.hosts import NOW, TOP, Host
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer, killed

VICTIM = Path(__file__).parent.parent / "delegated_victim.py"
ROUNDS = 3


def test_no_close_is_acknowledged_without_a_file(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    counts = [chance.randrange(3, 12) for _ in range(ROUNDS)]
    with killed(RedisServer(tmp_path / "redis")) as server:
        other = Host(tmp_path / "other", server.url, 2)
        other.write(lambda t: namespaces.format(t, NOW, 0, 0))
        other.write(lambda t: namespaces.create(t, b"ns", kind="cache", uid=0, gid=0, now=NOW))
        with ThreadPoolExecutor(1) as pool:
            victims = pool.submit(make_and_kill, server.url, tmp_path / "victim", counts)
            stayed, gone = make_and_remove(other, victims)
            closed, again = victims.result()
        try:
            again.settle()
            other.mirror.catch_up()
            assert [name for name in closed if not is_there(other, name)] == []
            assert len(closed) >= sum(counts)
            assert stayed >= len({name.partition("/")[0] for name in closed})
            print(f"{len(closed)} closed; {stayed} directories stayed, {gone} went")
            again.settle()
            other.mirror.catch_up()
            assert everything(again.mirror) == everything(other.mirror) == in_redis(server.url)
        finally:
            again.mirror.close()
            other.mirror.close()


def make_and_kill(url: str, store: Path, counts: list[int]) -> tuple[list[str], Host]:
    """The names that were closed, and the node, which runs again."""
    closed = []
    for round_, count in enumerate(counts):
        process = subprocess.Popen(
            [sys.executable, str(VICTIM), str(store), url, str(round_)],
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
        closed += [name.rstrip() for name in names if name.endswith("\n")]
    return closed, Host(store, url, 1)


def make_and_remove(host: Host, victims: Future[tuple[list[str], Host]]) -> tuple[int, int]:
    """How many directories stayed, and how many went."""
    stayed = number = 0
    while not victims.done():
        name = b"%d" % number
        host.mkdir(TOP, name)
        number += 1
        try:
            host.rmdir(TOP, name)
        except NotEmpty:
            stayed += 1
    return stayed, number - stayed


def is_there(host: Host, path: str) -> bool:
    directory, _, name = path.partition("/")
    found = host.find(TOP, directory.encode())
    return found is not None and host.find(found, name.encode()) is not None
