"""Loads that compare what they read with the store's checksums."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds.io.checked_source import CheckedSource
from gds.io.memory import allocate
from gds.plan.pages import page_down, page_up
from kvfs.base.errors import AccessDenied, Conflict, Corrupt, Invalid, NotSupported, Unavailable
from kvfs.datastore.checksum import CHUNK_BYTES, checksum
from tests.gds.checkpoints import assert_same, llama, meant, write, write_shards
from tests.gds.sealing import data_file, flip, wait_for_checksums
from tests.integration.harness import Node, best_mode
from tests.integration.posix import as_user, let_clock_pass

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node.make(best_mode(), "--scrub-rate", "0")  # else it might be the one who finds it
    try:
        node.up()
        yield node
    finally:
        node.remove()


@pytest.fixture
def home(node: Node, request: pytest.FixtureRequest) -> Path:
    directory = node.mount / "models" / request.node.name
    directory.mkdir()
    return directory


def settled(node: Node, path: Path) -> Path:
    """Its data file, once there are checksums."""
    key = str(path.relative_to(node.mount))
    wait_for_checksums(node.store, key)
    return data_file(node.store, key)


TENSORS = {
    "before": meant("F32", (1 * MIB,), 1),
    "rotten": meant("BF16", (3 * MIB,), 2),
    "small": meant("I8", (17,), 3),
    "after": meant("F16", (5 * MIB,), 4),
}


def test_what_is_whole_is_loaded(node: Node, home: Path) -> None:
    import torch

    import gds

    write(home / "a.safetensors", TENSORS, padding=11)
    settled(node, home / "a.safetensors")
    assert_same(gds.load_file(home / "a.safetensors", verify=True), TENSORS)
    assert_same(dict(gds.iter_tensors(home / "a.safetensors", verify=True)), TENSORS)
    found = gds.load_model(home / "a.safetensors", dtype=torch.float64, verify=True)
    plain = gds.load_model(home / "a.safetensors", dtype=torch.float64)
    assert all(torch.equal(found[name].nan_to_num(), plain[name].nan_to_num()) for name in TENSORS)


@pytest.mark.parametrize("strategy", ["auto", "strided"])
def test_ranks_have_their_parts(node: Node, home: Path, strategy: str) -> None:
    import torch

    import gds

    write_shards(home, [llama(1, 512), llama(1, 512, first=1)])
    for path in home.glob("*.safetensors"):
        settled(node, path)
    for rank in range(2):
        found = gds.load_model(home, rank=rank, world_size=2, strategy=strategy, verify=True)
        plain = gds.load_model(home, rank=rank, world_size=2)
        assert set(found) == set(plain)
        for name, each in plain.items():
            assert torch.equal(found[name].view(torch.uint8), each.view(torch.uint8)), name


def test_a_bit_that_rotted_is_found_and_named(node: Node, home: Path) -> None:
    import gds

    path = home / "a.safetensors"
    write(path, TENSORS)
    flip(settled(node, path), 13 * MIB)
    told = f"^{path}: tensor 'after': what lies from byte {12 * MIB} to {16 * MIB} is not what"
    for load in (gds.load_file, gds.load_model, gds.iter_tensors):
        with pytest.raises(Corrupt, match=told):
            list(load(path, verify=True))
    assert set(gds.load_file(path)) == set(TENSORS)  # which nobody asked to verify


def test_a_header_that_rotted_is_found(node: Node, home: Path) -> None:
    import gds

    path = home / "a.safetensors"
    write(path, {"before": TENSORS["before"]})
    data = settled(node, path)
    flip(data, data.read_bytes().index(b"before"))
    assert list(gds.load_file(path)) == ["cefore"]
    with pytest.raises(Corrupt, match="its header"):
        gds.load_file(path, verify=True)


def test_what_has_no_checksums_is_said(home: Path, tmp_path: Path) -> None:
    import gds

    write(tmp_path / "a.safetensors", TENSORS)
    with pytest.raises(NotSupported, match="on no mount of KVFS"):
        gds.load_file(tmp_path / "a.safetensors", verify=True)
    path = home / "a.safetensors"
    write(path, TENSORS)
    with open(path, "r+b"), pytest.raises(Unavailable, match="no checksums yet"):
        gds.load_file(path, verify=True)
    with pytest.raises(Invalid, match="copy=False"):
        gds.load_file(path, verify=True, copy=False)


def test_who_may_not_enter_the_store_is_told_so(home: Path) -> None:
    import gds

    path = home / "a.safetensors"
    write(path, {"before": TENSORS["before"]})
    path.chmod(0o644)
    home.chmod(0o755)
    with as_user(1234), pytest.raises(AccessDenied, match="its checksums are in"):
        gds.load_file(path, verify=True)


SIZE = 3 * CHUNK_BYTES + 12_345


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    path.write_bytes(random.Random(5).randbytes(SIZE))
    return path


def checked(path: Path) -> CheckedSource:
    fd = os.open(path, os.O_RDONLY)
    found = checksum(fd, SIZE)
    assert found is not None
    return CheckedSource(fd, str(path), found.chunks)


def read(source: CheckedSource, begin: int, end: int) -> bytes:
    base = page_down(begin)
    page = allocate(page_up(end) - base)
    source.read_into(page, begin, end)
    pieces = bytearray(end - begin)
    source.read_pieces([(memoryview(pieces), begin)])
    assert pieces == page[begin - base : end - base]
    return bytes(pieces)


def spans(seed: int) -> Iterator[tuple[int, int]]:
    ends = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, SIZE - 1, SIZE]
    yield from ((begin, end) for begin in ends for end in ends if begin < end)
    chosen = random.Random(seed)
    for _ in range(10):
        begin, end = sorted(chosen.sample(range(SIZE + 1), 2))
        yield begin, end


def test_any_span_is_read_as_it_is(plain: Path, seed: int) -> None:
    source, data = checked(plain), plain.read_bytes()
    try:
        for begin, end in spans(seed):
            assert read(source, begin, end) == data[begin:end], (begin, end)
    finally:
        source.close()


def test_what_rotted_is_in_no_span_and_keeps_no_other_back(plain: Path, seed: int) -> None:
    source, data = checked(plain), plain.read_bytes()
    flip(plain, CHUNK_BYTES + 5)
    try:
        for begin, end in spans(seed):
            if begin < 2 * CHUNK_BYTES and end > CHUNK_BYTES:
                with pytest.raises(Corrupt, match="its checksum differs"):
                    read(source, begin, end)
            else:
                assert read(source, begin, end) == data[begin:end], (begin, end)
    finally:
        source.close()


def test_what_is_wrong_in_memory_alone_is_read_again(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = checked(plain), plain.read_bytes()
    fill = CheckedSource._fill
    flips = [3]

    def fill_wrongly(self: CheckedSource, fd: int, view: memoryview, *rest: int) -> None:
        fill(self, fd, view, *rest)
        if flips:
            view[flips.pop()] ^= 1

    monkeypatch.setattr(CheckedSource, "_fill", fill_wrongly)
    try:
        page = allocate(page_up(SIZE))
        source.read_into(page, 0, SIZE)
        assert page[:SIZE] == data
        assert not flips
    finally:
        source.close()


def test_what_was_written_to_meanwhile_is_no_damage(plain: Path) -> None:
    source = checked(plain)
    let_clock_pass(plain)
    with open(plain, "r+b") as file:
        file.write(b"new")
    try:
        with pytest.raises(Conflict, match="it was written to"):
            read(source, 0, SIZE)
    finally:
        source.close()
