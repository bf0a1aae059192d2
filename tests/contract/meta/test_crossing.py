"""Commits over several shards, as a server does what the protocol says: there wholly or not at all,
wherever one stops."""

import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from kvfs.meta.redis.crossing import (
    NOWHERE,
    PATIENCE_S,
    Committer,
    Pause,
    ShardChanges,
    ShardRequest,
    Steps,
    commit_arguments,
    resolve,
)
from kvfs.meta.redis.crossing_scripts import COMMIT, DECIDE, FORGET, PENDING, SETTLE
from kvfs.meta.redis.scripts import Script, keys_of
from tests.contract.redis_servers import RedisServer, killed

T = TypeVar("T")
STEPS: dict[str, Callable[[ShardRequest], bool]] = {
    "intent": lambda asked: asked.script is COMMIT and asked.arguments[3] == b"intent",
    "point": lambda asked: asked.script is COMMIT and asked.arguments[3] == b"point",
    "settle": lambda asked: asked.script is SETTLE,
    "forget": lambda asked: asked.script is FORGET,
}


class Stopped(Exception):
    """Whoever made a commit died."""


class Shards:
    """Several shards of one server. Intents are older than they are by what others waited."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._prefix = secrets.token_hex(4)
        self.waited_s = 0.0

    def ask(self, request: ShardRequest) -> Any:
        answer = self.run(request.shard, request.script, *request.arguments)
        if request.script is PENDING and answer:
            answer[2] += round(self.waited_s * 1000)
        if request.script is COMMIT and answer[0] == b"busy":
            answer[1][2] += round(self.waited_s * 1000)
        return answer

    def run(self, shard: int, script: Script, *arguments: bytes | int) -> Any:
        names = keys_of(self._prefix, shard)
        answer = self._server.call("EVAL", script.text, len(names), *names, *arguments)
        assert not isinstance(answer, str), answer
        return answer

    def state(self, shard: int, *command: str | bytes) -> Any:
        name, *rest = command
        return self._server.call(name, keys_of(self._prefix, shard)[2], *rest)

    def drive(self, steps: Steps[T], *, stop: str = "", after: bool = False) -> T:
        """To its end, or to a step: Stopped before the server is asked, or after it answered."""
        answer = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(asked, Pause):
                self.waited_s += PATIENCE_S
                continue
            is_hit = bool(stop) and STEPS[stop](asked)
            if is_hit and not after:
                raise Stopped
            answer = self.ask(asked)
            if is_hit:
                raise Stopped

    def get(self, shard: int, key: bytes) -> bytes | None:
        """As a reader who completes or undoes what others left."""
        self.drive(resolve(shard))
        name = keys_of(self._prefix, shard)[0]
        found: bytes | None = self._server.call("HGET", name, key)
        return found

    def put(self, **values: bytes) -> bool:
        """`s1=...`: a key of shard 1."""
        return self.drive(Committer().commit(changes(**values), NOWHERES))


NOWHERES = dict.fromkeys(range(10), NOWHERE)


def changes(**values: bytes) -> dict[int, ShardChanges]:
    return {
        int(shard[1:]): ShardChanges([], [], [(b"k", value)], []) for shard, value in values.items()
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def shards(server: RedisServer) -> Shards:
    return Shards(server)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_a_commit_is_there_wholly_or_not_at_all(shards: Shards, step: str, after: bool) -> None:
    """Whoever makes one dies at a step; others neither wait for long nor see a half."""
    shards.put(s1=b"old", s2=b"old", s3=b"old")
    with pytest.raises(Stopped):
        shards.drive(
            Committer().commit(changes(s1=b"new", s2=b"new", s3=b"new"), NOWHERES),
            stop=step,
            after=after,
        )
    is_there = (step, after) not in [("intent", False), ("intent", True), ("point", False)]
    expected = [b"new" if is_there else b"old"] * 3
    assert [shards.get(shard, b"k") for shard in (1, 2, 3)] == expected
    assert shards.waited_s <= PATIENCE_S
    assert shards.put(s1=b"next", s2=b"next", s3=b"next")
    assert [shards.get(shard, b"k") for shard in (1, 2, 3)] == [b"next"] * 3
    left = {field for shard in (1, 2, 3) for field in shards.state(shard, "HKEYS")}
    assert b"intent" not in left


@pytest.mark.parametrize("step", STEPS)
def test_another_commit_completes_or_undoes_what_it_meets(shards: Shards, step: str) -> None:
    with pytest.raises(Stopped):
        shards.drive(Committer().commit(changes(s1=b"1", s2=b"1"), NOWHERES), stop=step, after=True)
    assert shards.put(s1=b"2")
    assert shards.get(2, b"k") == (None if step == "intent" else b"1")
    assert shards.get(1, b"k") == b"2"


def test_whoever_was_thought_dead_does_not_do_by_halves(shards: Shards) -> None:
    """It hangs between intent and commit point; others undo it, and its point is refused."""
    hanging = Committer().commit(changes(s1=b"late", s2=b"late"), NOWHERES)
    asked = hanging.send(None)
    while not (isinstance(asked, ShardRequest) and STEPS["point"](asked)):
        assert isinstance(asked, ShardRequest)
        asked = hanging.send(shards.ask(asked))
    assert shards.put(s1=b"mine")
    answer = shards.ask(asked)
    assert answer == [b"undone"]
    with pytest.raises(StopIteration) as ended:
        for _ in range(10):
            asked = hanging.send(answer)
            assert isinstance(asked, ShardRequest)
            answer = shards.ask(asked)
    assert ended.value.value is False
    assert [shards.get(shard, b"k") for shard in (1, 2)] == [b"mine", None]


def test_what_was_read_must_not_have_changed(shards: Shards) -> None:
    """A value or a range of a shard that is written, or of one that is only read."""
    shards.put(s1=b"1", s2=b"1", s3=b"1")
    seen = [(b"k", b"1")]
    for shard in (1, 2, 3):
        for read in (
            ShardChanges(seen, [], [], []),
            ShardChanges([], [(b"a", b"z", seen)], [], []),
        ):
            both = {**changes(s1=b"2", s2=b"2"), shard: read}
            if shard != 3:
                both[shard] = read._replace(puts=[(b"k", b"2")])
            assert shards.drive(Committer().commit(both, NOWHERES))
            assert not shards.drive(Committer().commit(both, NOWHERES)) or shard == 3
            assert shards.put(s1=b"1", s2=b"1", s3=b"1")
    stale = {3: ShardChanges([(b"k", b"0")], [], [], []), **changes(s1=b"2", s2=b"2")}
    assert not shards.drive(Committer().commit(stale, NOWHERES))
    assert [shards.get(shard, b"k") for shard in (1, 2)] == [b"1", b"1"]


def test_many_at_once_lose_nothing_and_do_nothing_by_halves(shards: Shards, seed: int) -> None:
    """Counters of two shards that grow together, whoever is asked next, and some die."""
    chance = random.Random(seed)
    done = 0
    running: list[tuple[Steps[bool], Any]] = []
    for _ in range(400):
        if len(running) < 4:
            running.append((count_up(shards), None))
        at = chance.randrange(len(running))
        steps, answer = running.pop(at)
        try:
            asked = steps.send(answer)
        except StopIteration as ended:
            done += bool(ended.value)
            continue
        if isinstance(asked, Pause):
            shards.waited_s += PATIENCE_S / 10
            running.append((steps, None))
        elif chance.random() < 0.02:
            shards.ask(asked)  # and dies
        else:
            running.append((steps, shards.ask(asked)))
    one, two = (int(shards.get(shard, b"n") or b"0") for shard in (1, 2))
    assert one == two >= done > 10


def count_up(shards: Shards) -> Steps[bool]:
    found: dict[int, ShardChanges] = {}
    for shard in (1, 2):
        yield from resolve(shard)
        name = keys_of(shards._prefix, shard)[0]
        was: bytes | None = shards._server.call("HGET", name, b"n")
        more = b"%d" % (int(was or b"0") + 1)
        found[shard] = ShardChanges([(b"n", was)], [], [(b"n", more)], [])
    return (yield from Committer().commit(found, NOWHERES))


def test_a_commit_that_comes_late_is_not_done_again(shards: Shards) -> None:
    """One whose connection hung while it was sent again by another, and others followed."""

    def commit(value: bytes, number: int) -> Any:
        lists = commit_arguments(ShardChanges([], [], [(b"k", value)], []))
        head = (b"engine", number, NOWHERE, b"write", b"", b"")
        return shards.run(1, COMMIT, *head, *lists)

    assert commit(b"old", 1)[0] == b"done"
    assert commit(b"old", 1) == [b"again"]
    assert commit(b"new", 2)[0] == b"done"
    assert commit(b"old", 1) == [b"late"]
    assert shards.get(1, b"k") == b"new"


def test_marks_of_what_was_undone_go_after_a_day(shards: Shards) -> None:
    now_ms = time.time_ns() // 1_000_000
    shards.state(2, "HSET", "m:gone", f"undone:{now_ms - 86_500_000}")
    shards.state(2, "HSET", "m:lately", f"undone:{now_ms - 1000}")
    assert shards.run(2, DECIDE, b"this", b"undo") == b"undone"
    assert set(shards.state(2, "HKEYS")) == {b"m:lately", b"m:this"}
