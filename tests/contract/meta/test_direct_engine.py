"""What the engine without a mirror does beyond the contract of all engines: how often it asks, and
what it finds when others commit meanwhile."""

import secrets
from collections.abc import Callable, Iterator

import pytest

from kvfs.base.errors import Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.replica.direct_engine import DirectEngine
from tests.contract.redis_servers import RedisServer

MANY = [b"k%04d" % number for number in range(1_000)]


@pytest.fixture
def url(server: RedisServer) -> str:
    return f"{server.url}?prefix={secrets.token_hex(4)}"


@pytest.fixture
def engine(url: str) -> Iterator[DirectEngine]:
    made = DirectEngine(url)
    yield made
    made.close()


@pytest.fixture
def other(url: str) -> Iterator[DirectEngine]:
    made = DirectEngine(url)
    yield made
    made.close()


def put_numbers(t: Transaction) -> None:
    for number, key in enumerate(MANY):
        t.put(key, b"%d" % number)


def chain(t: Transaction) -> bytes | None:
    """Each read depends on the one before."""
    first = t.get(b"k0001") or b""
    second = t.get(b"k%04d" % (int(first) + 1)) or b""
    return t.get(b"k%04d" % (int(second) + 1))


def copy_one(t: Transaction) -> None:
    t.put(b"k0000", t.get(b"k0001") or b"")


def remove_many(t: Transaction) -> None:
    t.get_many(MANY)
    for key in MANY:
        t.delete(key)


@pytest.mark.parametrize(
    ("step", "trips"),
    [
        (lambda engine: engine.read_now(chain), 1),
        (lambda engine: engine.read_now(lambda t: t.get_many(MANY)), 1),
        (lambda engine: engine.read_now(lambda t: list(t.scan(b"k", b"l"))), 1),
        (lambda engine: engine.transact_now(copy_one), 2),
        (lambda engine: engine.transact_now(remove_many), 2),
        (lambda engine: engine.transact_now(put_numbers), 2),
    ],
)
def test_what_is_asked_together_is_one_question(
    engine: DirectEngine, step: Callable[[DirectEngine], object], trips: int
) -> None:
    engine.transact_now(put_numbers)
    step(engine)  # a script that the server does not know yet is sent twice
    engine.transact_now(put_numbers)
    before = engine._caller.requests
    step(engine)
    assert engine._caller.requests - before == trips


def test_a_read_is_of_one_moment_whoever_commits_meanwhile(
    engine: DirectEngine, other: DirectEngine
) -> None:
    engine.transact_now(put_numbers)
    left = 2

    def read(t: Transaction) -> tuple[list[bytes | None], int]:
        nonlocal left
        first = t.get_many(MANY[:2])
        if left:
            left -= 1
            other.transact_now(lambda t: [t.put(key, b"%d" % left) for key in MANY])
        return first, len({value for _, value in t.scan(b"k", b"l")})

    assert engine.read_now(read) == ([b"0", b"1"], 1000)
    assert engine.read_now(read) == ([b"1", b"1"], 1)
    assert left == 0
    assert engine.read_now(read) == ([b"0", b"0"], 1)


def test_what_a_commit_reads_of_a_range_must_not_have_changed(
    engine: DirectEngine, other: DirectEngine
) -> None:
    """A name that another added to a range, and one that it removed, are noticed."""
    changes: list[Callable[[Transaction], object]] = [
        lambda t: (t.delete(b"k9999"), t.delete(b"k0000")),
        lambda t: t.put(b"k9999", b""),
    ]
    counted: list[int] = []

    def count(t: Transaction) -> None:
        counted.append(sum(1 for _ in t.scan(b"k", b"l")))
        t.put(b"n", b"%d" % counted[-1])
        if changes:
            other.transact_now(changes.pop())

    engine.transact_now(put_numbers)
    engine.transact_now(count)
    assert counted == [1000, 1001, 999]
    assert engine.read_now(lambda t: t.get(b"n")) == b"999"


def test_metadata_of_before_there_was_a_log(server: RedisServer, url: str) -> None:
    """As a copy by an earlier version left them, which no node ever followed."""
    engine = DirectEngine(url)
    engine.transact_now(put_numbers)
    prefix = url.partition("prefix=")[2]
    server.call("DEL", f"{{{prefix}:0}}x")
    server.call("HDEL", f"{{{prefix}:0}}s", "position")
    with pytest.raises(Unavailable, match="lost its metadata"):
        engine.read_now(chain)
    engine.close()
    engine = DirectEngine(url)
    assert engine.read_now(chain) == b"3"
    engine.transact_now(copy_one)
    engine.close()
    again = DirectEngine(url)
    assert again.read_now(lambda t: t.get_many(MANY[:3])) == [b"1", b"1", b"2"]
    again.close()
