"""The Python API for trio."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

import kvfs
from kvfs.base.errors import Exists, IsADirectory, NotFound
from kvfs.client.writer import FileDraft, FileDrafts
from tests.contract import client_store

Talk = Callable[[kvfs.AsyncClient], Awaitable[None]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with client_store.sound(tmp_path_factory.mktemp("store") / "store") as root:
        yield root


def talking(store: Path, talk: Talk) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            async with kvfs.AsyncClient(store) as client:
                await talk(client)

    trio.run(main)


def test_it_takes_what_its_sister_takes_and_is_documented_as_she_is() -> None:
    for name, method in vars(kvfs.Client).items():
        if name.startswith("_") or name == "close":
            continue
        namesake = getattr(kvfs.AsyncClient, name)
        taken = inspect.signature(namesake).parameters.values()
        assert list(taken) == list(inspect.signature(method).parameters.values()), name
        assert (inspect.getdoc(namesake) or "").startswith(inspect.getdoc(method) or "?"), name


def test_it_does_what_its_sister_does(store: Path) -> None:
    async def talk(client: kvfs.AsyncClient) -> None:
        await client.mkdir("/cache/all")
        await client.put("/cache/all/a", b"hello")
        await client.put_many([("/cache/all/b", b"1"), ("/cache/all/c/d", b"2")], parents=True)
        assert await client.get("/cache/all/a") == b"hello"
        buffer = bytearray(5)
        assert await client.get("/cache/all/a", into=buffer, offset=1) == 4
        assert buffer == b"ello\0"
        keys = ["/cache/all/b", "/cache/all/x", "/cache/all"]
        one, missing, directory = await client.get_many(keys)
        assert (one, missing) == (b"1", None)
        assert isinstance(directory, IsADirectory)
        assert await client.exists(keys) == [True, False, True]
        assert [entry.name async for entry in client.list("/cache/all")] == [b"a", b"b", b"c"]
        await client.rename("/cache/all/a", "/cache/all/z")
        with pytest.raises(Exists):
            await client.rename("/cache/all/b", "/cache/all/z", exclusive=True)
        await client.remove("/cache/all/c/d")
        await client.rmdir("/cache/all/c")
        await client.sync()
        assert (await client.stat("/cache/all/z")).size == 5
        with pytest.raises(NotFound, match="/cache/all/a: no such file"):
            await client.stat("/cache/all/a")

    talking(store, talk)


def test_local_files_with_progress_on_the_event_loop(store: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))
    seen: list[tuple[int, bool]] = []

    def progress(done: int) -> None:
        seen.append((done, trio.lowlevel.in_trio_run()))

    async def talk(client: kvfs.AsyncClient) -> None:
        await client.put_file(tmp_path / "a", "/cache/local", progress=progress)
        await client.get_file("/cache/local", tmp_path / "b", progress=progress)

    talking(store, talk)
    assert (tmp_path / "b").read_bytes() == bytes(200_000)
    assert seen[-1] == (200_000, True)


def test_many_keys_are_looked_up_in_turns(store: Path) -> None:
    async def talk(client: kvfs.AsyncClient) -> None:
        await client.put("/cache/key-3000", b"")
        found = await client.exists([f"/cache/key-{number}" for number in range(5_000)])
        assert [at for at, there in enumerate(found) if there] == [3_000]

    talking(store, talk)


def test_file_objects(store: Path) -> None:
    async def talk(client: kvfs.AsyncClient) -> None:
        async with client.open("/cache/object", "wb") as file:
            await file.write(b"one ")
            await file.write(b"two")
            assert await client.exists(["/cache/object"]) == [False]
        async with client.open("/cache/object") as file:
            assert await file.read() == b"one two"
        with pytest.raises(Exists):
            async with client.open("/cache/object", "xb"):
                pass

    talking(store, talk)


def test_a_file_object_left_by_cancellation_is_dropped(store: Path) -> None:
    async def talk(client: kvfs.AsyncClient) -> None:
        await client.put("/cache/left", b"old")
        with trio.CancelScope() as scope:
            async with client.open("/cache/left", "wb") as file:
                await file.write(b"new")
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        with trio.CancelScope() as scope:
            async with client.open("/cache/left", "wb") as file:
                await file.write(b"new")
                scope.cancel()
        assert await client.get("/cache/left") == b"old"

    talking(store, talk)


def test_a_cancelled_transfer_leaves_everything_as_it_was(store: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))

    async def talk(client: kvfs.AsyncClient) -> None:
        await client.put("/cache/kept", b"old")
        before = client_store.data_files(store)
        with trio.CancelScope() as scope:
            await client.put_file(tmp_path / "a", "/cache/kept", progress=lambda _: scope.cancel())
        assert scope.cancelled_caught
        assert await client.get("/cache/kept") == b"old"
        assert client_store.data_files(store) == before
        with trio.CancelScope() as scope:
            scope.cancel()
            await client.put("/cache/kept", b"new")
        assert scope.cancelled_caught

    talking(store, talk)


def test_a_committed_change_stays_though_the_caller_was_cancelled(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = trio.CancelScope()
    real = FileDrafts.publish

    def publish(self: FileDrafts, made: Sequence[FileDraft]) -> None:
        real(self, made)
        trio.from_thread.run_sync(scope.cancel)

    monkeypatch.setattr(FileDrafts, "publish", publish)

    async def talk(client: kvfs.AsyncClient) -> None:
        with scope:
            await client.put("/cache/committed", b"1")
        assert await client.get("/cache/committed") == b"1"

    talking(store, talk)


def test_many_tasks_at_once(store: Path) -> None:
    async def talk(client: kvfs.AsyncClient) -> None:
        async def one(number: int) -> None:
            path = f"/cache/tasks/{number % 5}"
            await client.put(path, b"%d" % number * 1_000, parents=True)
            assert await client.exists([path]) == [True]
            assert len(await client.get(path)) % 1_000 == 0

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)

    talking(store, talk)
    with kvfs.Client(store) as client:
        assert len(list(client.list("/cache/tasks"))) == 5


def test_the_package_names_it() -> None:
    assert kvfs.AsyncClient.__module__.startswith("kvfs.client")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        kvfs.Nothing  # noqa: B018
