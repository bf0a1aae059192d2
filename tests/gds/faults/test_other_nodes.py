"""Loads of what another node holds, and is changing, and blocks of a node that died; no room for
what is brought."""

import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import gds
import kvfs
from gds import Block, Outcome
from kvfs.base.errors import Conflict, Corrupt, NoSpace
from tests.cluster.waiting import wait_until
from tests.gds import holes
from tests.gds.checkpoints import assert_same, meant, write
from tests.integration.harness import Node
from tests.integration.several import Several, several

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20
ROOM: Final = 1024 * MIB
COUNT: Final = 9
SIZE: Final = 64 * MIB
"""Together more than what `iter_tensors` reads ahead of who takes tensors."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Several]:
    """The second one has less room."""
    with several(1) as cluster:
        cluster.add("--capacity", str(ROOM))
        yield cluster


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    opened = len(os.listdir("/proc/self/fd"))
    yield
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-")]
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.fixture
def paths(nodes: Several, request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """A checkpoint that the first node holds, and where the second one has it."""
    name = f"{request.node.originalname}.safetensors"
    path, here = (node.mount / "models" / name for node in nodes.nodes)
    holes.write(path, COUNT, [SIZE])
    wait_until(here.exists, "the other node knows it")
    yield [path, here]
    path.unlink()
    wait_until(lambda: used_bytes(nodes.nodes[1]) < SIZE, "nobody has it there any more")


def used_bytes(node: Node) -> int:
    return int(node.status()["store"]["used_bytes"])


def assert_whole(tensors: Iterable[tuple[str, "torch.Tensor"]]) -> None:
    """Each is handed over, and dropped."""
    found = {name: tensor[0].item() for name, tensor in tensors}
    assert found == {f"t{n:02d}": n for n in range(COUNT)}


def test_what_finds_no_room_here_is_said_and_comes_when_there_is_some(
    nodes: Several, paths: list[Path]
) -> None:
    _, here = paths
    own = nodes.nodes[1].mount / "models" / "own"
    with own.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM * 3 // 5)
    for load in (gds.load_file, gds.load_model, lambda path: list(gds.iter_tensors(path))):
        with pytest.raises(NoSpace, match=r"\.safetensors"):
            load(here)
    assert not list(nodes.nodes[1].store.glob("data/arriving/*"))
    own.unlink()

    def is_loaded() -> bool:
        try:
            assert_whole(gds.load_file(here).items())
        except NoSpace:
            return False
        return True

    wait_until(is_loaded, "it is loaded once there is room")


def test_what_another_node_replaces_while_it_is_loaded_comes_as_it_was(paths: list[Path]) -> None:
    path, here = paths
    tensors = gds.iter_tensors(here)
    begun = next(tensors)
    new = {"new": meant("U8", (MIB,), 1)}
    write(path.with_name("draft"), new)
    os.replace(path.with_name("draft"), path)
    assert_whole(itertools.chain([begun], tensors))
    assert_same(gds.load_file(here), new)


def test_what_another_node_cuts_short_while_it_is_loaded_is_no_mixture(paths: list[Path]) -> None:
    """What came here is a copy, which stays what it was, or the load says what became of it."""
    path, here = paths
    tensors = gds.iter_tensors(here)
    begun = next(tensors)
    os.truncate(path, MIB)
    try:
        assert_whole(itertools.chain([begun], tensors))
    except (Conflict, Corrupt) as error:
        assert here.name in str(error)
    with pytest.raises(Corrupt, match=here.name):
        gds.load_file(here)


def test_blocks_of_another_node_are_hits_and_misses_once_it_died(nodes: Several) -> None:
    """Those that were read here before stay."""
    a, b = nodes.nodes
    content = {f"/cache/blocks/{n}": bytes([n]) * MIB for n in range(8)}
    keys = list(content)
    with kvfs.Client(a.store) as there, kvfs.Client(b.store) as here:
        assert all(each.ok for each in gds.write_blocks(keys, list(content.values()), client=there))
        wait_until(lambda: all(here.exists(keys)), "the other node knows them")
        buffer = bytearray(4 * MIB)
        assert gds.read_blocks(keys[:4], buffer, client=here) == [Block(Outcome.HIT, MIB)] * 4
        assert buffer == b"".join(content[key] for key in keys[:4])
        own = gds.write_blocks(["/cache/blocks/own"], b"own", client=here)
        assert own == [Block(Outcome.STORED, 3)]
    a.kill()
    with kvfs.Client(b.store) as here:

        def outcomes() -> list[Outcome]:
            found = gds.read_blocks([*keys, "/cache/blocks/own"], bytearray(9 * MIB), client=here)
            return [each.outcome for each in found]

        first = outcomes()
        assert first[:4] + first[8:] == [Outcome.HIT] * 5
        assert set(first[4:8]) <= {Outcome.MISS, Outcome.UNAVAILABLE}
        wait_until(lambda: outcomes()[4:8] == [Outcome.MISS] * 4, "what died is a miss")
    a.up()
