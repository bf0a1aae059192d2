"""What a node answers to clients of other processes, on real files and without a mount."""

import errno
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import trio

from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta.engine import Transaction
from kvfs.meta.records import Flag, Inode, namespace_root
from kvfs.node import client_requests
from kvfs.node.client_requests import LeftNotices, handlers
from kvfs.node.local_port import LocalPort, NoOthers
from kvfs.transfer.origins import FileOrigins
from kvfs.transfer.transfers import Transfers
from kvfs.tree import notices
from kvfs.tree.changes import Change, to_wire
from kvfs.tree.inodes import read_inode, write_inode
from kvfs.vfs.missing_data import Missing
from kvfs.vfs.volume import Volume
from tests.contract.small_node import SmallNode, small_node

MIB = 1 << 20


class Asked:
    """A small node with its requests, and what its mounts were told."""

    def __init__(self, node: SmallNode) -> None:
        self.node = node
        self.told: list[Change] = []
        self.dropped: list[int] = []
        self.failures: list[Exception] = []
        volume = Volume(node.engine, node.files, node.index, node.holders, lambda _lost: None)
        self.notices = LeftNotices(node.engine, self._tell)
        self.port = LocalPort(
            node.engine,
            node.index,
            node.holders,
            node.sealer,
            node.evictor,
            Transfers(
                *(node.engine, node.files, node.index, volume, self._room),
                FileOrigins(node.engine, volume),
            ),
            Missing(
                node.engine,
                node.files,
                volume.give_up,
                self._damaged,
                self._unreadable,
                lambda: False,
            ),
            lambda: 1234,
            self._tell,
            self._drop,
            NoOthers(),
        )

    async def _room(self, _size: int) -> None:
        raise AssertionError("nothing is brought")

    async def _damaged(self, _ino: int, _inode: Inode) -> None:
        raise AssertionError("nothing is damaged")

    async def _unreadable(self, _ino: int, _inode: Inode, _error: OSError) -> None:
        raise AssertionError("nothing is unreadable")

    async def _tell(self, changes: Sequence[Change]) -> None:
        if self.failures:
            raise self.failures.pop()
        self.told += changes

    async def _drop(self, inos: Sequence[int]) -> None:
        self.dropped += inos

    def keeping(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run `main` beside the evictor."""

        async def both() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.node.evictor.run)
                with trio.fail_after(60):
                    await main()
                nursery.cancel_scope.cancel()

        trio.run(both)

    async def ask(self, method: str, **params: object) -> object:
        return await handlers(self.port)[method](params)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    with small_node(tmp_path / "store") as node:
        yield Asked(node)


def test_room_that_clients_took_since_the_last_sample_is_made_anew(asked: Asked) -> None:
    node = asked.node
    space = node.namespace("cache", capacity=256 * MIB)

    async def main() -> None:
        await node.evictor.sample()
        for name in "abcd":
            node.reserve(node.write(space, name, b"."), 64 * MIB)
        await asked.ask("room", namespace=space, bytes=10 * MIB)
        assert node.census().space(space).free >= 10 * MIB

    asked.keeping(main)


def test_room_is_made_for_as_much_as_is_asked_for(asked: Asked) -> None:
    """More than the headroom that is kept anyway."""
    node = asked.node
    space = node.namespace("cache", capacity=16 * MIB)
    for number in range(11):
        node.write(space, f"{number}", bytes(MIB))

    async def main() -> None:
        answer = await asked.ask("room", namespace=space, bytes=10 * MIB)
        assert answer == {"capacity_bytes": 1234, "others_bytes": 0}
        assert node.used(space) <= 6 * MIB
        assert node.names(space) >= {"10", "9", "8"}

    asked.keeping(main)


def test_more_than_a_namespace_may_hold_evicts_nothing(asked: Asked) -> None:
    node = asked.node
    space = node.namespace("cache", capacity=8 * MIB)
    node.write(space, "kept", bytes(MIB))

    async def main() -> None:
        with pytest.raises(NoSpace, match="the namespace cache"):
            await asked.ask("room", namespace=space, bytes=9 * MIB)

    asked.keeping(main)
    assert node.names(space) == {"kept"}


def test_a_durable_namespace_gets_what_is_free_and_no_more(asked: Asked) -> None:
    node = asked.node
    space = node.namespace("models", kind="durable", capacity=8 * MIB)
    node.write(space, "kept", bytes(4 * MIB))

    async def main() -> None:
        await asked.ask("room", namespace=space, bytes=3 * MIB)
        with pytest.raises(NoSpace, match="the namespace models"):
            await asked.ask("room", namespace=space, bytes=5 * MIB)

    asked.keeping(main)
    assert node.names(space) == {"kept"}


def test_mounts_are_told_and_new_files_take_their_place_in_the_order(asked: Asked) -> None:
    node = asked.node
    space = node.namespace("cache")
    ino, fd = node.make(space, "new")
    node.close(ino, fd)
    changes = [Change(namespace_root(space), b"new", 0), Change(namespace_root(space), b"\xff", 7)]

    async def main() -> None:
        await asked.ask("changed", changes=to_wire(changes), published=[ino, 999])

    asked.keeping(main)
    assert asked.told == changes
    assert [found for _, found in node.index.coldest(space, 10)] == [ino]


def test_what_no_mount_knew_is_dropped_without_their_being_told(asked: Asked) -> None:
    async def main() -> None:
        await asked.ask("changed", dropped=[3, 4])

    asked.keeping(main)
    assert (asked.told, asked.dropped) == ([], [3, 4])


def test_touched_files_are_warm_in_the_order_given(asked: Asked) -> None:
    node = asked.node
    space = node.namespace("cache")
    first, second = (node.write(space, name, b"x") for name in ("a", "b"))

    async def main() -> None:
        await asked.ask("touched", inodes=[second, first])

    asked.keeping(main)
    assert [ino for _, ino in node.index.coldest(space, 10)] == [second, first]
    record = node.record(first)
    assert record is not None
    assert record.flags & Flag.PUBLISHED


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("room", {"namespace": "cache", "bytes": 1}),
        ("room", {}),
        ("touched", {"inodes": "all"}),
        ("changed", {"published": [None]}),
        ("changed", {"dropped": 7}),
    ],
)
def test_a_malformed_request_is_refused(
    asked: Asked, method: str, params: dict[str, object]
) -> None:
    async def main() -> None:
        with pytest.raises(msgspec.ValidationError):
            await asked.ask(method, **params)

    asked.keeping(main)


def test_a_notice_left_by_a_killed_client_is_acted_on(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_requests, "_PERIOD_S", 0.01)
    old = Change(1, b"old", 5)
    node = asked.node
    now = time.time_ns()
    node.engine.transact_now(lambda t: notices.post(t, [old], now - 60_000_000_000))
    node.engine.transact_now(lambda t: notices.post(t, [Change(1, b"young", 6)], now))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.notices.run)
            while not asked.told:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    asked.keeping(main)
    assert asked.told == [old]
    left = node.engine.read_now(lambda t: notices.waiting(t, now + 1, 10))
    assert [change.name for each in left for change in each.changes] == [b"young"]


def test_a_mount_that_cannot_be_told_is_told_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_requests, "_PERIOD_S", 0.01)
    old = Change(1, b"old", 5)
    then = time.time_ns() - 60_000_000_000
    asked.node.engine.transact_now(lambda t: notices.post(t, [old], then))
    asked.failures = [OSError(errno.EIO, "Input/output error"), Unavailable("not now")]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked.notices.run)
            while not asked.told:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    asked.keeping(main)
    assert asked.told == [old]


def test_a_miss_that_the_cold_tier_has_is_not_forgotten_where_that_is_not_asked(
    asked: Asked,
) -> None:
    node = asked.node
    space = node.namespace("cache")
    ino = node.write(space, "demoted", b"data")

    def demote(t: Transaction) -> None:
        inode = read_inode(t, ino)
        inode.flags |= Flag.COLD
        write_inode(t, ino, inode)

    node.engine.transact_now(demote)
    node.files.unlink(ino, 0)

    async def main() -> None:
        assert await asked.ask("bring", inode=ino) == {"state": "nowhere"}
        assert node.names(space) == {"demoted"}

    trio.run(main)


def test_a_lone_node_has_nobody_to_bring_data_from(asked: Asked) -> None:
    async def main() -> None:
        assert await asked.ask("bring", inode=5) == {"state": "nowhere"}

    trio.run(main)
