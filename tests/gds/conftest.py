"""torch for these tests: from the environment that the real clients have anyway, behind all that
the project's own has, so that nothing else is taken from there. And a mount, and where to write."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clients.environments import lmcache
from tests.integration.harness import Node, best_mode


@pytest.fixture(scope="session", autouse=True)
def _torch() -> None:
    """torch and safetensors can be imported from here on."""
    interpreter = lmcache()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    sys.path.append(str(interpreter.parent.parent / "lib" / version / "site-packages"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch  # noqa: F401


@pytest.fixture(scope="module")
def mount() -> Iterator[Path]:
    """A namespace on a real mount."""
    node = Node.make(mode=best_mode())
    try:
        node.up()
        yield node.mount / "models"
    finally:
        node.remove()


@pytest.fixture(params=["mount", "plain"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "plain":
        return tmp_path
    directory: Path = request.getfixturevalue("mount") / request.node.name.replace("/", "_")
    directory.mkdir()
    return directory
