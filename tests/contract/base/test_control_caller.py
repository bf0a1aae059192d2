"""Many requests over connections that are kept, from threads, over restarts and forks."""

import os
import select
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base import control
from kvfs.base.errors import NotFound, Unavailable

Params = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "control.sock"


def serving(path: Path, talk: Callable[[], Awaitable[None]]) -> None:
    """Talk while a node answers; it numbers its connections by their tasks."""
    tasks: list[trio.lowlevel.Task] = []

    async def echo(params: Params) -> Params:
        task = trio.lowlevel.current_task()
        if task not in tasks:
            tasks.append(task)
        return {**params, "connection": tasks.index(task)}

    async def missing(_params: Params) -> None:
        raise NotFound("no such thing")

    async def forever(_params: Params) -> None:
        await trio.sleep_forever()

    async def main() -> None:
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                handlers = {"echo": echo, "missing": missing, "forever": forever}
                await nursery.start(control.ControlServer(path, handlers).serve)
                await talk()
                nursery.cancel_scope.cancel()

    trio.run(main)


async def in_a_thread(caller: control.ControlClient, *arguments: Any) -> Any:
    return await trio.to_thread.run_sync(caller.call, *arguments)


async def in_the_loop(caller: control.ControlClient, *arguments: Any) -> Any:
    async def watch() -> None:
        while True:
            await trio.sleep(0.01)
            caller.expire()

    answer: list[Any] = []
    failed: list[Unavailable | NotFound] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            answer.append(await caller.ask(*arguments))
        except (Unavailable, NotFound) as error:
            failed.append(error)
        nursery.cancel_scope.cancel()
    if failed:
        raise failed[0]
    return answer[0]


Ask = Callable[..., Awaitable[Any]]


@pytest.fixture(params=[in_a_thread, in_the_loop])
def ask(request: pytest.FixtureRequest) -> Ask:
    way: Ask = request.param
    return way


def test_one_connection_serves_many_requests(path: Path, ask: Ask) -> None:
    caller = control.ControlClient(path)

    async def talk() -> None:
        answers = [await ask(caller, "echo", {"n": n}) for n in range(5)]
        assert [answer["n"] for answer in answers] == list(range(5))
        assert len({answer["connection"] for answer in answers}) == 1
        with pytest.raises(NotFound, match="no such thing"):
            await ask(caller, "missing")
        assert (await ask(caller, "echo"))["connection"] == answers[0]["connection"]
        caller.close()
        caller.close()
        connections = {(await ask(caller, "echo"))["connection"] for _ in range(3)}
        assert len(connections | {answers[0]["connection"]}) == 4  # what is closed keeps none

    serving(path, talk)


def test_a_restart_of_the_node_goes_unnoticed(path: Path, ask: Ask) -> None:
    caller = control.ControlClient(path)

    async def talk() -> None:
        assert await ask(caller, "echo")

    serving(path, talk)
    with pytest.raises(control.NoNode):
        caller.call("echo")
    serving(path, talk)
    serving(path, talk)
    caller.close()


def test_an_answer_that_comes_too_late_is_never_taken_for_another(path: Path, ask: Ask) -> None:
    caller = control.ControlClient(path)

    async def talk() -> None:
        assert await ask(caller, "echo")
        with pytest.raises(Unavailable, match="did not answer in time"):
            await ask(caller, "forever", {}, 0.05)
        assert (await ask(caller, "echo", {"mine": True}))["mine"] is True

    serving(path, talk)
    caller.close()


def test_threads_do_not_mix_their_answers(path: Path) -> None:
    caller = control.ControlClient(path)
    wrong: list[Any] = []

    def many(name: str) -> None:
        for number in range(50):
            answer = caller.call("echo", {"name": name, "number": number})
            if (answer["name"], answer["number"]) != (name, number):
                wrong.append(answer)

    def all_of_them() -> None:
        threads = [threading.Thread(target=many, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async def talk() -> None:
        await trio.to_thread.run_sync(all_of_them)

    serving(path, talk)
    caller.close()
    assert wrong == []


def test_the_child_of_a_fork_does_not_use_its_parents_connection(path: Path, ask: Ask) -> None:
    caller = control.ControlClient(path)

    async def talk() -> None:
        first = await ask(caller, "echo")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, b"%d" % caller.call("echo")["connection"])
            finally:
                os._exit(0)
        await trio.to_thread.run_sync(os.waitpid, child, 0)
        os.close(writer)
        with open(reader, "rb") as told:
            assert int(told.read()) != first["connection"]
        assert (await ask(caller, "echo"))["connection"] == first["connection"]

    serving(path, talk)
    caller.close()


ANSWER = b'{"result":{}}\n'


def asks(path: Path, ask: Ask, end: Callable[[socket.socket], object]) -> list[object]:
    """What becomes of three requests to a node that answers the first one, and then ends that
    connection so; over the next one it answers everything."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        caller = control.ControlClient(path)

        def serve() -> None:
            with listener.accept()[0] as first:
                first.recv(1000)
                first.sendall(ANSWER)
                assert select.select([first], [], [], 30)[0]
                end(first)
            with listener.accept()[0] as second:
                while second.recv(1000):
                    second.sendall(ANSWER)

        thread = threading.Thread(target=serve)
        thread.start()
        outcomes: list[object] = []
        for _ in range(3):
            try:
                outcomes.append(trio.run(ask, caller, "count"))
            except Unavailable as error:
                outcomes.append(type(error))
        caller.close()
        thread.join()
        return outcomes


def test_what_the_node_may_have_done_is_not_asked_again(path: Path, ask: Ask) -> None:
    assert asks(path, ask, lambda peer: peer.recv(1000)) == [{}, control.WentAway, {}]


def test_what_the_node_did_not_read_is_asked_again(path: Path, ask: Ask) -> None:
    assert asks(path, ask, lambda _peer: None) == [{}, {}, {}]
    path.unlink()
    assert asks(path, ask, lambda peer: peer.recv(3)) == [{}, {}, {}]
