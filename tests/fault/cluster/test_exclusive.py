"""A node that has a strict namespace to itself, and is killed now and then, while another one makes
files there: each sees what the other was told that it did."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfs.tree import namespaces
from tests.contract.hosts import NOW, TOP, Host
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer, killed

VICTIM = Path(__file__).parent.parent / "exclusive_victim.py"
ROUNDS = 3


def test_no_look_misses_what_was_done_before_it(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    count = tmp_path / "count"
    count.write_text("")
    with killed(RedisServer(tmp_path / "redis")) as server:
        other = Host(tmp_path / "other", server.url, 2)
        other.write(lambda t: namespaces.format(t, NOW, 0, 0))
        other.write(lambda t: namespaces.create(t, b"ns", kind="durable", uid=0, gid=0, now=NOW))
        made = alone = 0
        for round_ in range(ROUNDS):
            arguments = [str(tmp_path / "victim"), server.url, str(round_), str(count)]
            with victim(arguments) as (lines, kill):
                for line in (next(lines) for _ in range(chance.randrange(8, 20))):
                    alone = max(alone, check(other, line))
                for _ in range(3):
                    check(other, next(lines))
                    make(other, b"other-%d" % made)
                    count.write_text(str(made))
                    made += 1
                rest = [next(lines) for _ in range(chance.randrange(8))]
                kill()
                rest += [each for each in lines if each.endswith("\n")]
            for line in rest:
                check(other, line)
            make(other, b"other-%d" % made)  # while the victim is dead
            count.write_text(str(made))
            made += 1
        assert alone > 10, "it asked before each look"
        again = Host(tmp_path / "victim", server.url, 1)
        try:
            again.settle()
            again.drop_unclosed()
            again.settle()
            other.settle()
            assert everything(again.mirror) == everything(other.mirror) == in_redis(server.url)
        finally:
            again.mirror.close()
            other.mirror.close()


@contextmanager
def victim(arguments: list[str]) -> Iterator[tuple[Iterator[str], Callable[[], None]]]:
    """What one prints, and how it is killed: at the end in any case."""
    program = [sys.executable, str(VICTIM), *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout.readline, ""), process.kill
        finally:
            process.kill()


def make(host: Host, name: bytes) -> None:
    host.close_file(host.create(TOP, name))


def check(host: Host, line: str) -> int:
    """Looks for a name that the victim closed; returns how many looks it asked nothing for."""
    name, looks = line.split()
    assert name != "stale", line
    host.mirror.call(lambda: host.mirror.engine.fresh(1))
    assert host.find(TOP, name.encode()) is not None
    return int(looks)
