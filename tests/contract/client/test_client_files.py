"""Local files into a store and out of it, moved by the kernel."""

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from kvfs.base.errors import Invalid, NotFound
from kvfs.session import byte_transfer
from tests.contract import client_store


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvfs.Client]:
    root = client_store.make(tmp_path_factory.mktemp("store") / "store")
    with kvfs.Client(root) as client:
        yield client


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another filesystem than the store's."""
    path = Path("/dev/shm") / f"kvfs-test-{os.getpid()}"
    if not path.parent.is_dir() or path.parent.stat().st_dev == Path("/tmp").stat().st_dev:
        pytest.skip("no second filesystem here: /dev/shm is missing")
    path.mkdir()
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def content(seed: int, size: int) -> bytes:
    return seed.to_bytes(4, "little") * (size // 4)


def test_a_local_file_there_and_back(client: kvfs.Client, tmp_path: Path, seed: int) -> None:
    data = content(seed, 300_000)
    (tmp_path / "a").write_bytes(data)
    assert client.put_file(tmp_path / "a", "/cache/a") == len(data)
    assert client.get("/cache/a") == data
    assert client.get_file("/cache/a", tmp_path / "b") == len(data)
    assert (tmp_path / "b").read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_between_filesystems(client: kvfs.Client, elsewhere: Path, seed: int) -> None:
    data = content(seed, 300_000)
    (elsewhere / "a").write_bytes(data)
    assert client.put_file(elsewhere / "a", "/cache/other") == len(data)
    assert client.get("/cache/other") == data
    client.get_file("/cache/other", str(elsewhere / "b"))
    assert (elsewhere / "b").read_bytes() == data


@pytest.mark.parametrize("refused", [("copy_file_range",), ("copy_file_range", "sendfile")])
def test_where_the_kernel_cannot_the_next_way_is_taken(
    client: kvfs.Client,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    refused: tuple[str, ...],
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    for name in refused:
        monkeypatch.setattr(f"{byte_transfer.__name__}.os.{name}", refuse)
    data = content(seed, 3_000_000)
    (tmp_path / "a").write_bytes(data)
    client.put_file(tmp_path / "a", "/cache/refused")
    assert client.get("/cache/refused") == data
    client.get_file("/cache/refused", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data


def test_holes_stay_holes(client: kvfs.Client, tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.seek(64 << 20)
        file.write(b"in the middle")
        file.truncate(1 << 30)
    assert client.put_file(tmp_path / "sparse", "/cache/sparse") == 1 << 30
    found = client.stat("/cache/sparse")
    assert found.size == 1 << 30
    assert found.blocks * 512 < 1 << 20
    assert client.get("/cache/sparse", offset=64 << 20, size=13) == b"in the middle"
    client.get_file("/cache/sparse", tmp_path / "back")
    back = (tmp_path / "back").stat()
    assert (back.st_size, back.st_blocks * 512 < 1 << 20) == (1 << 30, True)


def test_from_a_pipe_and_to_one(client: kvfs.Client, seed: int) -> None:
    data = content(seed, 1_000_000)
    read_end, write_end = os.pipe()

    def feed() -> None:
        with open(write_end, "wb") as pipe:
            pipe.write(data)

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert client.put_file(read_end, "/cache/piped") == len(data)
    feeder.join()
    os.close(read_end)
    assert client.get("/cache/piped") == data

    read_end, write_end = os.pipe()
    with open(read_end, "rb") as source:
        received: list[bytes] = []
        drain = threading.Thread(target=lambda: received.append(source.read()))
        drain.start()
        assert client.get_file("/cache/piped", write_end) == len(data)
        os.close(write_end)
        drain.join()
    assert received == [data]


def test_file_objects(client: kvfs.Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello")
    with open(tmp_path / "a", "rb") as file:
        client.put_file(file, "/cache/object")
    with open(tmp_path / "b", "wb", buffering=0) as file:
        file.write(b"first: ")
        client.get_file("/cache/object", file)
    assert (tmp_path / "b").read_bytes() == b"first: hello"
    with open(tmp_path / "b", "ab", buffering=0) as file:
        client.get_file("/cache/object", file)
    assert (tmp_path / "b").read_bytes() == b"first: hellohello"
    with pytest.raises(Invalid, match="BytesIO is no local file"):
        client.put_file(io.BytesIO(b"x"), "/cache/object")
    assert client.get("/cache/object") == b"hello"


def test_progress_grows_to_the_size(client: kvfs.Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))
    seen: list[int] = []
    client.put_file(tmp_path / "a", "/cache/progress", progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 200_000
    seen.clear()
    client.get_file("/cache/progress", tmp_path / "b", progress=seen.append)
    assert seen[-1] == 200_000


def test_what_progress_raises_ends_it_without_a_trace(client: kvfs.Client, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(200_000))
    client.put("/cache/kept", b"old")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.put_file(tmp_path / "a", "/cache/kept", progress=stop)
    assert client.get("/cache/kept") == b"old"
    with pytest.raises(KeyboardInterrupt):
        client.get_file("/cache/kept", tmp_path / "a", progress=stop)
    assert (tmp_path / "a").read_bytes() == bytes(200_000)
    assert os.listdir(tmp_path) == ["a"]


def test_local_errors_are_the_systems(client: kvfs.Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        client.put_file(tmp_path / "missing", "/cache/a")
    client.put("/cache/a", b"1")
    with pytest.raises(FileNotFoundError):
        client.get_file("/cache/a", tmp_path / "missing" / "a")
    with pytest.raises(Invalid, match="is a directory"):
        client.get_file("/cache/a", tmp_path)
    with pytest.raises(NotFound):
        client.get_file("/cache/missing", tmp_path / "b")
    assert os.listdir(tmp_path) == []


def test_a_device_is_written_to_not_replaced(client: kvfs.Client) -> None:
    client.put("/cache/a", b"1")
    client.get_file("/cache/a", "/dev/null")
    assert Path("/dev/null").is_char_device()


def test_the_new_local_file_honours_the_umask(client: kvfs.Client, tmp_path: Path) -> None:
    client.put("/cache/a", b"1")
    before = os.umask(0o027)
    try:
        client.get_file("/cache/a", tmp_path / "a")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
