"""Which directories a kernel may know: counters that several processes share."""

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.fuse.operations import Operations
from kvfs.datastore.known_directories import Known, KnownDirectories
from kvfs.datastore.removal_reasons import GoneNames
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.meta.records import ROOT_INODE, namespace_root
from kvfs.tree import namespaces, tree
from kvfs.tree.inodes import AttributeChanges, set_attributes
from kvfs.vfs.inode_holders import Holders
from kvfs.vfs.miss_counters import Misses
from tests.unit.space import new_inode

DIRECTORY = 1 << 48 | 4711
OTHER = 2 << 48 | 4711


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "known"


def test_before_any_node_everything_counts_as_known(path: Path) -> None:
    reader = Known(path)
    assert DIRECTORY in reader
    serving = KnownDirectories(path)
    assert DIRECTORY not in reader
    serving.close()
    assert DIRECTORY in reader


def test_in_the_file_of_another_version_everything_counts_as_known(path: Path) -> None:
    serving, reader = KnownDirectories(path), Known(path)
    assert DIRECTORY not in reader
    with path.open("r+b") as file:
        file.write((2).to_bytes(4, sys.byteorder))
    assert DIRECTORY in reader
    serving.close()


def test_what_the_kernel_knows_and_forgets(path: Path) -> None:
    serving, reader = KnownDirectories(path), Known(path)
    assert ROOT_INODE in reader
    serving.add(DIRECTORY)
    serving.add(DIRECTORY)
    assert DIRECTORY in reader
    assert OTHER not in reader
    serving.forget(DIRECTORY)
    assert DIRECTORY not in reader
    serving.forget(DIRECTORY)
    serving.add(DIRECTORY)
    serving.add(OTHER)
    serving.forget_all()
    assert DIRECTORY not in reader
    assert OTHER not in reader
    assert ROOT_INODE in reader


def test_directories_of_one_slot_are_counted(path: Path) -> None:
    serving, reader = KnownDirectories(path), Known(path)
    twin = DIRECTORY + (1 << 16)
    serving.add(DIRECTORY)
    assert twin in reader, "too many count as known, never too few"
    serving.add(twin)
    serving.forget(DIRECTORY)
    assert DIRECTORY in reader
    serving.forget(twin)
    assert DIRECTORY not in reader


def test_a_node_after_a_killed_one_begins_anew_for_who_was_there_before(path: Path) -> None:
    killed, reader = KnownDirectories(path), Known(path)
    killed.add(DIRECTORY)
    assert DIRECTORY in reader
    serving = KnownDirectories(path)
    assert DIRECTORY not in reader
    serving.add(OTHER)
    assert OTHER in reader


def test_the_file_went_while_no_node_ran(path: Path) -> None:
    """Somebody tidied up after a killed one: its counters are nobody's any more."""
    killed, reader = KnownDirectories(path), Known(path)
    assert DIRECTORY not in reader
    killed.add(OTHER)
    path.unlink()
    assert DIRECTORY in reader
    serving = KnownDirectories(path)
    serving.add(DIRECTORY)
    assert DIRECTORY in reader
    assert OTHER not in reader


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_what_has_another_size_is_not_believed(path: Path, size: int) -> None:
    KnownDirectories(path)
    reader = Known(path)
    assert DIRECTORY not in reader
    os.truncate(path, size)
    assert DIRECTORY in reader
    assert DIRECTORY in Known(path)
    KnownDirectories(path)
    assert DIRECTORY not in reader


def test_a_reader_in_another_process(path: Path) -> None:
    serving = KnownDirectories(path)
    serving.add(DIRECTORY)
    code = (
        "import sys; from pathlib import Path; from kvfs.datastore.known_directories import Known;"
        f"known = Known(Path(sys.argv[1])); assert {DIRECTORY} in known and {OTHER} not in known"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code, str(path)) == 0


# ---- a look-up and a change that meet


class Meeting:
    """The engine of a mount, whose reads somebody else's change follows at once."""

    def __init__(self, engine: EmbeddedEngine, change: Callable[[], None]) -> None:
        self._engine = engine
        self._change = change
        self.transact = engine.transact
        self.immediate = engine.immediate

    async def read(self, fn: Callable[[Transaction], Any]) -> Any:
        found = self._engine.read_now(fn)
        self._change()
        return found


@pytest.mark.parametrize("how", ["lookup", "list"])
def test_a_change_beside_a_look_up_is_seen_by_it_or_told(
    tmp_path: Path, path: Path, how: str
) -> None:
    serving, reader = KnownDirectories(path), Known(path)
    engine = EmbeddedEngine(tmp_path / "meta")
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    number = engine.transact_now(
        lambda t: namespaces.create(t, b"s", kind="cache", uid=0, gid=0, now=time.time_ns())
    )
    top = namespace_root(number)
    ino = engine.transact_now(
        lambda t: tree.add(t, top, b"d", top + 1, new_inode(stat.S_IFDIR, 0o755))
    )
    told: list[bool] = []

    def change() -> None:
        def fn(t: Transaction) -> None:
            set_attributes(t, ino, AttributeChanges(mode=0o700 + len(told)), 2)
            told.append(ino in reader)

        engine.transact_now(fn)

    node = SimpleNamespace(
        engine=Meeting(engine, change),
        volume=SimpleNamespace(atimes={}, engine=engine, files=None, holders=None),
        holders=Holders(),
        mounts=SimpleNamespace(misses=Misses(GoneNames(tmp_path / "gone"))),
        appends=None,
        local=engine,
        near=engine,
        boot=1,
        former_writers=None,
        evictor=None,
        transfers=None,
        port=None,
        store=SimpleNamespace(root=Path("/")),
        files=None,
        known=serving,
        coherence=None,
        names=None,
    )

    open_files = SimpleNamespace(publishing=SimpleNamespace(), shares=None, orphans=None)

    async def main() -> int:
        operations = Operations(node, open_files)  # type: ignore[arg-type]
        if how == "lookup":
            _, inode = await operations.lookup(top, b"d")
            return inode.mode
        fh = await operations.directories.open(top)
        page = await operations.introduced(top, await operations.directories.read(fh, 2, 10))
        return next(each.inode.mode for each in page if each.name == b"d")

    mode = trio.run(main)
    assert mode & 0o777 == 0o700 + len(told) - 1 or told[-1]
    assert ino in reader
    engine.close()
