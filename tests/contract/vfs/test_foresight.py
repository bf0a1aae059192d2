"""What a put looks at before it writes, beside a node of a cluster whose replica is behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import Conflict, Exists, NotFound
from kvfs.meta.engine import Transaction
from kvfs.session.replica_transactions import ReplicaTransactions
from tests.contract.small_node import SmallNode, small_node


class Behind(ReplicaTransactions):
    """The transactions beside a replica that lacks a commit until it is asked to catch up."""

    def __init__(self, node: SmallNode, lacking: bytes | None) -> None:
        super().__init__(node.store)
        self._engine = node.engine
        self._lacking = lacking
        self.caught_up = 0

    def catch_up(self, namespace_id: int = 0, *, reading: bool = False) -> None:  # noqa: ARG002
        self.caught_up += 1
        value = self._lacking
        if value is None:
            self._engine.transact_now(lambda t: t.delete(b"name"))
        else:
            self._engine.transact_now(lambda t: t.put(b"name", value))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as node:
        yield node


def test_a_name_that_came_elsewhere_is_seen_before_it_is_said_to_be_missing(
    node: SmallNode,
) -> None:
    def find(t: Transaction) -> bytes:
        value = t.get(b"name")
        if value is None:
            raise NotFound("no such namespace")
        return value

    behind = Behind(node, b"there")
    assert behind.foresee(node.engine, find) == b"there"
    assert behind.foresee(node.engine, find) == b"there"
    assert behind.caught_up == 1


def test_a_name_that_went_elsewhere_is_free_before_it_is_said_to_be_taken(
    node: SmallNode,
) -> None:
    node.engine.transact_now(lambda t: t.put(b"name", b"there"))

    def be_free(t: Transaction) -> bool:
        if t.get(b"name") is not None:
            raise Exists("it is taken")
        return True

    behind = Behind(node, None)
    assert behind.foresee(node.engine, be_free)
    assert behind.caught_up == 1


def test_an_error_of_the_engine_asks_nobody(node: SmallNode) -> None:
    def conflict(_: Transaction) -> None:
        raise Conflict("somebody was faster")

    behind = Behind(node, b"there")
    with pytest.raises(Conflict):
        behind.foresee(node.engine, conflict)
    assert behind.caught_up == 0
