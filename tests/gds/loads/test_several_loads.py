"""Loads of checkpoints that other hosts hold: whole, all shards at once, or one clear error."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.base.errors import Corrupt, Unavailable
from tests.cluster.cluster import Cluster
from tests.cluster.network import why_not
from tests.cluster.waiting import wait_until
from tests.contract.redis_servers import program
from tests.gds.checkpoints import llama, meant, write_shards
from tests.integration.harness import base_directory

MIB = 1 << 20
LARGE = 80 * MIB
"""More than a file that is brought whole when it is opened."""
SLOW_MBIT_S = 400
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if lacking := why_not():
        pytest.skip(lacking)
    program("redis-server")
    root = Path(tempfile.mkdtemp(prefix="kvfs-cluster-", dir=base_directory())).resolve()
    root.chmod(0o755)
    try:
        with Cluster(root, 2) as made:
            yield made
    finally:
        shutil.rmtree(root, ignore_errors=True)


def arriving(cluster: Cluster) -> int:
    """Files of which the second host has a part."""
    found = (cluster[2].store / "data" / "arriving").glob("*")
    return sum(path.stat().st_blocks > 0 for path in found)


def test_a_checkpoint_of_another_host_is_loaded_byte_for_byte(cluster: Cluster) -> None:
    import torch

    import gds

    shards = [llama(2, 256), llama(2, 256, first=2), {"large": meant("U8", (LARGE,), 1)}]
    home = cluster[1].mount / "models" / "llama"
    home.mkdir()
    write_shards(home, shards)
    here = cluster[2].mount / "models" / "llama"
    halves = [gds.load_model(here, rank=rank, world_size=2) for rank in range(2)]
    found = gds.load_model(here)
    for shard in shards:
        for name, each in shard.items():
            assert bytes(found[name].view(-1).view(torch.uint8).numpy()) == each.data, name
    norm, rows = "model.layers.0.input_layernorm.weight", "model.layers.3.self_attn.q_proj.weight"
    joined = torch.cat([half[rows] for half in halves])
    # As numbers: random bits are some NaNs, which are equal to nothing.
    assert torch.equal(halves[0][norm].view(torch.int16), found[norm].view(torch.int16))
    assert torch.equal(joined.view(torch.int16), found[rows].view(torch.int16))


def test_shards_come_at_the_same_time(cluster: Cluster) -> None:
    """On a link on which one of them takes seconds, all have begun before one is whole."""
    import gds

    home = cluster[1].mount / "models" / "slow"
    home.mkdir()
    write_shards(home, [{f"t{n}": meant("U8", (LARGE,), n)} for n in range(3)])
    cluster.network.limit("1", SLOW_MBIT_S)
    loaded: list[int] = []
    thread = threading.Thread(
        target=lambda: loaded.append(len(gds.load_model(cluster[2].mount / "models" / "slow")))
    )
    try:
        thread.start()
        wait_until(lambda: arriving(cluster) == 3, "all shards are on their way")
    finally:
        cluster.network.limit("1", 0)
        thread.join()
    assert loaded == [3]


def test_a_host_that_dies_in_the_middle_is_one_error_and_nothing_is_left(
    cluster: Cluster,
) -> None:
    import gds

    home = cluster[1].mount / "models" / "lost"
    home.mkdir()
    write_shards(home, [{f"t{n}": meant("U8", (LARGE,), n)} for n in range(2)])
    here = cluster[2].mount / "models" / "lost"
    wait_until(here.is_dir, "the second host knows it")
    open_before = len(os.listdir("/proc/self/fd"))
    errors: list[BaseException] = []

    def load() -> None:
        try:
            gds.load_model(here)
        except BaseException as error:
            errors.append(error)

    cluster.network.limit("1", SLOW_MBIT_S)
    thread = threading.Thread(target=load)
    try:
        thread.start()
        wait_until(lambda: arriving(cluster) == 2, "both shards are on their way")
        cluster[1].kill()
    finally:
        cluster.network.limit("1", 0)
        thread.join()
    (error,) = errors
    assert isinstance(error, Unavailable | Corrupt), repr(error)
    assert "model-0000" in str(error)
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-")]
    assert len(os.listdir("/proc/self/fd")) == open_before
    cluster[1].up()
    wait_until(lambda: _loads(here), "it is loaded once the host is back")


def _loads(path: Path) -> bool:
    import gds

    try:
        return len(gds.load_model(path)) == 2
    except Unavailable:
        return False
