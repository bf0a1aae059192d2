"""Mounts for the tests: one real daemon per mode and session, or a plain directory.

`KVFS_TEST_DIR=/some/dir` runs every test that describes a POSIX filesystem against that directory:
what fails there is wrong in the test. `KVFS_TEST_MODES=relay,libfuse` picks modes. A mode that this
machine cannot do is skipped, with the reason that `kvfs doctor` gives.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.fuse.channel.mode_probe import probe_modes
from tests.integration.harness import MODES, CannotStart, Node
from tests.integration.s3 import bucket, either_bucket, s3

__all__ = ["bucket", "either_bucket", "s3"]  # fixtures

NATIVE = os.environ.get("KVFS_TEST_DIR")


def pytest_configure(config: pytest.Config) -> None:
    # Tests fork on purpose; their children only make system calls and end with _exit.
    ignored = "ignore:This process .* is multi-threaded:DeprecationWarning"
    config.addinivalue_line("filterwarnings", ignored)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        chosen = os.environ.get("KVFS_TEST_MODES", ",".join(MODES)).split(",")
        metafunc.parametrize(
            "mode", ["native"] if NATIVE else chosen, scope="session", indirect=True
        )


@pytest.fixture(scope="session")
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True)
class Place:
    """A directory to test in, and what is beneath it."""

    mode: str
    root: Path
    node: Node | None

    @property
    def is_bare(self) -> bool:
        """Whether only libfuse stands behind it, which lacks some operations."""
        return self.mode == "libfuse"


def why_not(node: Node) -> str:
    """Why this machine cannot mount in the node's mode; empty when it can."""
    for found in probe_modes(str(node.home)):
        if found.name == node.mode and not found.available:
            return f"{node.mode}: {found.reason}; {found.remedy}"
    return ""


def start(node: Node) -> Node:
    lacking = why_not(node)
    if lacking:
        node.remove()
        pytest.skip(lacking)
    try:
        return node.up()
    except CannotStart as error:
        log = node.log
        node.remove()
        pytest.fail(f"kvfs up ({node.mode}) ended with {error.code}: {error}\n{log}", pytrace=False)


class Places:
    """By their modes. Each is made where it is first asked for, and kept for the session: the tests
    of a file have one mode after the other, and those of the next file begin anew."""

    def __init__(self) -> None:
        self._made: dict[str, Place] = {}
        self._closing = contextlib.ExitStack()

    def find(self, mode: str) -> Place:
        if mode not in self._made:
            self._made[mode] = self._native() if NATIVE else self._mounted(mode)
        return self._made[mode]

    def remove(self) -> None:
        self._closing.close()

    def _native(self) -> Place:
        root = Path(tempfile.mkdtemp(prefix="native-", dir=NATIVE))
        self._closing.callback(shutil.rmtree, root)
        root.chmod(0o755)
        return Place("native", root, None)

    def _mounted(self, mode: str) -> Place:
        node = start(Node.make(mode))
        self._closing.callback(node.remove)
        root = node.mount / "suite"
        root.mkdir()
        return Place(mode, root, node)


@pytest.fixture(scope="session")
def places() -> Iterator[Places]:
    made = Places()
    yield made
    made.remove()


@pytest.fixture(scope="session")
def place(mode: str, places: Places) -> Place:
    return places.find(mode)


@pytest.fixture
def here(place: Place) -> Iterator[Path]:
    """A fresh directory on the mount, mode 0755."""
    mask = os.umask(0o022)
    home = Path(tempfile.mkdtemp(prefix="t", dir=place.root))
    home.chmod(0o755)
    try:
        yield home
    finally:
        os.umask(mask)
        shutil.rmtree(home)


@pytest.fixture
def new_node(mode: str) -> Iterator[Callable[..., Node]]:
    """Starts a node of the test's own: for kills, restarts and limits."""
    if NATIVE:
        pytest.skip("a plain directory has no daemon")
    nodes: list[Node] = []

    def make(*flags: str) -> Node:
        node = Node.make(mode, *flags)
        nodes.append(node)
        return start(node)

    yield make
    for node in nodes:
        print(node.log[-5000:])  # shown where the test failed
        node.remove()
