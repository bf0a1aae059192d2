"""What is remembered of the engine is what would be read, whatever is committed in between."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.meta.engine import Transaction
from kvfs.session import session
from kvfs.session.read_cache import Remembering
from kvfs.session.session import Session
from tests.contract import client_store

NAMES = [b"zz-%d" % number for number in range(6)]
Found = tuple[list[bytes | None], list[tuple[bytes, bytes]], tuple[bytes, bytes] | None]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Session]:
    found = session.acquire(client_store.make(tmp_path / "store"))
    yield found
    session.release(found)


def look(t: Transaction) -> Found:
    """All ways to read: keys, a scan to its end, the beginning of one."""
    return (
        [t.get(NAMES[0]), *t.get_many(NAMES[1:2])],
        list(t.scan(NAMES[2], NAMES[4])),
        next(t.scan(NAMES[4], b"zz-9"), None),
    )


def put(opened: Session, key: bytes, value: bytes) -> None:
    opened.write(lambda t: t.put(key, value))


def test_it_is_the_same_object_until_it_is_another(opened: Session) -> None:
    remembered = Remembering[str, Found](opened, 10)
    for name in NAMES:
        put(opened, name, b"0")
    first = remembered.get("a", look)
    assert remembered.get("a", look) is first
    for elsewhere in (b"zz-50", b"zz-6", b"zz-20"[:2] + b"/"):
        put(opened, elsewhere, b"1")  # also behind what was looked at of the second scan
        assert remembered.get("a", look) is first
    put(opened, b"zz-35", b"1")  # a scan has one more
    second = remembered.get("a", look)
    assert second is not first
    assert second == opened.read(look)


def test_it_is_what_would_be_read(opened: Session) -> None:
    chance = random.Random(7)
    remembered = Remembering[str, Found](opened, 10)
    for _ in range(500):
        name, value = chance.choice(NAMES), b"%d" % chance.randrange(2)

        def change(t: Transaction, name: bytes = name, value: bytes = value) -> None:
            if chance.random() < 0.3:
                t.delete(name)
            else:
                t.put(name, value)

        opened.write(change)
        assert remembered.get("a", look) == opened.read(look)


def test_it_is_bounded_and_may_be_left_out(opened: Session) -> None:
    remembered = Remembering[int, list[int]](opened, 3, lambda value: value != [9])
    first = remembered.get(0, lambda _: [0])
    assert remembered.get(0, lambda _: [1]) is first
    for number in range(1, 4):
        remembered.get(number, lambda _, number=number: [number])
    assert remembered.get(0, lambda _: [1]) == [1]
    assert remembered.get(5, lambda _: [9]) is not remembered.get(5, lambda _: [9])
    better = [2]
    now = remembered.get(0, lambda _: [3])
    remembered.replace(0, [1], better)  # equal, but not what is remembered
    assert remembered.get(0, lambda _: [3]) is now
    remembered.replace(0, now, better)
    assert remembered.get(0, lambda _: [3]) is better
