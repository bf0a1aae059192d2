"""`kvfs rebuild`, as who has lost the metadata of a store sees it."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.waiting import wait_until
from tests.integration.conftest import start
from tests.integration.harness import CannotStart, Node, best_mode, kvfs


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node.make(best_mode())
    yield made
    made.remove()


def test_a_store_whose_metadata_were_lost_has_its_files_again(node: Node) -> None:
    start(node)
    deep = node.mount / "models" / "org" / "model"
    deep.mkdir(parents=True)
    content = os.urandom(5 << 20)
    (deep / "weights").write_bytes(content)
    (node.mount / "cache" / "block").write_bytes(b"block" * 1000)
    os.setxattr(deep / "weights", "user.note", b"kept")
    before = (deep / "weights").stat()
    wait_until(lambda: node.status()["counters"]["sealed_files"] >= 2, "both are sealed", 120)
    node.down()
    shutil.rmtree(node.store / "meta")
    with pytest.raises(CannotStart, match="kvfs rebuild"):
        node.up()
    done = kvfs("rebuild", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 files"), done.stdout
    node.up()
    after = (deep / "weights").stat()
    assert (deep / "weights").read_bytes() == content
    assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_mode,
    )
    assert os.getxattr(deep / "weights", "user.note") == b"kept"
    assert (node.mount / "cache" / "block").read_bytes() == b"block" * 1000
    (deep / "new").write_bytes(b"new")
    node.down()
    done = kvfs("fsck", "--checksums", "--store", str(node.store))
    assert (done.returncode, done.stdout) == (0, "the store is whole\n")
    again = kvfs("rebuild", "--store", str(node.store))
    assert again.returncode != 0
    assert "are there" in again.stderr
