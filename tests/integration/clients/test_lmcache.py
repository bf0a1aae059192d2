"""The real LMCache and real safetensors checkpoints against the mount.

They need torch, so they live in a virtual environment of their own, see environments.py. LMCache on
the S3 API: test_s3_clients.py.
"""

import hashlib
from pathlib import Path

import pytest

from tests.integration.clients import examples
from tests.integration.clients.environments import lmcache
from tests.integration.harness import ROOT, kvfs
from tests.integration.several import several

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the environment."""
    return lmcache()


def environ() -> dict[str, str]:
    return examples.environ(ROOT / ".venv-lmcache", LMCACHE_TRACK_USAGE="false")


def run(python: Path, script: str, *arguments: object) -> str:
    return examples.run(python, script, *arguments, env=environ())


@pytest.mark.parametrize("how", [[], ["--direct"]], ids=["buffered", "direct"])
def test_store_look_up_and_load(here: Path, python: Path, how: list[str]) -> None:
    output = run(python, "lmcache_example.py", here / "lmcache", *how)
    assert "connector and L2 adapter got every byte back" in output
    blocks = list((here / "lmcache").rglob("*.data"))
    assert len(blocks) == 7 + 8  # one of the connector's was removed
    assert {b.stat().st_size - 4 * (1 << 20) for b in blocks} <= {0, 28}
    assert not list((here / "lmcache").rglob("*.tmp"))


def test_processes_that_race_for_one_temporary_name(here: Path, python: Path) -> None:
    rounds = 10
    directories = [here / "buffered", here / "direct"]
    for directory in directories:
        directory.mkdir()
    examples.finish(
        *(examples.start(python, "lmcache_race.py", here, rounds, env=environ()) for _ in range(2))
    )
    for directory in directories:
        blocks = sorted(directory.glob("*.data"))
        assert len(blocks) == rounds
        assert len({hashlib.sha256(b.read_bytes()).digest() for b in blocks}) == 1
        assert blocks[0].stat().st_size == 4 << 20


def test_a_safetensors_checkpoint(here: Path, python: Path) -> None:
    assert "agree" in run(python, "checkpoint.py", here)


@pytest.mark.parametrize("coherence", ["cache", "peer"])
def test_what_one_host_stores_another_one_loads(python: Path, coherence: str) -> None:
    with several(2) as cluster:
        first = ("--store", str(cluster.nodes[0].store))
        done = kvfs("namespace", "set", "cache", "--coherence", coherence, *first)
        assert done.returncode == 0, done.stderr
        one, other = (node.mount / "cache" / "lmcache" for node in cluster.nodes)
        output = run(python, "lmcache_two_hosts.py", one, other)
    assert "came whole to the other" in output
