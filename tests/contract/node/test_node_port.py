"""The node's port answers the same in its own process and over the control socket."""

import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from kvfs.base import control
from kvfs.base.control import ControlServer, NoNode
from kvfs.base.errors import NoSpace, Unavailable
from kvfs.meta.records import namespace_root
from kvfs.node.client_requests import handlers
from kvfs.node.local_port import LocalPort
from kvfs.tree import lifecycle
from kvfs.tree.changes import Change
from kvfs.vfs import control_port
from kvfs.vfs.control_port import ControlPort, answer
from kvfs.vfs.port import NodePort, SpaceGrant
from tests.contract.node.test_requests import Asked
from tests.contract.small_node import SmallNode, small_node

T = TypeVar("T")
MIB = 1 << 20
METHODS = sorted(name for name in vars(NodePort) if not name.startswith("_"))


class Threaded:
    """A port over the control socket, each call in a thread: its server is in this one."""

    def __init__(self, port: ControlPort) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._port, name)

        async def call(*arguments: Any) -> Any:
            return await trio.to_thread.run_sync(lambda: answer(method(*arguments)))

        return call


@asynccontextmanager
async def in_process(asked: Asked) -> AsyncIterator[NodePort]:
    yield asked.port


@asynccontextmanager
async def by_socket(asked: Asked) -> AsyncIterator[NodePort]:
    where = asked.node.store.socket
    where.parent.mkdir(exist_ok=True)
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(where, handlers(asked.port)).serve)
        port = ControlPort(where)
        yield Threaded(port)
        port.close()
        nursery.cancel_scope.cancel()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with small_node(tmp_path / "store") as node:
        yield node


def test_both_have_the_methods_of_the_port_with_its_parameters() -> None:
    for kind in (LocalPort, ControlPort):
        for name in METHODS:
            meant = inspect.signature(getattr(NodePort, name))
            assert inspect.signature(getattr(kind, name)) == meant, (kind, name)


@pytest.mark.parametrize("way", [in_process, by_socket])
def test_the_answers_are_the_same(node: SmallNode, way: Callable[[Asked], Any]) -> None:
    asked = Asked(node)
    space = node.namespace("cache", capacity=16 * MIB)
    kept = node.write(space, "kept", bytes(MIB))
    written, fd = node.make(space, "written")
    changes = [Change(namespace_root(space), b"\xff", 7)]

    async def main() -> None:
        async with way(asked) as port:
            assert await port.room(space, 3 * MIB) == SpaceGrant(1234, 0)
            with pytest.raises(NoSpace, match="the namespace cache"):
                await port.room(space, 17 * MIB)
            await port.changed(changes, [kept], [3, 4])
            assert (asked.told, asked.dropped) == (changes, [3, 4])
            asked.failures = [Unavailable("not now")]
            with pytest.raises(Unavailable, match="not now"):
                await port.changed(changes)
            await port.touched([kept], {"evicted": 2})
            assert asked.port.misses["evicted"] == 2
            assert await port.find([(namespace_root(space), b"\xff/")]) is False
            assert await port.bring(kept) == "nowhere"
            assert await port.bring_span(kept, 0, 0, 1) == "nowhere"
            assert await port.borrow(kept, 1, 9) == "nowhere"
            assert [await port.is_written(ino) for ino in (kept, written)] == [False, True]
            assert await port.seal([]) is True

    asked.keeping(main)
    node.close(written, fd)


def test_what_was_removed_before_its_close_was_told_has_no_place_in_the_index(
    node: SmallNode,
) -> None:
    """A client tells what it closed a moment later: the file may have gone since, as may this
    node's copy, for one that another node wrote."""
    asked = Asked(node)
    space = node.namespace("cache")
    kept, removed = (node.write(space, each, b"x") for each in ("kept", "removed"))
    node.index.remove([kept, removed])
    node.engine.transact_now(lambda t: lifecycle.evict(t, removed, 1))

    async def main() -> None:
        await asked.port.changed([], [kept, removed])

    asked.keeping(main)
    assert [node.index.has(ino, 0) for ino in (kept, removed)] == [True, False]


def test_without_a_node_the_socket_says_so(tmp_path: Path) -> None:
    port = ControlPort(tmp_path / "control")
    with pytest.raises(NoNode):
        answer(port.is_written(5))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def silent(where: Path) -> Iterator[None]:
    """A node's socket that takes requests, and answers none."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(where))
        listening.listen(8)
        yield
    where.unlink()


@pytest.mark.parametrize("way", ["thread", "loop"])
def test_a_node_that_does_not_answer_is_waited_for_once(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Each commit tells it, and would otherwise wait as long as the first did."""
    monkeypatch.setattr(control_port, "_DEADLINE_S", 0.3)
    monkeypatch.setattr(control_port, "_SILENT_S", 0.05)
    deadlines: list[float] = []
    asked, where = Asked(node), node.store.socket
    where.parent.mkdir(exist_ok=True)
    port = ControlPort(where)
    call = control.ControlClient.call

    is_served = False

    def counted(self: control.ControlClient, method: str, params: Any, deadline_s: float) -> Any:
        deadlines.append(deadline_s)
        return call(self, method, params, 60.0 if is_served else deadline_s)

    monkeypatch.setattr(control.ControlClient, "call", counted)

    async def tell() -> None:
        if way == "loop":
            await port.changed_in_loop([], [], [])
        else:
            await Threaded(port).changed([])

    async def main() -> None:
        nonlocal is_served
        with silent(where):
            for number in range(3):
                if number == 2:  # the next one is answered, in time also on a busy machine
                    monkeypatch.setattr(control_port, "_DEADLINE_S", 60.0)
                    monkeypatch.setattr(control_port, "_SILENT_S", 30.0)
                with pytest.raises(Unavailable, match="did not answer in time"):
                    await tell()
        async with trio.open_nursery() as nursery:
            await nursery.start(ControlServer(where, handlers(asked.port)).serve)
            is_served = True
            await tell()
            port.close()
            await tell()
            nursery.cancel_scope.cancel()
        with pytest.raises(NoNode):
            await tell()

    asked.keeping(main)
    assert deadlines == [0.3, 0.05, 0.05, 30.0, 60.0, 60.0]
