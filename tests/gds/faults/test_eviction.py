"""Loads and reads of blocks from a cache that evicts all else meanwhile: bytes right, and the lease
gone with them."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

import gds
import kvfs
from gds import Outcome
from tests.cluster.waiting import wait_until
from tests.gds import holes
from tests.gds.checkpoints import assert_same, meant, write
from tests.gds.sealing import data_file
from tests.integration.harness import Node, with_small_cache

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20
CAPACITY: Final = 48 * MIB
BLOCK: Final = 2 * MIB


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with with_small_cache(CAPACITY) as made:
        yield made


def fill(node: Node) -> None:
    """Write more than the cache holds, until what nobody uses has gone."""
    witness = node.mount / "cache" / "witness"
    witness.write_bytes(bytes(BLOCK))

    def is_gone() -> bool:
        for number in range(CAPACITY // BLOCK):
            (node.mount / "cache" / f"filler{number}").write_bytes(bytes(BLOCK))
        return not witness.exists()

    wait_until(is_gone, "the cache evicts what was not used for longest")


def wait_until_evicted(node: Node, path: Path, data: Path) -> None:
    def is_gone() -> bool:
        fill(node)
        return not path.exists() and not data.exists()

    wait_until(is_gone, f"{path} is evicted, and its data with it")


def test_a_load_that_stops_half_way_keeps_its_file(node: Node) -> None:
    """It is larger than what `iter_tensors` reads ahead: the last tensors are not read yet."""
    path = node.mount / "cache" / "large.safetensors"
    holes.write(path, 9, [64 * MIB])
    data = data_file(node.store, "/cache/large.safetensors")
    tensors = gds.iter_tensors(path)
    name, first = next(tensors)
    found = {name: first[0].item()}
    fill(node)
    assert path.exists()
    for name, tensor in tensors:
        found[name] = tensor[0].item()
    assert found == {f"t{n:02d}": n for n in range(9)}
    wait_until_evicted(node, path, data)


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_loaded_or_mapped_stays_until_it_is_let_go(node: Node, copy: bool) -> None:
    path = node.mount / "cache" / "small.safetensors"
    tensors = {f"t{n}": meant("U8", (MIB,), n) for n in range(3)}
    write(path, tensors)
    data = data_file(node.store, "/cache/small.safetensors")
    fills: list[int] = []

    def progress(done: int, _: int) -> None:
        if not done:
            fill(node)
            fills.append(done)

    found = gds.load_file(path, copy=copy, progress=progress if copy else None)
    if not copy:
        fill(node)
        assert path.exists()
    assert_same(found, tensors)
    assert len(fills) == copy
    del found
    wait_until_evicted(node, path, data)


def test_blocks_that_are_evicted_while_they_are_read_are_right_or_misses(node: Node) -> None:
    content = {f"/cache/block{n}": bytes([n]) * MIB for n in range(12)}
    keys = list(content)
    ended = threading.Event()

    def write_others() -> None:
        with kvfs.Client(node.store) as client:
            for number in itertools.count():
                if ended.is_set():
                    return
                client.put(f"/cache/other{number % 64}", bytes(BLOCK))

    seen: set[Outcome] = set()

    def is_seen() -> bool:
        seen.update(_turn(client, content, keys))
        return len(seen) > 1

    with kvfs.Client(node.store) as client, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_others)
        try:
            wait_until(is_seen, "hits and misses were seen")
        finally:
            ended.set()
        writing.result()
    assert seen == {Outcome.HIT, Outcome.MISS}


def _turn(client: kvfs.Client, content: dict[str, bytes], keys: list[str]) -> set[Outcome]:
    """What became of them, read once; what is missing is written again."""
    buffer = bytearray(len(keys) * MIB)
    found = gds.read_blocks(keys, buffer, client=client)
    for at, (key, block) in enumerate(zip(keys, found, strict=True)):
        if block.ok:
            assert buffer[at * MIB : (at + 1) * MIB] == content[key]
    missing = [key for key, block in zip(keys, found, strict=True) if not block.ok]
    written = gds.write_blocks(missing, [content[key] for key in missing], client=client)
    assert all(block.ok for block in written)
    return {block.outcome for block in found}
