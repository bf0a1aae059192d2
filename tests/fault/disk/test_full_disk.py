"""The disk beneath the store is filled up by somebody else."""

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from kvfs.admin.fsck import Fsck
from kvfs.base.errors import KvfsError, NoSpace
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine
from s3api.auth.key_holders import ADMINISTRATOR
from tests.cluster.waiting import wait_until
from tests.contract.small_node import SmallNode, small_node
from tests.fault.disks import Disk, disk, fill
from tests.integration.harness import ROOT, Node, best_mode, kvfs
from tests.integration.s3 import S3, users_of
from tests.integration.s3api.server.test_s3_serving import fetch
from tests.integration.several import several

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path, "ext4", 128 * MIB) as made:
        yield made


def problems(node: SmallNode) -> list[str]:
    fsck = Fsck(node.engine, node.files, node.index, checksums=True)
    return [str(problem) for problem in fsck.check()]


def test_cache_files_give_way_and_writing_goes_on(small_disk: Disk) -> None:
    with small_node(small_disk.mountpoint / "store") as node:
        cache, models = node.namespace("cache"), node.namespace("models", kind="durable")
        node.write(models, "kept", b"kept")
        for number in range(32):
            node.write(cache, f"cold{number}", bytes(MIB))
        node.index.flush()
        fill(small_disk.mountpoint)

        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.evictor.run)
                with trio.fail_after(60):
                    await node.evictor.make_room(models)
                    node.write(models, "new", bytes(MIB))
                nursery.cancel_scope.cancel()

        trio.run(main)
        assert node.evictor.counters["evicted_files_store_full"] > 0
        assert node.names(models) == {"kept", "new"}
        assert problems(node) == []


def test_without_a_cache_the_error_is_clear_and_nothing_is_lost(small_disk: Disk) -> None:
    with small_node(small_disk.mountpoint / "store") as node:
        models = node.namespace("models", kind="durable")
        node.write(models, "kept", b"kept" * 1000)
        trio.run(node.sealer.settle)
        foreign = fill(small_disk.mountpoint)

        async def refused() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.evictor.run)
                with trio.fail_after(60), pytest.raises(NoSpace, match="free its disk"):
                    await node.evictor.make_room(models)
                nursery.cancel_scope.cancel()

        trio.run(refused)
        foreign.unlink()
        trio.run(node.evictor.sample)
        node.write(models, "new", bytes(MIB))
        assert node.names(models) == {"kept", "new"}
        assert problems(node) == []


def test_a_seal_that_meets_a_full_disk_is_tried_again(small_disk: Disk) -> None:
    with small_node(small_disk.mountpoint / "store") as node:
        models = node.namespace("models", kind="durable")
        ino = node.write(models, "kept", os.urandom(MIB))
        foreign = fill(small_disk.mountpoint)
        try:
            trio.run(node.sealer.settle)
        except KvfsError as error:
            assert isinstance(error, NoSpace)
        foreign.unlink()
        trio.run(node.sealer.settle)
        inode = node.record(ino)
        assert inode is not None
        assert inode.checksum
        assert problems(node) == []


_START = """
import sys, trio
from pathlib import Path
from kvfs.base.config import Config
from kvfs.base.errors import NoSpace
from kvfs.node import open_node

async def main():
    try:
        async with open_node(Config(store=Path(sys.argv[1]))):
            print("started")
    except NoSpace as error:
        print(error)

trio.run(main)
"""


def test_a_start_on_a_full_disk_lives_on_the_reserve(small_disk: Disk) -> None:
    """Also where a file that is mapped would have to grow: the system kills who writes there."""
    store = small_disk.mountpoint / "store"

    def start() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _START, str(store)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)

    assert start().stdout == "started\n"
    (store / "run" / "known").unlink()  # as in a store of before it was
    foreign = fill(small_disk.mountpoint)
    assert start().stdout == "started\n"
    (store / "meta" / "reserve").unlink()
    (store / "run" / "known").unlink()
    fill(small_disk.mountpoint)
    refused = start()
    assert "is full: free some space" in refused.stdout
    assert refused.returncode == 0
    foreign.unlink()
    assert start().stdout == "started\n"


@contextlib.contextmanager
def mounted(
    made: Disk, *flags: str, s3: tuple[str, ...] = ("--s3", "127.0.0.1:0", "--s3-workers", "1")
) -> Iterator[Node]:
    home = made.mountpoint / "home"
    home.mkdir()
    flags = (*flags, *s3, "--scrub-rate", "0")
    node = Node(best_mode(), home, flags)
    node.mount.mkdir()
    try:
        yield node.up()
    finally:
        print(node.log[-3000:])
        if node.pid is not None:
            node.down()


def until_refused(step: Callable[[int], object]) -> None:
    """Repeat it until there is no space for it."""
    for number in range(100_000):
        try:
            step(number)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return
    pytest.fail("a full disk took it all")


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_full_disk_is_emptied_through_every_door(tmp_path: Path, kind: str) -> None:
    size = {"ext4": 128 * MIB, "xfs": 512 * MIB}[kind]
    with disk(tmp_path, kind, size) as made, mounted(made) as node:
        models = node.mount / "models"
        for number in range(300):
            (models / f"{number}").write_bytes(bytes(4096))
        with users_of(node) as users:
            s3 = S3(node, {ADMINISTRATOR: users.find(ADMINISTRATOR)}).client("admin")
        fill(made.mountpoint)
        until_refused(lambda number: (models / f"d{number}").mkdir())
        until_refused(lambda number: (models / "0").chmod(0o600 + number % 2))
        assert node.status()["engine"]["reserve_left"] < 1
        assert "DISK IS FULL" in kvfs("status", "--store", str(node.store)).stdout
        for number in range(100):
            (models / f"{number}").unlink()
            s3.delete_object(Bucket="models", Key=f"{number + 100}")
            if number % 10 == 0:
                fill(made.mountpoint)  # what came free is taken at once
        node.down()
        fill(made.mountpoint)
        node.up()
        for number in range(200, 300):
            (models / f"{number}").unlink()
        (made.mountpoint / "foreign").unlink()
        (models / "new").write_bytes(bytes(MIB))
        assert node.status()["engine"]["reserve_left"] == 1
        node.down()
        done = kvfs("fsck", "--store", str(node.store))
        assert done.returncode == 0, done.stdout
        node.up()
        assert (models / "new").read_bytes() == bytes(MIB)
        assert "10" not in os.listdir(models)
        assert "Logging error" not in node.log


_WRITE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from kvfs.meta.lmdb.embedded_engine import EmbeddedEngine

engine = EmbeddedEngine(sys.argv[2], boot=1)
def put(t, start):
    for n in range(start, start + 500):
        t.put(b"%06d" % n, bytes(300))
for start in range(0, 20_000, 500):
    engine.transact_now(lambda t: put(t, start))
engine.rotate_now()
engine.transact_now(lambda t: t.put(b"last", b"1"))
engine.sync_now()
os._exit(0)
"""


def test_metadata_are_rebuilt_on_a_full_disk(small_disk: Disk) -> None:
    """The machine went down: what is rebuilt takes the room of what it replaces."""
    path = small_disk.mountpoint / "meta"
    command = [sys.executable, "-c", _WRITE, str(ROOT), str(path)]
    subprocess.run(command, check=True, timeout=60)
    fill(small_disk.mountpoint)
    engine = EmbeddedEngine(path, boot=2)
    assert engine.rebuilt
    keys = engine.read_now(lambda t: sum(1 for _ in t.scan(b"0", b"m")))
    assert keys == 20_001
    assert engine.transact_now(lambda t: t.delete(b"last"))
    engine.close()


def test_a_large_commit_that_finds_half_its_space_uses_the_reserve(small_disk: Disk) -> None:
    """LMDB calls that an I/O error."""
    path = small_disk.mountpoint / "meta"
    engine = EmbeddedEngine(path, boot=1)
    engine.node = b"1"  # a mirror refuses nothing before the space has gone
    engine.transact_now(lambda t: t.put(b"first", b"1"))
    foreign = fill(small_disk.mountpoint)

    def put(number: int) -> None:
        values = [(b"%d %d" % (number, place), bytes(60_000)) for place in range(4)]
        engine.transact_now(lambda t: [t.put(*each) for each in values])

    with pytest.raises(NoSpace):
        for number in range(1000):
            put(number)
    assert (path / "reserve").stat().st_size == 0
    foreign.unlink()
    put(1000)
    engine.close()


def test_a_node_of_a_cluster_reads_on_with_a_full_disk(small_disk: Disk) -> None:
    """What others commit goes on coming into its mirror: look-ups in a strict namespace wait for
    that."""
    with several(1) as cluster, mounted(small_disk, *cluster.flags("full"), s3=()) as node:
        (other,) = cluster.nodes
        strict = ("namespace", "set", "models", "--coherence", "strict")
        assert kvfs(*strict, "--store", str(node.store)).returncode == 0
        mine, theirs = node.mount / "models", other.mount / "models"
        for number in range(10):
            (mine / f"{number}").write_bytes(b"x" * number)
        fill(small_disk.mountpoint)
        for number in range(200):
            (theirs / f"new{number}").write_bytes(b"x")
        assert len(os.listdir(mine)) == 210
        for number in range(10):
            assert (mine / f"{number}").read_bytes() == b"x" * number
            (mine / f"{number}").unlink()
            (mine / f"new{number}").unlink()
        assert len(os.listdir(theirs)) == 190


def refuses(directory: Path) -> bool:
    try:
        os.listdir(directory)
    except OSError as error:
        return error.errno == errno.EIO
    return False


def test_a_mirror_whose_reserve_is_used_up_says_so_and_goes_on_with_space(small_disk: Disk) -> None:
    with (
        several(1) as cluster,
        mounted(small_disk, *cluster.flags("full"), *("--admin", "127.0.0.1:0"), s3=()) as node,
    ):
        (other,) = cluster.nodes
        strict = ("namespace", "set", "models", "--coherence", "strict")
        assert kvfs(*strict, "--store", str(node.store)).returncode == 0
        ready = f"{node.status()['admin']['endpoint']}/health/ready"
        (other.mount / "models" / "before").write_bytes(b"x")
        assert os.listdir(node.mount / "models") == ["before"]
        assert fetch(ready)[0] == 200
        foreign = fill(small_disk.mountpoint)
        for number in range(1000):
            for name in range(20):
                file = other.mount / "models" / f"{number}-{name}"
                file.touch()
                os.setxattr(file, "user.large", os.urandom(60_000))
            # One refusal alone may be made good by the reserve.
            if refuses(node.mount / "models") and node.status()["engine"]["mirror_refusal"]:
                break
        status, text = fetch(ready)
        assert status == 503
        assert "no space for the metadata" in text
        shown = kvfs("status", "--store", str(node.store)).stdout
        assert "CANNOT TAKE what other nodes commit" in shown
        foreign.unlink()
        wait_until(lambda: fetch(ready)[0] == 200, "it has taken what was committed", 60)
        assert set(os.listdir(node.mount / "models")) == set(os.listdir(other.mount / "models"))
