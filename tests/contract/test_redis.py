"""What the Redis engine does beyond the contract of all engines: how often it asks, and where its
keys lie."""

import secrets
import subprocess
import sys
from collections.abc import Awaitable, Iterator

import pytest
import trio

from kvfs.meta.engine import Transaction
from kvfs.meta.redis.engine import RedisEngine
from tests.contract.redis_servers import RedisServer, killed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def url(server: RedisServer) -> str:
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def engine(url: str) -> Iterator[RedisEngine]:
    made = RedisEngine(url)
    yield made
    made.close()


@pytest.fixture
def other(url: str) -> Iterator[RedisEngine]:
    made = RedisEngine(url)
    yield made
    made.close()


def put_numbers(t: Transaction) -> None:
    for number in range(1_000):
        t.put(b"k%04d" % number, b"%d" % number)


def chain(t: Transaction) -> bytes | None:
    """Each read depends on the one before."""
    first = t.get(b"k0001") or b""
    second = t.get(b"k%04d" % (int(first) + 1)) or b""
    return t.get(b"k%04d" % (int(second) + 1))


def copy_one(t: Transaction) -> None:
    t.put(b"k0000", t.get(b"k0001") or b"")


def test_what_was_read_or_written_here_costs_one_question(
    engine: RedisEngine, other: RedisEngine
) -> None:
    many = [b"k%04d" % number for number in range(1_000)]

    async def trips(step: Awaitable[object]) -> int:
        before = engine.round_trips
        await step
        return engine.round_trips - before

    async def main() -> None:
        async with engine.within():
            # A script that the server does not know yet is sent twice.
            await engine.transact(copy_one)
            await engine.read(lambda t: t.get(b"k0000"))
            assert await trips(engine.transact(put_numbers)) == 1
            assert await trips(engine.transact(copy_one)) == 1
            assert await trips(engine.read(chain)) == 1
            assert await trips(engine.read(lambda t: t.get_many(many))) == 1
            other.transact_now(lambda t: t.put(b"k0500", b"other"))
            # Others' commits are seen at once, and cost no more where what was read is still so.
            assert await trips(engine.read(lambda t: t.get_many(many))) == 1
            assert await engine.read(lambda t: t.get(b"k0500")) == b"other"
            other.transact_now(lambda t: t.put(b"k0501", b"other"))
            assert await trips(engine.transact(copy_one)) == 1
            assert await engine.read(lambda t: t.get_many([b"k0000", b"k0501"])) == [b"1", b"other"]

    trio.run(main)


def test_a_chain_that_nobody_read_costs_a_question_for_each_link(
    engine: RedisEngine, other: RedisEngine
) -> None:
    other.transact_now(put_numbers)
    other.read_now(chain)
    before = engine.round_trips
    assert engine.read_now(chain) == b"3"
    assert engine.round_trips - before == 3


def test_transactions_that_wait_are_committed_together(engine: RedisEngine) -> None:
    engine.transact_now(put_numbers)

    async def main() -> int:
        async with engine.within(), trio.open_nursery() as nursery:
            before = engine.round_trips
            for _ in range(100):
                nursery.start_soon(engine.transact, copy_one)
        return engine.round_trips - before

    assert trio.run(main) < 20


def test_what_a_commit_reads_of_a_range_must_not_have_changed(
    engine: RedisEngine, other: RedisEngine
) -> None:
    """A name that another added to a range, and one that it removed, are noticed."""

    def count(t: Transaction) -> None:
        t.put(b"n", b"%d" % sum(1 for _ in t.scan(b"k", b"l")))

    async def main() -> None:
        async with engine.within():
            await engine.transact(put_numbers)
            await engine.transact(count)
            other.transact_now(lambda t: t.put(b"k9999", b""))
            await engine.transact(count)
            assert await engine.read(lambda t: t.get(b"n")) == b"1001"
            other.transact_now(lambda t: (t.delete(b"k9999"), t.delete(b"k0000")))
            await engine.transact(count)
            assert await engine.read(lambda t: t.get(b"n")) == b"999"

    trio.run(main)


def test_the_embedded_engine_loads_none_of_it() -> None:
    script = (
        "import sys; import cli.main, cli.up, kvfs.node, gateway.service, s3api.worker;"
        "sys.exit('coredis' in sys.modules or 'anyio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == 0
