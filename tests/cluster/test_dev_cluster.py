"""`./dev cluster`: each command a process of its own, that finds what the last one left."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.network import Network
from tests.cluster.waiting import wait_until
from tests.integration.harness import ROOT, is_mounted


def cluster(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command, *rest = words
    return subprocess.run(
        [sys.executable, "-m", "tests.cluster", command, "--root", str(root), *rest],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def told(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def up(root: Path) -> Iterator[str]:
    """What `up 2` says."""
    yield told(cluster(root, "up", "2"))
    for host in Cluster(root):
        print(host.log[-5000:])
    cluster(root, "down")


def lines(root: Path) -> dict[str, str]:
    """The lines of `status` by the names of the hosts."""
    return {line.split()[0]: line for line in told(cluster(root, "status")).splitlines()}


def test_each_node_has_a_mount(up: str, root: Path) -> None:
    for number in ("1", "2"):
        assert f"{root}/{number}/mnt" in up
        (root / number / "mnt" / "cache" / f"of-{number}").write_bytes(b"x")
    assert set(lines(root)) == {"engine", "1", "2"}


@pytest.mark.usefixtures("up")
def test_all_mounts_are_of_one_namespace(root: Path) -> None:
    (root / "1" / "mnt" / "cache" / "shared").write_bytes(b"of node 1")
    other = root / "2" / "mnt" / "cache" / "shared"
    wait_until(other.exists, "node 2 sees the file")
    assert other.read_bytes() == b"of node 1"


@pytest.mark.usefixtures("up")
def test_metrics_tell_of_all_nodes(root: Path) -> None:
    page = told(cluster(root, "run", "2", "curl", "-s", f"{Cluster(root)[1].admin}/metrics"))
    for name in ("1", "2"):
        assert f'kvfs_cluster_node_alive{{node="{name}",state="active"}} 1.0' in page
    assert "kvfs_cluster_lease_held 1.0" in page
    assert "kvfs_engine_requests_total" in page


def test_the_commands_that_it_proposes_find_it(up: str, root: Path) -> None:
    proposed = [line for line in up.splitlines() if "./dev cluster" in line]
    assert len(proposed) == 4
    for line in proposed:
        for command in line.split(";"):
            assert f"--root {root}" in command


@pytest.mark.parametrize("form", [("--root", "{}"), ("--root={}",)])
@pytest.mark.usefixtures("up")
def test_root_may_stand_behind_the_host(root: Path, form: tuple[str, ...]) -> None:
    where = [each.format(root) for each in form]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "run", "1", *where, "echo", "--root", "x"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told(done) == "--root x\n"


def test_up_again_changes_nothing(up: str, root: Path) -> None:
    before = lines(root)
    assert told(cluster(root, "up", "2")) == up
    assert lines(root) == before


@pytest.mark.usefixtures("up")
def test_a_killed_node_is_told_and_starts_again(root: Path) -> None:
    (root / "2" / "mnt" / "cache" / "kept").write_bytes(b"kept")
    told(cluster(root, "kill", "2"))
    assert "does not run" in lines(root)["2"]
    told(cluster(root, "start", "2"))
    assert "does not run" not in lines(root)["2"]
    assert (root / "2" / "mnt" / "cache" / "kept").read_bytes() == b"kept"


@pytest.mark.usefixtures("up")
def test_a_killed_engine_is_told_and_starts_again(root: Path) -> None:
    told(cluster(root, "kill", "engine"))
    assert "does not run" in lines(root)["engine"]
    told(cluster(root, "start", "engine"))
    assert "does not run" not in lines(root)["engine"]


def answer_of(root: Path, asked: str, asking: str, timeout_s: int) -> str:
    """What curl on a host hears from another: a status, 000 where nothing comes."""
    url = f"{Cluster(root)[int(asked)].admin}/health/live"
    curl = ("curl", "-s", "-o", os.devnull, "-w", "%{http_code}", "--max-time", str(timeout_s), url)
    return cluster(root, "run", asking, *curl).stdout


@pytest.mark.usefixtures("up")
def test_a_partition_ends_with_heal(root: Path) -> None:
    told(cluster(root, "partition", "2"))
    assert "CUT OFF" in lines(root)["2"]
    assert answer_of(root, "2", "1", 1) == "000"
    assert answer_of(root, "2", "2", 60) == "200"  # itself it reaches
    told(cluster(root, "heal", "2"))
    assert "CUT OFF" not in lines(root)["2"]
    assert answer_of(root, "2", "1", 60) == "200"


@pytest.mark.usefixtures("up")
def test_who_is_not_there_is_told(root: Path) -> None:
    done = cluster(root, "kill", "9")
    assert done.returncode == 1
    assert done.stderr == "cluster: there is no '9'; there are: engine, 1, 2\n"


@pytest.mark.usefixtures("up")
def test_down_leaves_nothing_but_what_was_stored(root: Path) -> None:
    network: Network = Cluster(root).network
    told(cluster(root, "down"))
    assert not network.exists
    assert network.hosts() == []
    assert not is_mounted(root / "1" / "mnt")
    assert (root / "1" / "store").is_dir()
    assert "no cluster runs" in cluster(root, "status").stderr
