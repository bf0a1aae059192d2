"""The node's index, on the model engine."""

import time
from collections.abc import Iterator

import pytest

from kvfs.datastore import index as module
from kvfs.datastore.index import Index, Sealed
from tests.contract.memory_engine import MemoryEngine

CACHE, OTHER = 7, 8


def file(number: int, namespace_id: int = CACHE) -> int:
    return namespace_id << 48 | number


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine()


@pytest.fixture
def index(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> Index:
    ticks: Iterator[int] = iter(range(1, 1_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: next(ticks))
    return Index(engine)


def order(index: Index, namespace_id: int = CACHE, limit: int = 100) -> list[int]:
    return [ino & 0xFFFF for _, ino in index.coldest(namespace_id, limit)]


def test_files_stand_in_the_order_of_their_last_use(index: Index) -> None:
    for number in range(1, 6):
        index.add(file(number), 0)
    assert order(index) == [1, 2, 3, 4, 5]
    index.touch(file(2))
    index.touch(file(1))
    assert order(index) == [3, 4, 5, 2, 1]
    assert order(index, limit=2) == [3, 4]


def test_a_use_counts_before_it_is_written(index: Index) -> None:
    for number in range(1, 4):
        index.add(file(number), 0)
    index.flush()
    index.touch(file(1))
    assert order(index, limit=1) == [2]


def test_namespaces_have_their_own_order(index: Index) -> None:
    index.add(file(1), 0)
    index.add(file(2, OTHER), 0)
    assert order(index) == [1]
    assert order(index, OTHER) == [2]


def test_what_is_not_in_the_index_is_not_added_by_a_use(index: Index) -> None:
    index.touch(file(1))
    assert order(index) == []
    assert index.get(file(1)) is None


def test_a_file_that_is_stored_right_after_it_came_takes_its_space_once(index: Index) -> None:
    index.add(file(1), 0, 8)
    index.store([Sealed(file(1), 0, b"c" * 16, 8)])
    assert index.used_bytes() == {CACHE: 8 * 512}
    index.flush()
    assert index.used_bytes() == {CACHE: 8 * 512}
    assert order(index) == [1]


def test_a_version_that_came_while_another_was_stored_keeps_its_space(index: Index) -> None:
    index.add(file(1), 1, 16)
    index.store([Sealed(file(1), 0, b"c" * 16, 8)])
    index.flush()
    assert index.used_bytes() == {CACHE: 16 * 512}


def test_checksums_stay_with_a_use_and_go_with_a_new_version(index: Index) -> None:
    index.add(file(1), 0)
    index.store([Sealed(file(1), 0, b"c" * 16, 8)])
    index.touch(file(1))
    index.flush()
    entry = index.get(file(1))
    assert entry is not None
    assert entry.chunks == b"c" * 16
    index.add(file(1), 1)
    index.flush()
    entry = index.get(file(1))
    assert entry is not None
    assert (entry.version, entry.chunks) == (1, b"")


def test_sealing_does_not_change_the_order(index: Index) -> None:
    index.add(file(1), 0)
    index.add(file(2), 0)
    index.flush()
    index.store([Sealed(file(1), 0, b"c" * 16, 8)])
    assert order(index) == [1, 2]


def test_an_addition_in_doubt_keeps_the_place(index: Index) -> None:
    index.add(file(1), 0)
    index.add(file(2), 0)
    index.flush()
    index.add_missing(file(1), 0)
    index.add_missing(file(3), 0)
    assert order(index) == [1, 2, 3]


def test_removed_is_gone_whether_written_or_not(index: Index) -> None:
    index.add(file(1), 0)
    index.flush()
    index.touch(file(1))
    index.add(file(2), 0)
    index.remove([file(1), file(2), file(3)])
    index.flush()
    assert order(index) == []
    assert index.entries() == []


def test_a_kill_loses_uses_but_never_the_order(engine: MemoryEngine, index: Index) -> None:
    for number in range(1, 4):
        index.add(file(number), 0)
    index.flush()
    index.touch(file(1))
    reopened = Index(engine)
    assert order(reopened) == [1, 2, 3]
    assert list(reopened.disorder()) == []


def test_memory_is_bounded(index: Index) -> None:
    for number in range(module._GATHERED_LIMIT + 1000):
        index.touch(file(number))
    assert len(index._touched) <= module._GATHERED_LIMIT


def test_entries_are_read_page_by_page(index: Index) -> None:
    for number in range(1, 11):
        index.add(file(number), 0)
    index.flush()
    first = index.entries(limit=4)
    rest = index.entries(start=first[-1][0] + 1, limit=100)
    assert [ino & 0xFFFF for ino, _ in first + rest] == list(range(1, 11))


def test_a_broken_order_is_found_and_mended(engine: MemoryEngine, index: Index) -> None:
    for number in range(1, 4):
        index.add(file(number), 0)
    index.flush()
    entry = index.get(file(2))
    assert entry is not None
    stray = module._order_key(file(9), 5)
    engine.transact_now(lambda t: t.put(stray, b""))
    engine.transact_now(lambda t: t.delete(module._order_key(file(2), entry.clock)))
    assert list(index.disorder()) == [(5, file(9))]
    assert [ino for ino, each in index.entries() if index.unordered(ino, each)] == [file(2)]
    index.restore_order(file(9), 5)
    index.restore_order(file(2), entry.clock)
    assert list(index.disorder()) == []
    assert order(index) == [1, 2, 3]


def test_what_data_files_take_is_summed_by_namespace(index: Index) -> None:
    index.add(file(1), 0, 8)
    assert index.used_bytes() == {CACHE: 8 * 512}
    index.flush()
    index.add(file(2, OTHER), 0, 16)
    index.flush()
    index.store([Sealed(file(1), 0, b"c" * 16, 24)])
    assert index.used_bytes() == {CACHE: 24 * 512, OTHER: 16 * 512}
    index.touch(file(1))
    index.flush()
    assert index.used_bytes()[CACHE] == 24 * 512
    index.remove([file(1), file(3)])
    assert index.used_bytes() == {CACHE: 0, OTHER: 16 * 512}
