"""Loads of what other nodes hold, which die meanwhile: with another holder the load goes on;
without one it ends with one error that names the file, and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import gds
from kvfs.base.errors import Unavailable
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import root  # noqa: F401  a fixture
from tests.cluster.waiting import wait_until
from tests.gds.checkpoints import assert_same, meant, write_shards
from tests.integration.harness import ROOT

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20
MBIT_S: Final = 100
NO_LONGER_S: Final = 60.0
"""Deadlines are some ten seconds; who hangs has none. Machines are slow."""
SHARDS: Final = [
    {"large": meant("U8", (72 * MIB,), 1), "beside": meant("U8", (MIB,), 2)},
    {"small": meant("U8", (16 * MIB,), 3)},
]
"""One is read as it comes, the other is opened once it is whole."""
WHOLE: Final = {name: each for shard in SHARDS for name, each in shard.items()}


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Cluster]:  # noqa: F811
    with Cluster(root, 3) as made:
        yield made


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """Whole before each test; the loading node's link is slow."""
    for host in running:
        host.up()
    running.network.limit("3", MBIT_S)
    yield running
    running.network.limit("3", 0)


@pytest.fixture
def name(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """Of a checkpoint that only node 1 has, and all know."""
    found = f"models/{request.node.name}"
    (cluster[1].mount / found).mkdir()
    write_shards(cluster[1].mount / found, SHARDS)
    for host in cluster:
        index = host.mount / found / "model.safetensors.index.json"
        wait_until(index.exists, "all know the checkpoint")
    return found


@pytest.fixture
def loading() -> Iterator[ThreadPoolExecutor]:
    opened = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        yield pool
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-")]
    assert len(os.listdir("/proc/self/fd")) == opened


def arriving(cluster: Cluster) -> list[Path]:
    return list(cluster[3].store.glob("data/arriving/*"))


def wait_for_mid_load(cluster: Cluster, load: "Future[Any]") -> None:
    def is_so() -> bool:
        assert not load.done(), "too fast"
        return sum(each.stat().st_blocks for each in arriving(cluster)) * 512 > 8 * MIB

    wait_until(is_so, "some of it has come")


def test_over_a_second_holder_a_load_goes_on(
    cluster: Cluster, name: str, loading: ThreadPoolExecutor
) -> None:
    for path in (cluster[2].mount / name).iterdir():
        path.read_bytes()
    load = loading.submit(gds.load_model, cluster[3].mount / name)
    wait_for_mid_load(cluster, load)
    cluster[1].kill()
    assert_same(load.result(NO_LONGER_S), WHOLE)


def test_without_a_second_holder_it_is_one_error_and_works_once_the_node_is_back(
    cluster: Cluster, name: str, loading: ThreadPoolExecutor
) -> None:
    there = cluster[3].mount / name
    load = loading.submit(gds.load_model, there)
    wait_for_mid_load(cluster, load)
    cluster[1].kill()
    with pytest.raises(Unavailable, match=rf"{there}/model-0000\d-of-00002\.safetensors"):
        load.result(NO_LONGER_S)
    wait_until(lambda: not arriving(cluster), "nothing is left of what came")
    cluster[1].up()
    assert_same(gds.load_model(there), WHOLE)


def test_an_interrupt_of_a_prefetch_waits_for_nothing_that_comes(
    cluster: Cluster, name: str
) -> None:
    """What was asked for comes all the same, on a link that is slow."""
    command = [sys.executable, "-c", "from cli.main import main; main()", "model", "prefetch"]
    with subprocess.Popen(
        [*command, str(cluster[3].mount / name), "--store", str(cluster[3].store)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    ) as process:
        try:
            wait_until(lambda: bool(arriving(cluster)), "it begins to come")
            cluster.network.limit("3", 4)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=NO_LONGER_S)
        finally:
            process.kill()
            cluster.network.limit("3", MBIT_S)
    assert (process.returncode, *map(str.strip, said)) == (130, "", "")
    assert_same(gds.load_model(cluster[3].mount / name), WHOLE)
