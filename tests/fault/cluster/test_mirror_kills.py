"""A process killed at a step of a commit, or while its mirror is read for the first time: what was
acknowledged is there once, and the mirror is right when it starts again."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.meta.engine import Transaction
from kvfs.meta.replica.direct_engine import DirectEngine
from tests.contract.mirrors import everything, in_redis
from tests.contract.redis_servers import RedisServer, killed
from tests.fault.cluster.test_mirror import VICTIM, mirroring
from tests.fault.counters import increment, number

COMMITS = 7
SEVERAL_PAGES = 5_000
"""Keys: a mirror is read 2,000 at a time."""
COUNT = b"victim 1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path / "redis")) as server:
        yield server


def until_it_dies(server: RedisServer, directory: Path, step: str, call: int) -> int:
    """Have a process count until it kills itself there, at the step's call of that number; what was
    acknowledged to it last."""
    command = [sys.executable, str(VICTIM), str(directory), server.url, "1", step, str(call)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    return int((done.stdout.split() or ["0"])[-1])


@pytest.mark.parametrize("step", ["before propose", "before hear", "before apply", "after apply"])
def test_a_kill_at_a_step_of_a_commit(server: RedisServer, tmp_path: Path, step: str) -> None:
    with mirroring(tmp_path / "other", server.url, node=2) as other:
        acknowledged = until_it_dies(server, tmp_path / "victim", step, COMMITS)
        other.transact_now(increment(b"meanwhile"))
        with mirroring(tmp_path / "victim", server.url, node=1) as again:
            again.catch_up()
            done = number(again, COUNT)
            asked = step != "before propose"
            assert acknowledged <= done <= acknowledged + asked
            again.transact_now(increment(COUNT))
            other.catch_up()
            assert number(other, COUNT) == done + 1
            assert everything(again) == everything(other) == in_redis(server.url)


@pytest.mark.parametrize(
    "step", ["before begin", "after begin", "after load", "before finish", "after finish"]
)
def test_a_kill_while_a_mirror_is_read(server: RedisServer, tmp_path: Path, step: str) -> None:
    engine = DirectEngine(server.url)
    try:
        engine.transact_now(lambda t: _put(t, range(SEVERAL_PAGES), b"old"))
        assert until_it_dies(server, tmp_path / "victim", step, 1) == 0
        # What was read of it already is changed, and what was not.
        engine.transact_now(lambda t: _put(t, range(0, SEVERAL_PAGES, 500), b"new"))
        engine.transact_now(lambda t: t.delete(_key(1)))
        engine.transact_now(lambda t: t.delete(_key(SEVERAL_PAGES - 1)))
    finally:
        engine.close()
    with mirroring(tmp_path / "victim", server.url, node=1) as again:
        again.catch_up()
        assert everything(again) == in_redis(server.url)


def _key(number: int) -> bytes:
    return b"key %05d" % number


def _put(t: Transaction, numbers: range, value: bytes) -> None:
    for each in numbers:
        t.put(_key(each), value)
