"""Nodes on stores that are kept beside the tests: those that were left in order run for the
session, for whoever asks them."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.redis_servers import RedisServer
from tests.golden.stores.make import flags, unpack, user
from tests.integration.conftest import start
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.s3 import S3

VERSION = "0.1.0"
"""Whose stores they are."""


@dataclass
class Running:
    """A node on such a store, and who may ask it over S3."""

    node: Node
    s3: S3
    ids: dict[str, str]
    server: RedisServer | None
    """Its engine; None: of a lone node there is none."""


@contextlib.contextmanager
def running(name: str) -> Iterator[Running]:
    """A node on the store `name` of this folder; `fsck` finds nothing to mend when it has gone."""
    if shutil.which("xz") is None:
        pytest.skip("xz is not installed here: the stores that are kept cannot be unpacked")
    node = Node.make(best_mode())
    with contextlib.ExitStack() as closing:
        closing.callback(node.remove)
        known = unpack(name, node.home)
        server = _engine(node.home / "engine")
        if server is not None:
            closing.callback(server.kill)
        node.flags = flags(server)
        start(node)
        # The first start may have mended records of a file that has other blocks where it lies now.
        node.down()
        start(node)
        closing.callback(lambda: print(node.log[-5000:]))  # shown where a test failed
        s3 = S3(node, {"main": user(known)})
        closing.callback(lambda: [client.close() for client in s3.clients.values()])
        yield Running(node, s3, known["ids"], server)
        node.down()
        done = kvfs("fsck", "--checksums", "--store", str(node.store))
        assert done.returncode == 0, done.stdout + done.stderr


def _engine(directory: Path) -> RedisServer | None:
    return RedisServer(directory) if directory.exists() else None


@pytest.fixture(scope="session")
def lone() -> Iterator[Running]:
    with running(f"{VERSION}-lone-clean") as found:
        yield found


@pytest.fixture(scope="session")
def cluster() -> Iterator[Running]:
    with running(f"{VERSION}-cluster-clean") as found:
        yield found
