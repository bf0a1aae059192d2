"""Other loaders of safetensors files, and NIXL, on a mount."""

import sys
from pathlib import Path

import pytest

from tests.integration.clients import environments, examples
from tests.integration.conftest import Place
from tests.integration.harness import ROOT

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install what it drives


def run(script: str, directory: Path, home: Path) -> str:
    places = map(environments.packages, (environments.readers(), environments.lmcache()))
    env = examples.environ(home, ROOT, *places, PYTHONWARNINGS="ignore")
    return examples.run(sys.executable, script, directory, env=env)


def test_each_reader_gets_every_tensor(here: Path, tmp_path: Path) -> None:
    assert run("readers.py", here, tmp_path).count("bit for bit") == 4


def test_nixl_writes_and_reads_blocks(here: Path, place: Place, tmp_path: Path) -> None:
    store = place.node.store if place.node else None
    assert f"8 blocks came back, by the mount and from {store}" in run(
        "nixl_example.py", here, tmp_path
    )
