"""Metadata copied between engines of every kind: the same arrive, or the target says that it is
no copy."""

import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvfs.base.errors import Conflict, Corrupt, Exists, NotFound
from kvfs.meta.engine import Transaction
from kvfs.meta.engine_copy import Blocking
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import Inode, namespace_root
from kvfs.meta.replica.direct_engine import DirectEngine
from kvfs.tree import inodes, namespaces, tree
from kvfs.tree.metadata_copy import copy_all, copy_namespace
from tests.contract.memory_engine import MemoryEngine
from tests.contract.redis_servers import RedisCluster, RedisServer, killed

T = TypeVar("T")
Make = Callable[[str], Blocking]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with killed(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with killed(RedisCluster(tmp_path_factory.mktemp("cluster"))) as cluster:
        yield cluster


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """An empty engine of a kind."""
    made: list[EmbeddedEngine | MemoryEngine | DirectEngine] = []

    def one(kind: str) -> Blocking:
        if kind == "memory":
            made.append(MemoryEngine())
        elif kind == "embedded":
            made.append(EmbeddedEngine(tmp_path / secrets.token_hex(4)))
        else:
            server = request.getfixturevalue(kind)
            made.append(DirectEngine(f"{server.url}?prefix={secrets.token_hex(4)}"))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def fill(engine: Blocking, *names: bytes, files: int = 3) -> None:
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    for name in names:
        engine.transact_now(lambda t, name=name: fill_one(t, name, files))


def fill_one(t: Transaction, name: bytes, files: int) -> None:
    space = namespaces.create(t, name, uid=0, gid=0, now=2)
    first = namespaces.allocate_inodes(t, space, files)
    for number in range(files):
        tree.add(t, namespace_root(space), b"%d" % number, first + number, a_file())


def a_file() -> Inode:
    return Inode(
        mode=stat.S_IFREG | 0o644,
        uid=0,
        gid=0,
        nlink=0,
        atime_ns=3,
        mtime_ns=3,
        ctime_ns=3,
        parent=0,
        name=b"",
        boot=1,
    )


def everything(engine: Blocking) -> list[tuple[bytes, bytes]]:
    return engine.read_now(lambda t: list(t.scan(b"", b"\xff")))


def names(engine: Blocking) -> dict[bytes, list[bytes]]:
    """Each namespace with the names in it; the root's links are as many as there are."""

    def fn(t: Transaction) -> dict[bytes, list[bytes]]:
        listed = namespaces.list_all(t)
        assert inodes.read_inode(t, 1).nlink == 2 + len(listed)
        return {
            each.namespace.name: [
                child.name for child in tree.list_children(t, namespace_root(each.id), b"", 100)
            ]
            for each in listed
        }

    return engine.read_now(fn)


def nothing(_: int) -> None:
    """No progress is shown."""


class Disturbed:
    """An engine to which something happens before each of its transactions."""

    def __init__(self, engine: Blocking, happens: Callable[[], None]) -> None:
        self._engine = engine
        self._happens = happens

    def read_now(self, fn: Callable[[Transaction], T]) -> T:
        return self._engine.read_now(fn)

    def transact_now(self, fn: Callable[[Transaction], T]) -> T:
        self._happens()
        return self._engine.transact_now(fn)

    def refresh_now(self) -> None:
        self._engine.refresh_now()


KINDS = ["memory", "embedded", "redis", "cluster"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_arrives_and_comes_back(make: Make, kind: str) -> None:
    source, target, back = make("memory"), make(kind), make("memory")
    fill(source, b"a", b"b", files=700)
    copied = copy_all(source, target, replace=False, progress=nothing)
    assert copied.keys == len(everything(source)) - 1
    assert everything(target) == everything(source)
    assert copy_all(target, back, replace=False, progress=nothing) == copied
    assert everything(back) == everything(source)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_in_use_is_refused_or_replaced(make: Make, kind: str) -> None:
    source, target = make("memory"), make(kind)
    fill(source, b"new")
    fill(target, b"old", b"older")
    before = everything(target)
    with pytest.raises(Exists, match="--replace"):
        copy_all(source, target, replace=False, progress=nothing)
    assert everything(target) == before
    copy_all(source, target, replace=True, progress=nothing)
    assert everything(target) == everything(source)


@pytest.mark.parametrize("kind", KINDS)
def test_one_namespace_joins_others_and_keeps_its_numbers(make: Make, kind: str) -> None:
    source, target = make("memory"), make(kind)
    fill(source, b"a", b"b", b"c")
    copy_namespace(source, target, b"b", replace=False, now=9, progress=nothing)
    copy_namespace(source, target, b"a", replace=False, now=9, progress=nothing)
    assert names(target) == {b"a": [b"0", b"1", b"2"], b"b": [b"0", b"1", b"2"]}
    with pytest.raises(Exists, match="--replace"):
        copy_namespace(source, target, b"b", replace=False, now=9, progress=nothing)
    copy_namespace(source, target, b"b", replace=True, now=9, progress=nothing)
    made = target.transact_now(lambda t: namespaces.create(t, b"own", uid=0, gid=0, now=9))
    assert made == 3
    assert sorted(names(target)) == [b"a", b"b", b"own"]
    with pytest.raises(Exists, match="id 3 of 'c' is that of 'own'"):
        copy_namespace(source, target, b"c", replace=True, now=9, progress=nothing)
    with pytest.raises(NotFound):
        copy_namespace(source, target, b"none", replace=False, now=9, progress=nothing)


def test_another_namespace_of_that_name_is_left_alone(make: Make) -> None:
    source, target = make("memory"), make("memory")
    fill(source, b"x", b"same")
    fill(target, b"same")
    with pytest.raises(Exists, match=r"another namespace 'same' \(id 1, not 2\)"):
        copy_namespace(source, target, b"same", replace=True, now=9, progress=nothing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_was_cut_short_counts_for_nothing_and_is_begun_anew(
    make: Make, kind: str
) -> None:
    source, target = make("memory"), make(kind)
    fill(source, b"a", files=10)
    left = 2

    def fail() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_all(source, Disturbed(target, fail), replace=False, progress=nothing)
    with pytest.raises(Corrupt, match="never finished"):
        target.read_now(namespaces.check_format)
    with pytest.raises(Conflict, match="unfinished copy"):
        copy_all(target, make("memory"), replace=False, progress=nothing)
    with pytest.raises(Conflict, match="unfinished copy"):
        copy_namespace(source, target, b"a", replace=False, now=9, progress=nothing)
    copy_all(source, target, replace=False, progress=nothing)
    assert everything(target) == everything(source)

    left = 2
    other = make(kind)
    with pytest.raises(KeyboardInterrupt):
        copy_namespace(source, Disturbed(other, fail), b"a", replace=False, now=9, progress=nothing)
    assert names(other) == {}
    copy_namespace(source, other, b"a", replace=False, now=9, progress=nothing)
    assert len(names(other)[b"a"]) == 10


def test_a_source_that_changes_is_noticed(make: Make) -> None:
    source, target = make("memory"), make("memory")
    fill(source, b"a")

    def change() -> None:
        source.transact_now(lambda t: fill_one(t, secrets.token_hex(4).encode(), 1))

    with pytest.raises(Conflict, match="source changed"):
        copy_all(source, Disturbed(target, change), replace=False, progress=nothing)
    copy_all(source, target, replace=False, progress=nothing)
    assert everything(target) == everything(source)


def test_a_target_that_loses_something_is_noticed(make: Make) -> None:
    source, target = make("memory"), make("memory")
    fill(source, b"a")
    lost = min(key for key, _ in everything(source) if key[:1] == b"e")

    class Losing(Disturbed):
        def read_now(self, fn: Callable[[Transaction], T]) -> T:
            target.transact_now(lambda t: t.delete(lost))
            return target.read_now(fn)

    with pytest.raises(Corrupt, match="differs"):
        copy_all(source, Losing(target, lambda: None), replace=False, progress=nothing)
