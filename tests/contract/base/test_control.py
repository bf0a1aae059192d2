"""The control socket, with a real socket between a server and callers of both kinds."""

import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base import control
from kvfs.base.errors import Invalid, NotFound, NotSupported, TooLarge, Unavailable
from kvfs.base.version import CONTROL

Params = dict[str, Any]


async def echo(params: Params) -> Params:
    return params


async def missing(_params: Params) -> None:
    raise NotFound("no such thing")


async def broken(_params: Params) -> None:
    raise ZeroDivisionError


async def forever(_params: Params) -> None:
    await trio.sleep_forever()


HANDLERS = {"echo": echo, "missing": missing, "broken": broken, "forever": forever}
HANDLERS |= {"status": echo, "stop": echo}
OF_VERSION = b'{"method": "%s", "params": {}, "version": %d}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Deep: longer than a socket's address may be."""
    run = tmp_path / ("d" * 100) / "run"
    run.mkdir(parents=True)
    return run / "control.sock"


def serving(path: Path, talk: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(control.ControlServer(path, HANDLERS).serve)
            await talk()
            nursery.cancel_scope.cancel()

    with_deadline(main)


def with_deadline(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(30):
            await main()

    trio.run(bounded)


async def in_thread(*arguments: Any) -> Any:
    return await trio.to_thread.run_sync(control.call, *arguments)


def test_a_request_is_answered(path: Path) -> None:
    async def talk() -> None:
        params = {"name": "ü", "list": [1, 2, None]}
        assert await in_thread(path, "echo", params) == params

    serving(path, talk)


def test_an_error_arrives_as_its_own_class(path: Path) -> None:
    async def talk() -> None:
        with pytest.raises(NotFound, match="no such thing"):
            await in_thread(path, "missing")
        with pytest.raises(NotSupported, match="no method 'nonsense'; there are: broken, echo"):
            await in_thread(path, "nonsense")

    serving(path, talk)


def test_a_failing_handler_does_not_end_the_node(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> None:
        with pytest.raises(Unavailable, match="ZeroDivisionError"):
            await in_thread(path, "broken")
        assert await in_thread(path, "echo", {"still": "here"}) == {"still": "here"}

    serving(path, talk)
    assert "a control request failed" in caplog.text


def test_nobody_there_names_the_store_and_the_remedy(path: Path) -> None:
    store = path.parent.parent
    with pytest.raises(Unavailable, match=f"no node runs on the store {store}.*kvfs up"):
        control.call(path, "echo")
    with pytest.raises(Unavailable, match="no node runs"):
        control.call(path.parent / "gone" / "control.sock", "echo")


def test_a_socket_left_by_a_killed_node_is_replaced(path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    directory = os.open(path.parent, os.O_PATH)
    dead.bind(f"/proc/self/fd/{directory}/{path.name}")
    dead.close()
    os.close(directory)
    with pytest.raises(Unavailable, match="no node runs"):
        control.call(path, "echo")

    async def talk() -> None:
        assert await in_thread(path, "echo") == {}

    serving(path, talk)
    assert not path.exists()


def test_a_slow_answer_is_given_up(path: Path) -> None:
    async def talk() -> None:
        with pytest.raises(Unavailable, match="did not answer in time"):
            await in_thread(path, "forever", {}, 0.05)

    serving(path, talk)


def test_too_long_a_request_is_refused_before_it_is_sent(path: Path) -> None:
    with pytest.raises(TooLarge):
        control.call(path, "echo", {"x": "y" * control.LINE_LIMIT})


def test_what_is_no_request_is_answered_with_an_error(path: Path) -> None:
    async def talk() -> None:
        peer = await raw_connection(path)
        with peer:
            await peer.send(b'not json\n{"method": "echo", "params": {"a": 1}}\n')
            answer = b""
            while answer.count(b"\n") < 2:
                answer += await peer.recv(65536)
        first, second = answer.splitlines()
        assert b'"Invalid"' in first
        assert second == b'{"result":{"a":1}}'

    serving(path, talk)


def test_a_line_without_end_closes_the_connection(path: Path) -> None:
    async def talk() -> None:
        peer = await raw_connection(path)
        with peer, pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(2 * control.LINE_LIMIT // 65536):
                await peer.send(b"x" * 65536)
        assert await in_thread(path, "echo") == {}

    serving(path, talk)


async def raw_connection(path: Path) -> trio.socket.SocketType:
    peer = trio.socket.socket(socket.AF_UNIX)
    directory = os.open(path.parent, os.O_PATH)
    try:
        await peer.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    return peer


def test_a_silent_connection_is_closed_and_a_slow_answer_is_not_cut_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "IDLE_S", 1.0)
    monkeypatch.setattr(control, "_TICK_S", 0.05)

    async def slow(_params: Params) -> None:
        await trio.sleep(1.5)  # longer than a silent connection has

    async def talk() -> None:
        with await raw_connection(path) as silent, await raw_connection(path) as asking:
            await asking.send(OF_VERSION % (b"slow", CONTROL))
            assert await silent.recv(100) == b""
            assert json.loads(await asking.recv(1000)) == {}
            assert await asking.recv(100) == b"", "it is silent from then on"

    monkeypatch.setitem(HANDLERS, "slow", slow)
    serving(path, talk)


def test_only_root_and_the_owner_may_ask(path: Path) -> None:
    async def talk() -> None:
        assert path.stat().st_mode & 0o777 == 0o600

    serving(path, talk)


def test_the_wire_classes_are_the_core_errors() -> None:
    with pytest.raises(Invalid, match="x"):
        control._result(bytearray(b'{"error":{"type":"Invalid","message":"x"}}'))
    with pytest.raises(Unavailable):
        control._result(bytearray(b'{"error":{"type":"os","message":"x"}}'))


def test_neighbouring_versions_work_together(path: Path) -> None:
    async def talk() -> None:
        for version in (CONTROL - 1, CONTROL, CONTROL + 1):
            assert await said(path, OF_VERSION % (b"echo", version)) == {"result": {}}
        assert await said(path, b'{"method": "echo"}\n') == {"result": {}}, "the first version"

    serving(path, talk)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(CONTROL + 2, "restart the node with the newer one"), (CONTROL - 2, "start the program anew")],
)
def test_another_version_is_refused_with_the_remedy(path: Path, version: int, remedy: str) -> None:
    """`status` and `stop` any version may ask."""

    async def talk() -> None:
        answer = await said(path, OF_VERSION % (b"echo", version))
        assert answer["error"]["type"] == "NotSupported"
        assert f"version {version} " in answer["error"]["message"]
        assert remedy in answer["error"]["message"]
        assert await said(path, OF_VERSION % (b"status", version)) == {"result": {}}
        assert await said(path, OF_VERSION % (b"stop", version)) == {"result": {}}

    serving(path, talk)


def test_an_earlier_version_that_would_not_understand_what_it_reads_is_refused(path: Path) -> None:
    """Once that is so, also for a program that runs on."""
    oldest = CONTROL - 1

    async def main() -> None:
        server = control.ControlServer(path, HANDLERS, lambda: oldest)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            await talk()
            nursery.cancel_scope.cancel()

    async def talk() -> None:
        nonlocal oldest
        assert await said(path, OF_VERSION % (b"echo", CONTROL - 1)) == {"result": {}}
        oldest = CONTROL
        answer = await said(path, OF_VERSION % (b"echo", CONTROL - 1))
        assert answer["error"]["type"] == "NotSupported"
        assert "start the program anew" in answer["error"]["message"]
        for version in (CONTROL, CONTROL + 1):
            assert await said(path, OF_VERSION % (b"echo", version)) == {"result": {}}
        assert await said(path, OF_VERSION % (b"stop", CONTROL - 1)) == {"result": {}}

    with_deadline(main)


async def said(path: Path, line: bytes) -> Any:
    """What is answered to a line as it stands."""
    with control.socket_address(path) as address:
        peer = await trio.open_unix_socket(address)
    async with peer:
        await peer.send_all(line)
        return json.loads(await peer.receive_some(65536))


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET])
def test_a_private_socket_is_so_from_its_beginning(path: Path, kind: int) -> None:
    """Whatever the umask is, and in place of one that a process left behind."""
    before = os.umask(0)
    try:
        for _ in range(2):
            with control.listen_privately(path, kind, backlog=1) as listener:
                assert path.stat().st_mode & 0o777 == 0o600
                with socket.socket(socket.AF_UNIX, kind) as peer:
                    with control.socket_address(path) as address:
                        peer.connect(address)
                    listener.accept()[0].close()
    finally:
        os.umask(before)
