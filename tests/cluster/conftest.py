"""Clusters for tests: skipped, saying why, where this machine cannot have network namespaces."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.bare_directory import open_to_writers
from tests.cluster.network import why_not
from tests.contract.redis_servers import program
from tests.integration.harness import base_directory


def need_namespaces() -> None:
    """Skips where no cluster can be: namespaces and a server are what it takes."""
    lacking = why_not()
    if lacking:
        pytest.skip(lacking)
    program("redis-server")


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Where a cluster of this module has all that it stores."""
    need_namespaces()
    made = Path(tempfile.mkdtemp(prefix="kvfs-cluster-", dir=base_directory())).resolve()
    made.chmod(0o755)
    yield made
    for mount in made.glob("*/mnt"):
        open_to_writers(mount)
    shutil.rmtree(made, ignore_errors=True)
