"""The contract of a metadata engine (kvfs/meta/engine.py), the same for each engine."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvfs.base.errors import Exists, KvfsError
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from tests.contract.direct import Direct
from tests.contract.memory_engine import MemoryEngine
from tests.contract.mirrors import Mirror
from tests.contract.redis_servers import RedisCluster, RedisServer, killed

AnyEngine = EmbeddedEngine | MemoryEngine | Direct | Mirror


ALONE = ["memory", "embedded", "redis", "redis cluster", "valkey"]
OF_NODES = ["mirror", "mirror in a cluster"]


@pytest.fixture(params=ALONE + OF_NODES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyEngine]:
    made = make(request, tmp_path)
    yield made
    made.close()


def make(request: pytest.FixtureRequest, tmp_path: Path) -> AnyEngine:
    if request.param == "memory":
        return MemoryEngine()
    if request.param == "embedded":
        return EmbeddedEngine(tmp_path / "meta")
    if request.param.startswith("mirror"):
        url = request.getfixturevalue("redis" if request.param == "mirror" else "redis_cluster").url
        return Mirror(tmp_path / "meta", f"{url}?prefix={secrets.token_hex(4)}")
    server = request.getfixturevalue(request.param.replace(" ", "_"))
    return Direct(f"{server.url}?prefix={secrets.token_hex(4)}")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    directory = tmp_path_factory.mktemp("valkey")
    with killed(RedisServer(directory, name="valkey-server")) as server:
        yield server


@pytest.fixture(scope="module")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


def put_all(engine: AnyEngine, *keys: bytes) -> None:
    def fn(t: Transaction) -> None:
        for key in keys:
            t.put(key, b"value of " + key)

    engine.transact_now(fn)


def all_keys(engine: AnyEngine) -> list[bytes]:
    return engine.read_now(lambda t: [key for key, _ in t.scan(b"a", b"{")])


def test_reads_what_was_committed(engine: AnyEngine) -> None:
    assert engine.read_now(lambda t: t.get(b"a")) is None
    put_all(engine, b"a")
    assert engine.read_now(lambda t: t.get(b"a")) == b"value of a"
    engine.transact_now(lambda t: t.put(b"a", b"new"))
    assert engine.read_now(lambda t: t.get(b"a")) == b"new"


def test_values_may_be_empty_or_large(engine: AnyEngine) -> None:
    large = bytes(range(256)) * 1024

    def fn(t: Transaction) -> None:
        t.put(b"empty", b"")
        t.put(b"large", large)

    engine.transact_now(fn)
    assert engine.read_now(lambda t: t.get(b"empty")) == b""
    assert engine.read_now(lambda t: t.get(b"large")) == large


def test_keys_of_511_bytes_and_any_byte(engine: AnyEngine) -> None:
    keys = [b"k" * 511, b"k\x00", b"k\xff", b"k"]
    put_all(engine, *keys)
    assert all_keys(engine) == sorted(keys)


def test_a_longer_key_is_refused_and_nothing_is_written(engine: AnyEngine) -> None:
    with pytest.raises(KvfsError):
        put_all(engine, b"a", b"k" * 512)
    assert all_keys(engine) == []


def test_delete_says_whether_it_was_there(engine: AnyEngine) -> None:
    put_all(engine, b"a")

    def fn(t: Transaction) -> tuple[bool, bool, bool]:
        return t.delete(b"a"), t.delete(b"a"), t.delete(b"never")

    assert engine.transact_now(fn) == (True, False, False)
    assert all_keys(engine) == []


def test_a_transaction_sees_its_own_writes(engine: AnyEngine) -> None:
    put_all(engine, b"a", b"b")

    def fn(t: Transaction) -> tuple[list[bytes | None], list[tuple[bytes, bytes]]]:
        t.put_all([(b"b", b"2"), (b"c", b"3")])
        t.delete(b"a")
        return t.get_many([b"a", b"b", b"c"]), list(t.scan(b"a", b"z"))

    got, scanned = engine.transact_now(fn)
    assert got == [None, b"2", b"3"]
    assert scanned == [(b"b", b"2"), (b"c", b"3")]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
def test_get_many_answers_in_the_order_asked(engine: AnyEngine, count: int) -> None:
    put_all(engine, *(b"k%03d" % number for number in range(0, count, 2)))
    wanted = [b"k%03d" % number for number in reversed(range(count))]
    expected = [None if int(key[1:]) % 2 else b"value of " + key for key in wanted]
    assert engine.read_now(lambda t: t.get_many(wanted)) == expected
    twice = [*wanted, *wanted]
    assert engine.read_now(lambda t: t.get_many(twice)) == expected * 2


def test_scan_is_ordered_and_half_open(engine: AnyEngine) -> None:
    put_all(engine, b"b", b"a", b"c", b"b/", b"b0")
    keys = engine.read_now(lambda t: [key for key, _ in t.scan(b"b", b"c")])
    assert keys == [b"b", b"b/", b"b0"]
    assert engine.read_now(lambda t: list(t.scan(b"x", b"z"))) == []
    assert engine.read_now(lambda t: list(t.scan(b"c", b"b"))) == []


def test_a_scan_may_stop_early(engine: AnyEngine) -> None:
    put_all(engine, *(b"%04d" % number for number in range(100)))

    def fn(t: Transaction) -> bytes:
        first = next(t.scan(b"0", b"9"))[0]
        t.delete(first)
        return next(t.scan(b"0", b"9"))[0]

    assert engine.transact_now(fn) == b"0001"


def test_an_error_aborts_and_passes_through(engine: AnyEngine) -> None:
    put_all(engine, b"a")

    def fn(t: Transaction) -> None:
        t.put(b"b", b"")
        t.delete(b"a")
        raise Exists("as it happens")

    with pytest.raises(Exists, match="as it happens"):
        engine.transact_now(fn)
    assert all_keys(engine) == [b"a"]
    put_all(engine, b"c")
    assert all_keys(engine) == [b"a", b"c"]


def test_a_read_only_view_refuses_writes(engine: AnyEngine) -> None:
    with pytest.raises(KvfsError):
        engine.read_now(lambda t: t.put(b"a", b""))
    with pytest.raises(KvfsError):
        engine.read_now(lambda t: t.delete(b"a"))
    assert all_keys(engine) == []


def test_a_view_does_not_change_while_others_commit(engine: AnyEngine) -> None:
    put_all(engine, b"a", b"b")
    others = [lambda other: (other.put(b"a", b"new"), other.delete(b"b"))]

    def fn(t: Transaction) -> tuple[bytes | None, bytes | None]:
        before = t.get(b"a")
        while others:
            engine.transact_now(others.pop())
        return before, t.get(b"b")

    # An engine that runs it again may show it either moment, but no mixture.
    assert engine.read_now(fn) in [(b"value of a", b"value of b"), (b"new", None)]
    assert engine.read_now(lambda t: t.get_many([b"a", b"b"])) == [b"new", None]


def test_concurrent_transactions_lose_no_update(engine: AnyEngine) -> None:
    tasks, rounds = 8, 25

    def increment(t: Transaction) -> None:
        t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

    async def work() -> None:
        for _ in range(rounds):
            await engine.transact(increment)

    async def main() -> bytes | None:
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(work)
        return await engine.read(lambda t: t.get(b"n"))

    assert trio.run(main) == b"%d" % (tasks * rounds)


def test_threads_take_turns(engine: AnyEngine) -> None:
    def increment(t: Transaction) -> None:
        t.put(b"n", b"%d" % (int(t.get(b"n") or b"0") + 1))

    def work() -> None:
        for _ in range(50):
            engine.transact_now(increment)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(trio.to_thread.run_sync, work)

    trio.run(main)
    assert engine.read_now(lambda t: t.get(b"n")) == b"200"


def test_a_cancelled_transaction_is_whole_or_absent(engine: AnyEngine) -> None:
    def fn(t: Transaction) -> None:
        t.put(b"a", b"")
        t.put(b"b", b"")

    async def main() -> bool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await engine.transact(fn)
        return scope.cancelled_caught

    cancelled = trio.run(main)
    assert all_keys(engine) == ([] if cancelled else [b"a", b"b"])


def test_sync_returns(engine: AnyEngine) -> None:
    put_all(engine, b"a")
    trio.run(engine.sync)
    assert all_keys(engine) == [b"a"]


def test_an_immediate_engine_never_suspends(engine: AnyEngine) -> None:
    if not engine.immediate:
        pytest.skip("this engine may suspend")
    coroutine = engine.transact(lambda t: t.put(b"a", b""))
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert all_keys(engine) == [b"a"]


def test_closing_twice_does_no_harm(engine: AnyEngine) -> None:
    engine.close()
    engine.close()
