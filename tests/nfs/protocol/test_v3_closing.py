"""Version 3 has no close: what is written by it is let go, and is there for all, without one."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG
from tests.integration.several import Several, has, several
from tests.nfs import ganesha
from tests.nfs.door import Door, held_of
from tests.nfs.rpc import AuthSys
from tests.nfs.status import NfsError
from tests.nfs.v3 import Client
from tests.nfs.v3_types import Stability

LACKING = ganesha.why_not()
pytestmark = pytest.mark.skipif(bool(LACKING), reason=LACKING)
FILES = 10_000 if LONG else 300
WRITERS = 4
ALICE = AuthSys(uid=4001, gid=4001)
MIB = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Several]:
    with several(0) as made:
        yield made


@pytest.fixture(scope="module")
def serving(cluster: Several) -> Iterator[Door]:
    """A node with an export that everybody may write to."""
    with Door.of(cluster) as door:
        door.exported("shared", mode=0o777)
        yield door


@pytest.fixture(scope="module")
def another(cluster: Several, serving: Door) -> Path:  # noqa: ARG001
    """The mount of a node that serves no NFS."""
    return cluster.add().mount


def write(client: Client, directory: bytes, name: str, data: bytes, stable: bool) -> None:
    handle = client.create(directory, name).handle
    if stable:
        client.write(handle, 0, data)
    else:
        client.write(handle, 0, data, Stability.UNSTABLE)
        client.commit(handle)


def test_files_are_held_no_longer_and_are_on_other_nodes(serving: Door, another: Path) -> None:
    """A descriptor without a name is one that the node keeps ready for a new file."""
    (serving.node.mount / "shared" / "many").mkdir(mode=0o777)
    (serving.node.mount / "shared" / "many").chmod(0o777)
    root = serving.mounts().mount("/shared").handle
    daemon, server = serving.node.status()["pid"], serving.node.status()["nfs"]["pid"]
    before = held_of(daemon, "/data/"), held_of(server, "/many/f")

    def some(writer: int) -> None:
        client = serving.v3(ALICE)
        directory = client.lookup(root, "many").handle
        for number in range(writer, FILES, WRITERS):
            data = b"%08d" % number
            write(client, directory, f"f{number}", data, number % 2 == 0)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(some, range(WRITERS)))
    written = time.monotonic()
    there = another / "shared" / "many"
    last = [there / f"f{number}" for number in range(FILES - WRITERS, FILES)]

    def is_there() -> bool:
        return all(each.exists() and len(each.read_bytes()) == 8 for each in last)

    wait_until(is_there, "the last files are on the other node")
    print(f"on the other node after {time.monotonic() - written:.2f} s")
    wait_until(
        lambda: held_of(daemon, "/data/") <= before[0] and held_of(server, "/many/f") <= before[1],
        "no file that was written is held open",
    )
    print(f"none of {FILES} files held after {time.monotonic() - written:.2f} s")
    assert len(os.listdir(there)) == FILES
    for number in range(0, FILES, max(1, FILES // 200)):
        assert (there / f"f{number}").read_bytes() == b"%08d" % number


@pytest.mark.parametrize("stable", [True, False])
def test_a_file_is_on_other_nodes_whole_each_time(
    serving: Door, another: Path, stable: bool
) -> None:
    """Also where the other node has read what it was before."""
    client = serving.v3(ALICE)
    root = serving.mounts().mount("/shared").handle
    name = f"again-{stable}"
    path = another / "shared" / name
    handle = client.create(root, name).handle
    for turn in (b"a", b"b", b"c"):
        data = turn * 3000
        if stable:
            client.write(handle, 0, data)
        else:
            client.write(handle, 0, data, Stability.UNSTABLE)
            client.commit(handle)
        wait_until(
            lambda data=data: has(path, data),
            "the other node has what was written last",
        )


def test_a_full_cache_evicts_what_version_3_wrote(serving: Door) -> None:
    (serving.node.mount / "cache").chmod(0o777)
    serving.kvfs("namespace", "set", "cache", "--capacity", "16MiB")
    serving.kvfs("nfs", "export", "cache")
    client = serving.v3(ALICE)
    root = serving.mounts().mount("/cache").handle
    block = os.urandom(MIB)
    for number in range(48):
        write(client, root, f"block{number}", block, number % 2 == 0)
    left = set(os.listdir(serving.node.mount / "cache"))
    assert "block0" not in left
    assert "block47" in left
    with pytest.raises(NfsError, match="NFS3ERR_NOENT"):
        client.lookup(root, "block0")
    handle = client.lookup(root, "block47").handle
    assert client.read(handle, 0, MIB).data == block
