"""vLLM's load format `kvfs` in vLLM's own code, on a mount: one rank, and two that share a host."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clients import environments, examples
from tests.integration.harness import ROOT, Node, best_mode

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install what it drives


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    node = Node.make(mode=best_mode())
    try:
        yield node.up().mount / "models"
    finally:
        node.remove()


def start(home: Path, *arguments: object) -> "subprocess.Popen[str]":
    """The example, by the project's own interpreter, in which the plugin is found."""
    interpreter, sources = environments.vllm()
    env = examples.environ(
        home,
        ROOT,
        sources,
        environments.packages(interpreter),
        environments.packages(environments.lmcache()),
        VLLM_NO_USAGE_STATS=1,
        PYTHONWARNINGS="ignore",
    )
    return examples.start(sys.executable, "vllm_example.py", *arguments, env=env)


def finish(*running: "subprocess.Popen[str]") -> None:
    for printed in examples.finish(*running):
        assert "the model has its weights" in printed


def test_the_plugin_is_found_and_the_model_gets_its_weights(mount: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, mount / "alone"))


def test_two_ranks_get_the_same(mount: Path, tmp_path: Path) -> None:
    how = ("--ranks", 2, "--meet", tmp_path / "meet", "--rank")
    finish(*(start(tmp_path, mount / "shared", *how, rank) for rank in range(2)))
