"""Real programs on `kvfs://`, beside a mount that shows what they write."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clients import environments, examples
from tests.integration.harness import ROOT, Node, best_mode

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install what it drives


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node.make(mode=best_mode())
    try:
        yield node.up()
    finally:
        node.remove()


def run(node: Node, tmp_path: Path, script: str, where: str, *interpreters: Path) -> str:
    """By the project's own interpreter, which knows the protocol, with the packages of the
    others."""
    places = (ROOT, *map(environments.packages, interpreters))
    env = examples.environ(tmp_path, *places, HF_HOME=tmp_path, TMPDIR=tmp_path)
    return examples.run(sys.executable, script, where, "--store", node.store, env=env)


def test_pandas_pyarrow_and_datasets(node: Node, tmp_path: Path) -> None:
    output = run(node, tmp_path, "fsspec_example.py", "kvfs://models/tables", environments.fsspec())
    assert output.count("everything came back") == 3
    assert (node.mount / "models" / "tables" / "a.parquet").read_bytes()[:4] == b"PAR1"


def test_checkpoints_of_torch(node: Node, tmp_path: Path) -> None:
    both = environments.fsspec(), environments.lmcache()
    output = run(node, tmp_path, "fsspec_torch.py", "kvfs://models/checkpoint", *both)
    assert "every tensor came back" in output
    assert (node.mount / "models" / "checkpoint" / ".metadata").stat().st_size > 0
