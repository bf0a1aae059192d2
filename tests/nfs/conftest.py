"""A node that serves NFS, for the tests of that door."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nfs import ganesha
from tests.nfs.door import Door

_numbers = itertools.count()


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """Namespaces `open` (exported to this host, nobody squashed, so not by version 3), `shared`
    (everybody may write there, root is squashed), `squashed`, `readonly`, and `hidden`, which is
    not exported."""
    if lacking := ganesha.why_not():
        pytest.skip(lacking)
    with Door.make("--nfs-v3") as made:
        made.exported("open", "--squash", "none")
        made.exported("shared", mode=0o777)
        made.exported("squashed")
        made.exported("readonly", "--squash", "none", "--read-only")
        (made.node.mount / "hidden").mkdir()
        yield made


@pytest.fixture(scope="session")
def plain_door() -> Iterator[Door]:
    """Of all tests that change no export but their own: `shared`, `cache` (8 MiB, evicts) and
    `small` (4 MiB), for everybody on this host, root squashed."""
    if lacking := ganesha.why_not():
        pytest.skip(lacking)
    with Door.make("--nfs-v3") as made:
        for name in ("shared", "cache", "small"):
            made.exported(name, mode=0o777)
        made.kvfs("namespace", "set", "cache", "--capacity", "8MiB")
        made.kvfs("namespace", "set", "small", "--capacity", "4MiB")
        yield made


@pytest.fixture
def home(plain_door: Door) -> Path:
    """An empty directory for everybody."""
    path = plain_door.node.mount / "shared" / f"home{next(_numbers)}"
    path.mkdir()
    path.chmod(0o777)
    return path
