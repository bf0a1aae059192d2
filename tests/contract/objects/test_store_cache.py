"""What is remembered of the engine is what would be read, whatever is committed in between."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvfs.meta.engine import Transaction
from kvfs.objects.store_cache import NOW, StoreCache, Wanted
from kvfs.session import session
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
    remembered = StoreCache(opened, 10)
    for name in NAMES:
        put(opened, name, b"0")
    first = remembered.get(b"a", look)
    assert remembered.get(b"a", look) is first
    for elsewhere in (b"zz-50", b"zz-6", b"zz-20"[:2] + b"/"):
        put(opened, elsewhere, b"1")  # also behind what was looked at of the second scan
        assert remembered.get(b"a", look) is first
    put(opened, b"zz-35", b"1")  # a scan has one more
    second = remembered.get(b"a", look)
    assert second is not first
    assert second == opened.read(look)


def test_it_is_what_would_be_read(opened: Session) -> None:
    chance = random.Random(7)
    remembered = StoreCache(opened, 10)
    for _ in range(500):
        name, value = chance.choice(NAMES), b"%d" % chance.randrange(2)

        def change(t: Transaction, name: bytes = name, value: bytes = value) -> None:
            if chance.random() < 0.3:
                t.delete(name)
            else:
                t.put(name, value)

        opened.write(change)
        assert remembered.get(b"a", look) == opened.read(look)


def test_it_is_bounded_and_may_be_left_out(opened: Session) -> None:
    remembered = StoreCache(opened, 3, lambda value: value != [9])
    first = remembered.get(b"0", lambda _: [0])
    assert remembered.get(b"0", lambda _: [1]) is first
    for number in range(1, 4):
        remembered.get(b"%d" % number, lambda _, number=number: [number])
    assert remembered.get(b"0", lambda _: [1]) == [1]
    assert remembered.get(b"5", lambda _: [9]) is not remembered.get(b"5", lambda _: [9])
    better = [2]
    now = remembered.get(b"0", lambda _: [3])
    remembered.replace(b"0", [1], better)  # equal, but not what is remembered
    assert remembered.get(b"0", lambda _: [3]) is now
    remembered.replace(b"0", now, better)
    assert remembered.get(b"0", lambda _: [3]) is better


def test_what_is_made_of_a_value_goes_with_it(opened: Session) -> None:
    remembered = StoreCache(opened)
    for name in NAMES:
        put(opened, name, b"0")
    remembered.get(b"a", look)
    entry = remembered.entry(b"a")
    assert entry is not None
    entry.shown = "made of it"
    put(opened, b"zz-50", b"1")
    remembered.get(b"a", look)
    assert (found := remembered.entry(b"a")) is not None
    assert found.shown == "made of it"
    put(opened, NAMES[0], b"1")
    remembered.get(b"a", look)
    assert (found := remembered.entry(b"a")) is not None
    assert found.shown is None


def test_a_request_reads_in_one_transaction_and_is_told_nothing_older_than_itself(
    opened: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = StoreCache(opened)
    wanted: list[Wanted] = [(each, lambda t, each=each: (each, t.get(each))) for each in NAMES[:3]]
    refused: Wanted = (b"refused", lambda _: 1 // 0)
    transactions = 0
    read = opened.read

    def counted(fn: Callable[[Transaction], object]) -> object:
        nonlocal transactions
        transactions += 1
        return read(fn)

    monkeypatch.setattr(opened, "read", counted)
    for value in (b"0", b"1"):
        put(opened, NAMES[1], value)
        transactions, generation = 0, remembered.generation()
        remembered.look(generation, [*wanted, refused])
        found = [remembered.get(*each, generation) for each in wanted]
        assert found == [(NAMES[0], None), (NAMES[1], value), (NAMES[2], None)]
        assert transactions == 1
        with pytest.raises(ZeroDivisionError):
            remembered.get(*refused, generation)
    put(opened, NAMES[1], b"2")
    assert remembered.get(*wanted[1], generation) == (NAMES[1], b"1"), "as of that request"
    assert remembered.get(*wanted[1], NOW) == (NAMES[1], b"2")
