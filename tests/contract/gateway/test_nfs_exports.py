"""What is exported is found at a cost that does not grow with the namespaces."""

import os
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.nfs import exports
from gateway.nfs.place import MountTable
from kvfs.base.errors import NotFound
from kvfs.meta.engine import Transaction
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from kvfs.tree import namespaces

HOW = exports.make([], squash="root", read_only=False, groups="client")


class Counting:
    """A transaction that counts what is asked of it."""

    def __init__(self, t: Transaction) -> None:
        self._t = t
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self._t, name)


def make_namespaces(t: Transaction, first: int, count: int) -> None:
    for number in range(first, first + count):
        namespaces.create(t, b"n%d" % number, uid=0, gid=0, now=1)


def asked(engine: EmbeddedEngine) -> tuple[list[str], int]:
    """What is exported, and how much was read for that."""

    def count(t: Transaction) -> tuple[list[str], int]:
        counting = Counting(t)
        found = exports.list_all(cast("Transaction", counting))
        return [each.name for each in found], counting.asked

    return engine.read_now(count)


def test_more_namespaces_cost_the_look_at_exports_nothing(tmp_path: Path) -> None:
    engine = EmbeddedEngine(tmp_path / "meta")
    engine.transact_now(lambda t: namespaces.format(t, 1, 0, 0))
    engine.transact_now(lambda t: make_namespaces(t, 0, 3))
    assert asked(engine)[0] == []
    engine.transact_now(lambda t: exports.put(t, b"n2", HOW, 2))
    engine.transact_now(lambda t: exports.put(t, b"n0", HOW, 2))
    before = asked(engine)
    assert before[0] == ["n0", "n2"]
    engine.transact_now(lambda t: make_namespaces(t, 3, 200))
    assert asked(engine) == before
    engine.transact_now(lambda t: namespaces.remove(t, b"n0", 3))
    engine.transact_now(lambda t: exports.take_away(t, b"n2", 3))
    assert asked(engine)[0] == []
    with pytest.raises(NotFound):
        engine.transact_now(lambda t: exports.take_away(t, b"n2", 3))
    engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts")
def test_the_table_of_mounts_is_read_where_it_changed(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    table = MountTable()
    request.addfinalizer(table.close)
    assert table.have_changed()
    assert not table.have_changed()
    subprocess.run(["mount", "-t", "tmpfs", "kvfs-test", tmp_path], check=True)
    assert table.have_changed()
    assert not table.have_changed()
    subprocess.run(["umount", tmp_path], check=True)
    assert table.have_changed()
