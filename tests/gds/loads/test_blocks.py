"""Many KV blocks into and out of buffers, each with its own result."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gds
import kvfs
from gds import Block, Outcome
from kvfs.base.errors import Corrupt, Invalid, IsADirectory, NotFound, Unavailable
from kvfs.datastore.tiered_files import TieredFiles
from kvfs.vfs.open import BlockingOpener
from tests.contract import client_store
from tests.gds.sealing import data_file, flip, wait_for_checksums
from tests.integration.posix import ALICE, needs_root

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = client_store.make(tmp_path_factory.mktemp("blocks") / "store")
    with client_store.running_node(root, "256MiB"):
        yield root


@pytest.fixture
def client(store: Path) -> Iterator[kvfs.Client]:
    with kvfs.Client(store) as client:
        yield client


@pytest.fixture
def home(request: pytest.FixtureRequest) -> str:
    return f"/cache/{request.node.originalname}"


def outcomes(found: list[Block]) -> list[Outcome]:
    return [each.outcome for each in found]


def blocks(home: str, count: int, size: int = MIB) -> dict[str, bytes]:
    return {f"{home}/{n}": (b"%d " % n * size)[:size] for n in range(count)}


def test_blocks_come_back_into_slices_of_one_buffer(client: kvfs.Client, home: str) -> None:
    meant = blocks(home, 20)
    written = gds.write_blocks(list(meant), list(meant.values()), client=client)
    assert written == [Block(Outcome.STORED, MIB)] * 20
    buffer = bytearray(20 * MIB)
    found = gds.read_blocks(list(meant), buffer, client=client)
    assert found == [Block(Outcome.HIT, MIB)] * 20
    assert all(each.ok for each in found)
    assert buffer == b"".join(meant.values())


def test_one_buffer_becomes_as_many_blocks(client: kvfs.Client, home: str) -> None:
    meant = blocks(home, 4)
    whole = b"".join(meant.values())
    assert outcomes(gds.write_blocks(list(meant), whole, client=client)) == [Outcome.STORED] * 4
    assert [client.get(key) for key in meant] == list(meant.values())


def test_rows_of_a_tensor_are_buffers(client: kvfs.Client, home: str) -> None:
    import torch

    keys = [f"{home}/{n}" for n in range(3)]
    meant = torch.randn(3, 1000).to(torch.bfloat16)
    assert all(each.ok for each in gds.write_blocks(keys, list(meant), client=client))
    rows, whole = torch.zeros_like(meant), torch.zeros_like(meant)
    assert all(each.ok for each in gds.read_blocks(keys, list(rows), client=client))
    assert all(each.ok for each in gds.read_blocks(keys, whole, client=client))
    assert torch.equal(rows, meant)
    assert torch.equal(whole, meant)


def test_each_block_has_its_own_result(client: kvfs.Client, home: str) -> None:
    client.put(f"{home}/a", b"12345", parents=True)
    client.mkdir(f"{home}/directory")
    keys = [f"{home}/a", f"{home}/none", "/nowhere/at/all", f"{home}/directory", f"{home}/a/b"]
    buffers = [bytearray(9) for _ in keys]
    found = gds.read_blocks([*keys, f"{home}/a"], [*buffers, bytearray(4)], client=client)
    hit, *misses, directory, under, small = found
    assert hit == Block(Outcome.HIT, 5)
    assert buffers[0] == b"12345" + bytes(4)
    assert [*misses, under] == [Block(Outcome.MISS)] * 3
    assert directory.outcome is Outcome.REFUSED
    assert isinstance(directory.error, IsADirectory)
    assert small.outcome is Outcome.TOO_SMALL
    assert [each.ok for each in found] == [True] + [False] * 5


def test_what_lost_its_data_is_a_miss_in_a_cache_and_corrupt_elsewhere(
    store: Path, client: kvfs.Client, home: str
) -> None:
    keys = [f"{home}/evicted", f"/models{home}/lost", f"{home}/there"]
    client.mkdir(f"/models{home}", parents=True)
    gds.write_blocks(keys, [b"x" * 100] * 3, client=client)
    for key in keys[:2]:
        data_file(store, key).unlink()
    found = gds.read_blocks(keys, bytearray(300), client=client)
    assert outcomes(found) == [Outcome.MISS, Outcome.CORRUPT, Outcome.HIT]


def test_a_block_that_rotted_is_corrupt_when_it_is_verified(
    store: Path, client: kvfs.Client, home: str
) -> None:
    meant = blocks(home, 3, 5 * MIB)
    gds.write_blocks(list(meant), list(meant.values()), client=client)
    for key in meant:
        wait_for_checksums(store, key)
    _, rotten, _ = meant
    flip(data_file(store, rotten), 4 * MIB + 77)
    buffer = bytearray(15 * MIB)
    first, second, third = gds.read_blocks(list(meant), buffer, client=client, verify=True)
    assert first == third == Block(Outcome.HIT, 5 * MIB)
    assert second.outcome is Outcome.CORRUPT
    assert isinstance(second.error, Corrupt)
    assert f"{rotten}: what was read from byte {4 * MIB} on" in str(second.error)
    whole = client.get_many([rotten], verify=True)
    assert isinstance(whole[0], Corrupt)


def test_what_has_no_checksums_yet_is_read_all_the_same(client: kvfs.Client, home: str) -> None:
    meant = blocks(home, 1)
    gds.write_blocks(list(meant), list(meant.values()), client=client)
    found = gds.read_blocks(list(meant), bytearray(MIB), client=client, verify=True)
    assert outcomes(found) == [Outcome.HIT]


def test_one_that_cannot_be_stored_keeps_no_other_back(client: kvfs.Client, home: str) -> None:
    client.mkdir(f"{home}/taken", parents=True)
    keys = [f"{home}/a", f"{home}/taken", "/nowhere/b", f"{home}/c"]
    found = gds.write_blocks(keys, [b"1", b"2", b"3", b"4"], client=client)
    assert outcomes(found) == [Outcome.STORED, Outcome.REFUSED, Outcome.MISS, Outcome.STORED]
    assert [found[1].size, found[3].size] == [0, 1]
    assert client.get_many(keys)[::3] == [b"1", b"4"]


def test_what_finds_no_space_is_said(client: kvfs.Client, home: str) -> None:
    """A durable namespace: nothing in it goes to make room."""
    client.mkdir(f"/models{home}", parents=True)
    keys = [f"/models{home}/{n}" for n in range(3)]
    buffers = [b"fits", bytes(300 * MIB), b"not tried"]
    found = gds.write_blocks(keys, buffers, client=client)
    assert outcomes(found) == [Outcome.STORED, Outcome.NO_SPACE, Outcome.NO_SPACE]
    assert client.exists(keys) == [True, False, False]


def test_more_blocks_than_files_are_opened_at_once(client: kvfs.Client, home: str) -> None:
    meant = blocks(home, 300, 1000)
    assert all(
        each.ok for each in gds.write_blocks(list(meant), list(meant.values()), client=client)
    )
    buffer = bytearray(300_000)
    assert all(each.ok for each in gds.read_blocks(list(meant), buffer, client=client))
    assert buffer == b"".join(meant.values())


def test_a_store_that_cannot_be_read_makes_no_miss(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unavailable("the node did not answer in time")

    monkeypatch.setattr(client, "get_many", fail)
    monkeypatch.setattr(client, "put_many", fail)
    monkeypatch.setattr(client, "put", fail)
    keys = [f"{home}/a", f"{home}/b"]
    assert outcomes(gds.read_blocks(keys, bytearray(8), client=client)) == [Outcome.UNAVAILABLE] * 2
    assert outcomes(gds.write_blocks(keys, bytes(8), client=client)) == [Outcome.UNAVAILABLE] * 2


def test_without_a_client_the_default_store_is_meant(
    store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.setenv("KVFS_STORE", str(store))
    assert outcomes(gds.write_blocks([f"{home}/a"], b"data")) == [Outcome.STORED]
    buffer = bytearray(4)
    assert outcomes(gds.read_blocks([f"{home}/a"], buffer)) == [Outcome.HIT]
    assert buffer == b"data"
    monkeypatch.setenv("KVFS_STORE", str(tmp_path / "none"))
    with pytest.raises(NotFound):
        gds.read_blocks([f"{home}/a"], buffer)


def test_what_makes_no_sense_is_refused_at_once(client: kvfs.Client) -> None:
    with pytest.raises(Invalid, match="2 blocks need as many buffers, not 1"):
        gds.read_blocks(["/cache/a", "/cache/b"], [bytearray(1)], client=client)
    with pytest.raises(Invalid, match="a buffer of 5 bytes has no 2 equal parts"):
        gds.read_blocks(["/cache/a", "/cache/b"], bytearray(5), client=client)
    with pytest.raises(Invalid, match="read-only"):
        gds.read_blocks(["/cache/a"], b"12345", client=client)
    for keys in ("/c", b"/c"):
        with pytest.raises(Invalid, match="a list of paths"):
            gds.read_blocks(keys, bytearray(2), client=client)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="surrogates"):
        gds.read_blocks(["/cache/\ud800"], bytearray(2), client=client)
    assert gds.read_blocks([], [], client=client) == []
    assert gds.write_blocks([], [], client=client) == []


def test_blocks_need_no_torch() -> None:
    program = "import sys, gds; gds.read_blocks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@needs_root
@pytest.mark.parametrize("kind", ["link", "linked directory", "fifo", "foreign"])
def test_no_block_is_read_from_what_is_no_data_file_of_the_store(
    store: Path, client: kvfs.Client, home: str, tmp_path: Path, kind: str
) -> None:
    keys = [f"{home}-{kind.replace(' ', '-')}/{n}" for n in range(3)]
    gds.write_blocks(keys, b"abc", client=client)
    path = data_file(store, keys[1])
    aside = tmp_path / "aside"
    changed = path.parent if kind == "linked directory" else path
    os.rename(changed, aside)
    try:
        if kind == "fifo":
            os.mkfifo(changed)
        elif kind == "foreign":
            changed.write_bytes(b"X")
            os.chown(changed, ALICE, ALICE)
        else:
            changed.symlink_to(aside)
        into = bytearray(3)
        found = gds.read_blocks(keys, into, client=client)
    finally:
        changed.unlink()
        os.rename(aside, changed)
    if kind == "linked directory":
        assert outcomes(found) == [Outcome.CORRUPT] * 3
        assert into == bytes(3)
    else:
        assert outcomes(found) == [Outcome.HIT, Outcome.CORRUPT, Outcome.HIT]
        assert into == b"a\0c"


def test_what_the_system_refuses_is_that_blocks_result(
    client: kvfs.Client, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    keys = [f"{home}/{n}" for n in range(3)]
    gds.write_blocks(keys, b"abc", client=client)
    refused = client.stat(keys[1]).ino
    opened = TieredFiles.open

    def open_or_fail(files: TieredFiles, ino: int, version: int, flags: int) -> int:
        if ino == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(files, ino, version, flags)

    monkeypatch.setattr(TieredFiles, "open", open_or_fail)
    monkeypatch.setattr(TieredFiles, "sequences", lambda _: [])
    found = gds.read_blocks(keys, bytearray(3), client=client)
    assert outcomes(found) == [Outcome.HIT, Outcome.UNAVAILABLE, Outcome.HIT]
    assert "Too many open files" in str(found[1].error)


def test_what_this_host_does_not_have_is_asked_for_at_once(
    store: Path, client: kvfs.Client, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    keys = [f"{home}/{n}" for n in range(6)]
    gds.write_blocks(keys, b"abcdef", client=client)
    lost = keys[1::2]
    for key in lost:
        data_file(store, key).unlink()
    asked = threading.Barrier(len(lost), timeout=60)

    def fetch(*_: object) -> None:
        """Each waits until all are asked for."""
        asked.wait()
        raise NotFound("nobody has it")

    monkeypatch.setattr(BlockingOpener, "fetch", fetch)
    into = bytearray(6)
    found = gds.read_blocks(keys, into, client=client)
    assert outcomes(found) == [Outcome.HIT, Outcome.MISS] * 3
    assert into == b"a\0c\0e\0"
