"""Several mirrors of one engine: what one commits the others have, whatever they do beside it."""

import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from kvfs.base.errors import Conflict, Invalid, NotSupported, TooLarge, Unavailable
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Namespace, Usage, pack, unpack_usage
from kvfs.meta.redis.calling import RetryingClient
from kvfs.meta.redis.log import Proposal
from kvfs.meta.redis.scripts import Script
from kvfs.meta.redis.slots import slot_of
from kvfs.meta.replica import process_transactions
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.meta.replica.filling.staging import StagedPairs
from kvfs.meta.replica.replica_mark import refuse_replica
from tests.contract.mirrors import Mirror, everything, in_redis, no_space
from tests.contract.redis_servers import RedisCluster, RedisServer, killed


@pytest.fixture(scope="module", params=["server", "cluster"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer | RedisCluster]:
    made = RedisServer if request.param == "server" else RedisCluster
    with killed(made(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def url(server: RedisServer | RedisCluster) -> str:
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def one(url: str, tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path / "one", url)
    yield mirror
    mirror.close()


@pytest.fixture
def other(url: str, tmp_path: Path) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path / "other", url, node=2)
    yield mirror
    mirror.close()


def put(engine: Any, key: bytes, value: bytes = b"") -> None:
    engine.transact_now(lambda t: t.put(key, value))


def get(engine: Any, key: bytes) -> bytes | None:
    found: bytes | None = engine.read_now(lambda t: t.get(key))
    return found


def meanwhile(mirror: Mirror, fn: Callable[[Transaction], object]) -> None:
    """Commits, from within a transaction of another mirror."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(mirror.transact_now, fn).result()


async def together(
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[[Transaction], object],
    second: Callable[[Transaction], object] | Proposal,
) -> object:
    """Commits both in one request; returns what became of the second."""
    engine, go = mirror.engine, trio.Event()
    send = engine._shards.top.proposing.script

    async def held(*arguments: Any, **options: Any) -> Any:
        await go.wait()
        return await send(*arguments, **options)

    async def do_second() -> None:
        nonlocal found
        if isinstance(second, Proposal):
            found = await engine.propose(second)
        else:
            found = await engine.transact(second)

    found: object = None
    monkeypatch.setattr(engine._shards.top.proposing, "script", held)
    async with trio.open_nursery() as nursery:
        for step in (lambda: engine.transact(_nothing), lambda: engine.transact(first), do_second):
            nursery.start_soon(step)
            await trio.testing.wait_all_tasks_blocked()
        go.set()
    return found


def _nothing(t: Transaction) -> None:
    t.put(b"nothing", b"")


def tamper(
    server: RedisServer | RedisCluster,
    url: str,
    command: str,
    key: str,
    *arguments: str | int | bytes,
) -> Any:
    """With one of the keys where the metadata are."""
    prefix = url.partition("prefix=")[2]
    holder = server if isinstance(server, RedisServer) else server.owner(slot_of(prefix, 0))
    return holder.call(command, f"{{{prefix}:0}}{key}", *arguments)


def test_what_one_commits_the_other_has(one: Mirror, other: Mirror, url: str) -> None:
    put(one, b"a", b"1")
    other.catch_up()
    assert get(other, b"a") == b"1"
    other.transact_now(lambda t: t.delete(b"a"))
    one.catch_up()
    assert get(one, b"a") is None
    put(one, b"b", bytes(range(256)) * 300)
    other.catch_up()
    assert everything(one) == everything(other) == in_redis(url)


def test_what_others_change_is_told_with_what_was_there(one: Mirror, other: Mirror) -> None:
    put(one, b"a", b"1")
    put(one, b"a", b"2")
    other.catch_up()
    other.transact_now(lambda t: t.delete(b"a"))
    one.catch_up()
    assert one.told == [(b"a", b"2", None)]
    assert [(each.key, each.new) for each in other.told] == [(b"a", b"1"), (b"a", b"2")]


def test_what_a_namespace_is_like_is_known_when_anybody_changed_it(
    one: Mirror, other: Mirror
) -> None:
    def known(mirror: Mirror) -> list[str | None]:
        async def find() -> list[str | None]:
            found = [mirror.engine.namespace(number) for number in (1, 2)]
            return [None if each is None else each.kind for each in found]

        kinds: list[str | None] = mirror.call(find)
        return kinds

    def change(engine: Mirror, number: int, kind: str) -> None:
        put(engine, keys.namespace(number), pack(Namespace(name=b"x", kind=kind)))

    assert known(one) == [None, None]
    change(other, 1, "cache")
    one.catch_up()
    assert known(one) == known(other) == ["cache", None]
    change(one, 1, "durable")
    assert known(one) == ["durable", None]
    other.transact_now(lambda t: t.delete(keys.namespace(1)))
    change(other, 2, "cache")
    one.catch_up()
    assert known(one) == known(other) == [None, "cache"]


def test_whether_others_may_hear_of_a_file_later_is_known_when_anybody_changed_it(
    one: Mirror, other: Mirror
) -> None:
    def may_lag(mirror: Mirror) -> bool:
        async def find() -> bool:
            return mirror.engine.may_lag(1)

        found: bool = mirror.call(find)
        return found

    assert not may_lag(one)
    put(other, keys.namespace(1), pack(Namespace(name=b"x", kind="cache")))
    one.catch_up()
    assert may_lag(one)
    assert may_lag(other)
    put(other, keys.namespace(1), pack(Namespace(name=b"x", kind="cache", replicas=1)))
    one.catch_up()
    assert not may_lag(one)
    assert not may_lag(other)


def test_what_a_namespace_is_like_is_not_told_while_all_is_read_anew(one: Mirror) -> None:
    put(one, keys.namespace(1), pack(Namespace(name=b"x", kind="cache")))

    async def look() -> None:
        assert one.engine.namespace(1) is not None
        assert one.engine.may_lag(1)
        one.engine._follower.begin_anew()
        with pytest.raises(Unavailable):
            one.engine.namespace(1)
        with pytest.raises(Unavailable):
            one.engine.may_lag(1)

    one.call(look)


def test_many_increments_on_two_hosts_are_all_counted(one: Mirror, other: Mirror) -> None:
    tasks, rounds = 6, 20

    def increment(t: Transaction) -> None:
        t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

    async def work(mirror: Mirror) -> None:
        for _ in range(rounds):
            await mirror.transact(increment)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(tasks):
                nursery.start_soon(work, (one, other)[number % 2])

    trio.run(main)
    one.catch_up()
    assert get(one, b"n") == b"%d" % (tasks * rounds)


def test_a_range_that_was_read_is_checked(one: Mirror, other: Mirror, url: str) -> None:
    def append(t: Transaction) -> None:
        count = len(list(t.scan(b"k", b"l")))
        t.put(b"k%03d" % count, b"%d" % count)

    async def work(mirror: Mirror) -> None:
        for _ in range(15):
            await mirror.transact(append)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for mirror in (one, other, one):
                nursery.start_soon(work, mirror)

    trio.run(main)
    assert [key for key, _ in in_redis(url)] == [b"k%03d" % number for number in range(45)]


@pytest.mark.parametrize(
    ("written", "runs"),
    [
        (b"ka\xff", 1),
        (b"kb", 2),
        (b"kb\x80", 2),
        (b"kc\xff\xff", 2),
        (b"kd", 1),
        (b"kd\0", 1),
        (b"l", 1),
    ],
)
@pytest.mark.parametrize("size", [1, 300, 70_000])
def test_a_range_is_changed_by_what_is_written_within_it_alone(
    one: Mirror, other: Mirror, written: bytes, runs: int, size: int
) -> None:
    """Whatever the log's entries look like: many keys, long values, a removal."""
    put(one, b"before")
    other.catch_up()
    counted: list[int] = []

    def count(t: Transaction) -> None:
        counted.append(len(list(t.scan(b"kb", b"kd"))))
        t.put(b"n", b"%d" % counted[-1])
        if len(counted) == 1:
            pairs = [(b"many%05d" % number, bytes(1)) for number in range(size // 100)]
            pairs.append((written, bytes(size)))
            meanwhile(other, lambda t: (t.delete(b"before"), [t.put(*each) for each in pairs]))

    one.transact_now(count)
    assert len(counted) == runs
    assert get(one, b"n") == b"%d" % (runs - 1)


def test_after_more_than_the_server_looks_at_each_range_counts_as_changed(
    one: Mirror, other: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[bytes] = []

    def first(t: Transaction) -> None:
        counted.append(b"%d" % len(list(t.scan(b"k", b"l"))))
        t.put(b"first", b"")

    def second(t: Transaction) -> None:
        counted.append(b"%d" % len(list(t.scan(b"m", b"n"))))
        t.put(b"second", counted[-1])
        if len(counted) == 2:
            meanwhile(other, lambda t: (t.put(b"a", b""), t.put(b"z", bytes(2 << 20))))
            meanwhile(other, lambda t: t.put(b"m", b""))

    one.call(lambda: together(one, monkeypatch, first, second))
    assert counted == [b"0", b"0", b"0", b"1"]
    assert get(one, b"second") == b"1"


def test_of_two_in_one_request_the_second_knows_what_became_of_the_first(
    one: Mirror, other: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were run on the same replica, the second on what the first wrote."""
    put(one, b"a", b"0")
    other.catch_up()
    counted: list[int] = []
    runs: list[bytes] = []

    def first(t: Transaction) -> None:
        runs.append(t.get(b"a") or b"")
        t.put(b"k1", b"")

    def second(t: Transaction) -> None:
        counted.append(len(list(t.scan(b"k", b"l"))))
        t.put(b"n", b"%d" % counted[-1])
        if len(counted) == 1:
            meanwhile(other, lambda t: t.put(b"a", b"1"))

    one.call(lambda: together(one, monkeypatch, first, second))
    assert runs == [b"0", b"1"]
    assert counted == [1, 1]
    assert get(one, b"n") == b"1"


def test_a_range_of_another_process_is_checked_against_those_it_goes_with(
    one: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node proposes it together with what it did not see."""
    counted: list[int] = []
    put(one, b"k0")

    def count(t: Transaction) -> None:
        counted.append(len(list(t.scan(b"k", b"l"))))
        t.put(b"n", b"%d" % counted[-1])

    async def propose(packed: bytes) -> bool:
        proposal = process_transactions.unpack(packed)
        if len(counted) > 1:
            return await one.engine.propose(proposal)
        found = await together(one, monkeypatch, lambda t: t.put(b"k1", b""), proposal)
        return bool(found)

    process_transactions.ask(
        one.local, count, lambda packed: one.call(lambda: propose(packed)), most_bytes=1 << 20
    )
    assert counted == [1, 2]
    assert get(one, b"n") == b"2"


def test_of_two_who_make_a_name_one_does(one: Mirror, other: Mirror) -> None:
    def make(t: Transaction) -> bool:
        if t.get(b"name") is not None:
            return False
        t.put(b"name", b"")
        return True

    won: list[bool] = []

    async def work(mirror: Mirror) -> None:
        won.append(await mirror.transact(make))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for mirror in (one, other, one, other):
                nursery.start_soon(work, mirror)

    trio.run(main)
    assert sorted(won) == [False, False, False, True]


def test_merges_do_not_contend_and_come_to_the_same(one: Mirror, other: Mirror, url: str) -> None:
    usage, times = keys.usage(3), keys.times(7)
    put(one, usage, pack(Usage(bytes=1 << 40, inodes=5)))
    other.catch_up()
    rounds, late, run = 30, (1 << 60) + 12_345, list[int]()

    def step(number: int, t: Transaction) -> None:
        run.append(number)
        t.merge(usage, pack(Usage(bytes=-4096, inodes=1)))
        t.merge(times, keys.pack_u64(late - number) + keys.pack_u64(late + number))

    async def work(mirror: Mirror) -> None:
        for number in range(rounds):
            await mirror.transact(lambda t, number=number: step(number, t))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for mirror in (one, other):
                nursery.start_soon(work, mirror)

    trio.run(main)
    # Nothing was refused: each was run once.
    assert len(run) == 2 * rounds
    one.catch_up()
    other.catch_up()
    assert everything(one) == everything(other) == in_redis(url)
    value = get(one, usage)
    assert value is not None
    merged = unpack_usage(value)
    assert (merged.bytes, merged.inodes) == ((1 << 40) - 2 * rounds * 4096, 5 + 2 * rounds)
    assert get(one, times) == keys.pack_u64(late) + keys.pack_u64(late + rounds - 1)


def test_a_merge_is_seen_by_who_made_it_and_by_those_behind_it(one: Mirror) -> None:
    usage = keys.usage(3)
    put(one, usage, pack(Usage()))

    def count(t: Transaction) -> int:
        t.merge(usage, pack(Usage(bytes=10, inodes=1)))
        return unpack_usage(t.get(usage) or b"").inodes

    seen: list[int] = []

    async def work() -> None:
        seen.append(await one.transact(count))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(work)

    trio.run(main)
    assert sorted(seen) == list(range(1, 21))


def test_a_merge_into_what_is_gone_changes_nothing(one: Mirror, url: str) -> None:
    one.transact_now(lambda t: t.merge(keys.usage(9), pack(Usage(bytes=1, inodes=1))))
    assert get(one, keys.usage(9)) is None
    assert in_redis(url) == []


def test_a_new_mirror_is_filled_with_all_there_is(one: Mirror, url: str, tmp_path: Path) -> None:
    for start in range(0, 6_000, 1_000):

        def fn(t: Transaction, start: int = start) -> None:
            for number in range(start, start + 1_000):
                t.put(b"k%06d" % number, b"v" * (number % 700))

        one.transact_now(fn)
    late = Mirror(tmp_path / "late", url, node=3)
    try:
        assert everything(late) == everything(one)
        assert late.engine.position == one.engine.position
    finally:
        late.close()


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_mirror_that_is_read_while_others_commit_has_all_that_they_did(
    one: Mirror,
    url: str,
    server: RedisServer | RedisCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_sorted: bool,
    is_new: bool,
) -> None:
    """Also where there is no space to sort what is read; and where the log is short."""
    late = Mirror(tmp_path / "late", url, node=3)
    put(late, b"k", b"gone")
    late.close()
    one.transact_now(lambda t: [t.put(b"k%05d" % n, b"%d" % n) for n in range(6_000)])
    one.transact_now(lambda t: t.delete(b"k"))
    if is_new:
        shutil.rmtree(tmp_path / "late")
    else:
        tamper(server, url, "XTRIM", "x", "MAXLEN", 1)
    call, pages, cursors = RetryingClient.call, list[int](), list[bytes]()

    def change(t: Transaction) -> None:
        for number in range(len(pages), 6_000, 10):
            t.delete(b"k%05d" % number)
            t.put(b"k%05d" % (number + 3), b"changed at page %d" % len(pages))
            t.put(b"new %05d" % number, b"")

    async def called(client: RetryingClient, *command: Any, **options: Any) -> Any:
        if command[0] == b"HSCAN":
            cursors.append(command[2])
        if command[0] == b"HSCAN" and len(pages) < 3:
            pages.append(len(pages))
            if is_sorted:
                await trio.to_thread.run_sync(tamper, server, url, "XTRIM", "x", "MAXLEN", 0)
            await trio.to_thread.run_sync(one.transact_now, change)
        return await call(client, *command, **options)

    monkeypatch.setattr("kvfs.meta.replica.filling.filler._LISTEN_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(RetryingClient, "call", called)
        if not is_sorted:
            patched.setattr(StagedPairs, "add", no_space)
        late = Mirror(tmp_path / "late", url, node=3)
    try:
        assert cursors.count(b"0") == (1 if is_sorted else 2), "all is read once"
        late.catch_up()
        assert everything(late) == everything(one) == in_redis(url)
    finally:
        late.close()


def test_a_server_that_changes_while_a_mirror_is_read_is_read_from_the_beginning(
    one: Mirror, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor of a scan means nothing to another server."""
    one.transact_now(lambda t: [t.put(b"%05d" % number, b"") for number in range(5_000)])
    cursors: list[bytes] = []
    call = RetryingClient.call

    async def called(client: RetryingClient, *command: Any, **options: Any) -> Any:
        if command[0] == b"HSCAN":
            cursors.append(command[2])
            if len(cursors) == 2:
                client.close()
        return await call(client, *command, **options)

    monkeypatch.setattr(RetryingClient, "call", called)
    mirror = Mirror(tmp_path / "new", url, node=3)
    assert everything(mirror) == everything(one)
    assert [number for number, each in enumerate(cursors) if each == b"0"] == [0, 2]
    mirror.close()


def test_a_server_of_the_layout_before_keeps_the_order_of_keys_until_it_is_raised(
    server: RedisServer | RedisCluster, url: str, tmp_path: Path
) -> None:
    """Programs of the version before read it, and are not to miss a key."""

    def order() -> list[bytes]:
        found: list[bytes] = tamper(server, url, "ZRANGE", "z", 0, -1)
        return found

    def names(mirror: Mirror) -> list[bytes]:
        return [key for key, _ in everything(mirror)]

    tamper(server, url, "HSET", "s", "schema", 1)
    mirror = Mirror(tmp_path / "before", url)
    mirror.transact_now(lambda t: [t.put(b"%04d" % number, b"") for number in range(5_000)])
    mirror.transact_now(lambda t: (t.delete(b"0007"), t.put(b"0008", b"new"), t.put(b"a", b"")))
    mirror.transact_now(lambda t: t.merge(keys.times(7), bytes(16)))
    assert order() == names(mirror)
    assert mirror.call(mirror.engine.raise_layout)
    assert tamper(server, url, "HGET", "s", "schema") == b"2"
    mirror.transact_now(lambda t: (t.delete(b"0009"), t.put(b"b", b"")))
    assert order() == [b""], "a server of a cluster serves only keys that are there"
    assert not mirror.call(mirror.engine.raise_layout)
    assert everything(mirror) == in_redis(url)
    mirror.close()


def test_a_mirror_that_was_away_goes_on_where_it_was(one: Mirror, url: str, tmp_path: Path) -> None:
    away = Mirror(tmp_path / "away", url, node=2)
    put(away, b"a", b"1")
    away.close()
    for number in range(1_200):
        put(one, b"n%d" % (number % 7), b"%d" % number)
    back = Mirror(tmp_path / "away", url, node=2)
    try:
        assert everything(back) == everything(one)
        put(back, b"b", b"2")
    finally:
        back.close()


def test_a_mirror_that_was_away_too_long_is_read_anew(
    one: Mirror, url: str, server: RedisServer | RedisCluster, tmp_path: Path
) -> None:
    away = Mirror(tmp_path / "away", url, node=2)
    put(away, b"gone", b"1")
    put(away, b"kept", b"1")
    away.close()
    one.catch_up()
    one.transact_now(lambda t: t.delete(b"gone"))
    put(one, b"new", b"2")
    tamper(server, url, "XTRIM", "x", "MAXLEN", 1)
    back = Mirror(tmp_path / "away", url, node=2)
    try:
        assert everything(back) == everything(one) == [(b"kept", b"1"), (b"new", b"2")]
    finally:
        back.close()


def test_what_others_commit_without_a_mirror_arrives(one: Mirror, url: str) -> None:
    engine = DirectEngine(url)
    try:
        engine.transact_now(lambda t: [t.put(b"a", b"\xff\x00"), t.put(b"b", b"")])
        engine.transact_now(lambda t: t.delete(b"b"))
    finally:
        engine.close()
    one.catch_up()
    assert everything(one) == [(b"a", b"\xff\x00")]


def test_a_change_that_is_too_large_is_refused_alone(one: Mirror) -> None:
    with pytest.raises(TooLarge, match="8388608 are the limit"):
        put(one, b"a", bytes(9 << 20))
    put(one, b"b", bytes(1 << 20))
    assert [key for key, _ in everything(one)] == [b"b"]


def test_a_catch_up_beside_an_own_commit_asks_for_no_entries(
    one: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has it, the answer is on its way, and the log is slow."""
    engine = one.engine
    asking, following = engine._follower._asking, engine._follower._following
    scripts: list[Script] = []
    found: list[object] = []

    async def main() -> None:
        done, seen, go = trio.Event(), trio.Event(), trio.Event()
        send, ask, call, follow = (
            engine._shards.top.proposing.script,
            asking.script,
            asking.call,
            following.call,
        )

        async def late(*arguments: Any, **options: Any) -> Any:
            answer = await send(*arguments, **options)
            done.set()
            await go.wait()
            return answer

        async def noted(script: Script, *arguments: Any) -> Any:
            scripts.append(script)
            return await ask(script, *arguments)

        async def told(*command: Any) -> Any:
            answer = await call(*command)
            seen.set()
            return answer

        async def silent(*command: Any) -> Any:
            await go.wait()
            return await follow(*command)

        async def catch_up() -> None:
            await engine.catch_up()
            found.append((go.is_set(), engine.read_now(lambda t: t.get(b"a"))))

        monkeypatch.setattr(following, "call", silent)
        await engine.transact(lambda t: t.put(b"b", b""))  # ends the read of the log under way
        monkeypatch.setattr(engine._shards.top.proposing, "script", late)
        monkeypatch.setattr(asking, "script", noted)
        monkeypatch.setattr(asking, "call", told)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.transact, lambda t: t.put(b"a", b"1"))
            await done.wait()
            nursery.start_soon(catch_up)
            await seen.wait()
            await trio.testing.wait_all_tasks_blocked()
            go.set()

    one.call(main)
    assert (scripts, found) == ([], [(True, b"1")])


def test_catch_ups_that_waited_while_a_commit_was_sent_ask_nobody(
    one: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = one.engine
    asking, asked = engine._follower._asking, list[object]()

    async def main() -> None:
        go, call, ask = trio.Event(), asking.call, asking.script

        async def held(*command: Any) -> Any:
            asked.append(command)
            await go.wait()
            return await call(*command)

        async def noted(script: Script, *arguments: Any) -> Any:
            asked.append(script)
            return await ask(script, *arguments)

        monkeypatch.setattr(asking, "call", held)
        monkeypatch.setattr(asking, "script", noted)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(engine.catch_up)
                await trio.testing.wait_all_tasks_blocked()
            await engine.transact(lambda t: t.put(b"a", b"1"))
            go.set()

    one.call(main)
    assert len(asked) == 1


def test_a_function_that_writes_nothing_asks_nobody(one: Mirror) -> None:
    put(one, b"a", b"1")
    asked = one.engine.round_trips
    assert one.transact_now(lambda t: t.get(b"a")) == b"1"
    with pytest.raises(Conflict, match="as it happens"):
        one.transact_now(_refuse)
    assert one.engine.round_trips == asked


def _refuse(t: Transaction) -> None:
    t.put(b"b", b"")
    raise Conflict("as it happens")


def test_a_removed_node_commits_no_more(
    one: Mirror, url: str, server: RedisServer | RedisCluster
) -> None:
    put(one, b"a")
    tamper(server, url, "HSET", "s", "n:1", 7)
    with pytest.raises(Unavailable, match="node 1 was removed"):
        put(one, b"b")
    assert [key for key, _ in in_redis(url)] == [b"a"]


@pytest.mark.parametrize("packed", [[[b"a", b"1"]], {"another": "form"}])
def test_an_entry_of_a_later_version_is_refused(
    one: Mirror, url: str, server: RedisServer | RedisCluster, packed: object
) -> None:
    """By whoever follows the log, and by whoever proposes; nothing of it is applied."""
    put(one, b"b")
    where = one.engine.position + 1
    entry = ("t", "new", "b", token(server, url), "w", msgspec.msgpack.encode(packed), "v", 2)
    tamper(server, url, "XADD", "x", f"{where}-0", *entry)
    tamper(server, url, "HSET", "s", "token", "new", "position", where)
    refusal = rf"entry {where}-0 of the engine's log has version 2, this KVFS reads 1: use"
    with pytest.raises(Unavailable, match=refusal):
        one.catch_up()
    with pytest.raises(Unavailable, match=refusal):
        put(one, b"c")
    assert one.engine.position == where - 1


def test_an_entry_of_a_program_before_versions_is_read(
    one: Mirror, url: str, server: RedisServer | RedisCluster
) -> None:
    put(one, b"b")
    where = one.engine.position + 1
    written = msgspec.msgpack.encode([[b"a", b"1"]])
    entry = ("t", "new", "b", token(server, url), "w", written)
    tamper(server, url, "XADD", "x", f"{where}-0", *entry)
    tamper(server, url, "HSET", "s", "token", "new", "position", where)
    one.catch_up()
    assert get(one, b"a") == b"1"


def token(server: RedisServer | RedisCluster, url: str) -> bytes:
    """That of the last commit."""
    found: bytes = tamper(server, url, "HGET", "s", "token")
    return found


def test_a_store_of_a_lone_node_is_no_mirror_nor_the_other_way(url: str, tmp_path: Path) -> None:
    lone = EmbeddedEngine(tmp_path / "lone")
    lone.transact_now(lambda t: t.put(keys.VERSION, b"1"))
    refuse_replica(lone)
    lone.close()
    with pytest.raises(NotSupported, match="a lone node's"):
        Mirror(tmp_path / "lone", url)
    mirror = Mirror(tmp_path / "mirror", url)
    put(mirror, b"a")
    with pytest.raises(Conflict, match="start the node with --engine"):
        refuse_replica(mirror.local)
    mirror.close()
    with pytest.raises(Conflict, match="give the node another store"):
        Mirror(tmp_path / "mirror", f"{url}other")


@pytest.mark.usefixtures("one")
def test_a_node_that_joins_again_under_another_number_reads_anew(url: str, tmp_path: Path) -> None:
    away = Mirror(tmp_path / "away", url, node=2)
    put(away, b"a", b"1")
    away.local.transact_now(lambda t: t.put(b"stray", b""))
    away.close()
    again = Mirror(tmp_path / "away", url, node=3)
    try:
        assert everything(again) == [(b"a", b"1")]
        put(again, b"b")
    finally:
        again.close()


def test_who_reads_what_others_merge_into_is_not_refused(one: Mirror, other: Mirror) -> None:
    times = keys.times(7)
    put(one, times, keys.pack_u64(1) * 2)
    other.catch_up()
    rounds, run = 15, list[bytes]()

    def step(t: Transaction) -> None:
        run.append(t.node)
        assert t.get(times) is not None
        t.merge(times, keys.pack_u64(2) * 2)

    async def work(mirror: Mirror) -> None:
        for _ in range(rounds):
            await mirror.transact(step)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, one)
            nursery.start_soon(work, other)

    trio.run(main)
    assert len(run) == 2 * rounds


def test_what_was_written_without_a_mirror_is_a_nodes_engine(url: str, tmp_path: Path) -> None:
    engine = DirectEngine(url)
    put(engine, b"a", b"1")
    engine.close()
    mirror = Mirror(tmp_path / "meta", url)
    try:
        assert everything(mirror) == [(b"a", b"1")]
    finally:
        mirror.close()


def test_a_copy_that_is_spread_over_servers_is_refused(
    server: RedisServer | RedisCluster, url: str, tmp_path: Path
) -> None:
    """As earlier versions made them on a cluster."""
    DirectEngine(url).close()
    tamper(server, url, "HSET", "s", "layout", "namespaces")
    for open_ in (lambda: Mirror(tmp_path / "meta", url), lambda: DirectEngine(url)):
        with pytest.raises(NotSupported, match=r"spread over the servers.*\?prefix=NAME"):
            open_()


class Asker:
    """Another process of the node, which has the mirror's file and a way to the node."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self.asked = 0

    def write(self, fn: Any) -> Any:
        return process_transactions.ask(self._mirror.local, fn, self._propose, most_bytes=1 << 20)

    def _propose(self, packed: bytes) -> bool:
        self.asked += 1
        done: bool = self._mirror.call(
            lambda: self._mirror.engine.propose(process_transactions.unpack(packed))
        )
        return done


def test_another_process_has_the_node_commit_for_it(one: Mirror, other: Mirror) -> None:
    asker = Asker(one)
    assert asker.write(lambda t: t.get(b"a")) is None
    assert asker.asked == 0
    asker.write(lambda t: t.put(b"a", t.node))
    other.catch_up()
    assert get(one, b"a") == get(other, b"a") == keys.pack_node(1)


def test_what_another_process_asks_is_run_again_where_it_was_refused(
    one: Mirror, other: Mirror
) -> None:
    put(one, b"n", b"0")
    other.catch_up()
    beside = [other, one]

    def increment(t: Transaction) -> bytes:
        value = b"%d" % (int(t.get(b"n") or b"0") + 1)
        t.put(b"n", value)
        if beside:
            # One mirror has it when this is proposed; of the other's it hears sooner or later.
            faster = beside.pop()
            faster.transact_now(lambda t: t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 10)))
        return value

    asker = Asker(one)
    assert asker.write(increment) == b"21"
    assert asker.asked == 3
    other.catch_up()
    assert get(other, b"n") == b"21"


def test_what_is_no_transaction_is_refused() -> None:
    for packed in (b"", b"x", msgspec.msgpack.encode([{}, [], {b"": b""}, []])):
        with pytest.raises(Invalid):
            process_transactions.unpack(packed)
    whole = Proposal({b"a": None}, [(b"a", b"b", 1, b"")], {b"c": b"1"}, [(b"s\0\0", b"")])
    assert process_transactions.unpack(process_transactions.pack(whole)) == whole
    for key in (b"k" * 512, b"\xffmirror"):
        with pytest.raises(Invalid):
            process_transactions.unpack(
                process_transactions.pack(whole._replace(writes={key: b""}))
            )
    with pytest.raises(Invalid, match="only usage and times"):
        process_transactions.unpack(process_transactions.pack(whole._replace(merges=[(b"i", b"")])))
