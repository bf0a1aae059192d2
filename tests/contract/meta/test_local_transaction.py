"""What a transaction of a node's own keys notes, and where it ends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvfs.meta import keys
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.lmdb.lmdb_transactions import WriteTransaction
from kvfs.meta.records import Usage, namespace_root, pack
from kvfs.meta.replica.local_transaction import (
    LocalChange,
    LocalSpaces,
    LocalTransaction,
    SharedKey,
)

OWN, OTHER = 1, 2
KEY: Final = keys.inode(namespace_root(OWN) + 7)
AGAIN: Final = keys.usage(OWN)
SHARED: Final = [keys.inode(namespace_root(OWN)), keys.inode(namespace_root(OTHER) + 7)]
WAS: Final = pack(Usage(inodes=1))
Step = Callable[[LocalTransaction, bytes], object]
STEPS: Final[dict[str, Step]] = {
    "put": lambda t, key: t.put(key, b"new"),
    "put all": lambda t, key: t.put_all([(key, b"new")]),
    "delete": lambda t, key: t.delete(key),
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EmbeddedEngine]:
    engine = EmbeddedEngine(tmp_path)
    engine.transact_now(lambda t: t.put_all([(key, WAS) for key in (KEY, AGAIN, *SHARED)]))
    yield engine
    engine.close()


def local(t: WriteTransaction) -> LocalTransaction:
    spaces = LocalSpaces()
    spaces.add(keys.pack_u16(OWN))
    return LocalTransaction(t, spaces)


@pytest.mark.parametrize("step", STEPS)
def test_a_change_is_written_noted_and_in_the_journal(engine: EmbeddedEngine, step: str) -> None:
    new = None if step == "delete" else b"new"

    def change(t: WriteTransaction) -> None:
        own = local(t)
        STEPS[step](own, KEY)
        assert t.get(KEY) == new
        assert own.changes == [LocalChange(KEY, WAS, new)]
        assert own.is_local_matter
        assert t.writes == [KEY, new]

    engine.transact_now(change)


def test_a_merge_is_written_noted_and_in_the_journal(engine: EmbeddedEngine) -> None:
    def change(t: WriteTransaction) -> None:
        own = local(t)
        own.merge(AGAIN, pack(Usage(inodes=2)))
        assert own.changes == [LocalChange(AGAIN, WAS, pack(Usage(inodes=3)))]
        assert t.writes == [AGAIN, t.get(AGAIN)] == [AGAIN, pack(Usage(inodes=3))]

    engine.transact_now(change)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key", SHARED, ids=["root directory", "another namespace"])
def test_it_is_left_before_a_shared_key_is_changed(
    engine: EmbeddedEngine, step: str, key: bytes
) -> None:
    def change(t: WriteTransaction) -> None:
        own = local(t)
        with pytest.raises(SharedKey):
            STEPS[step](own, key)
        assert t.get(key) == WAS
        assert not own.changes
        assert not t.writes

    engine.transact_now(change)


def test_it_is_left_before_a_usage_that_is_everybodys_is_changed(engine: EmbeddedEngine) -> None:
    shared = keys.usage(OTHER)
    engine.transact_now(lambda t: t.put(shared, WAS))

    def change(t: WriteTransaction) -> None:
        with pytest.raises(SharedKey):
            local(t).merge(shared, WAS)
        assert not t.writes

    engine.transact_now(change)


@pytest.mark.parametrize(
    "end",
    [lambda spaces: spaces.discard(keys.pack_u16(OWN)), lambda spaces: spaces.replace([OTHER])],
)
def test_the_keys_of_a_namespace_that_is_a_node_s_own_no_more_are_everybodys(
    engine: EmbeddedEngine, end: Callable[[LocalSpaces], None]
) -> None:
    spaces = LocalSpaces()
    spaces.replace([OWN])
    end(spaces)

    def change(t: WriteTransaction) -> None:
        with pytest.raises(SharedKey):
            LocalTransaction(t, spaces).put(KEY, b"new")

    engine.transact_now(change)
    assert OWN not in spaces.numbers
