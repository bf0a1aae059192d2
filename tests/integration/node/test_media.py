"""Memory and further disks beside the store's own directory, on a real node with its mount."""

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvfs.base import control
from kvfs.client import Client
from kvfs.datastore.kernel.filesystem_probe import filesystem_type
from tests.cluster.waiting import wait_until
from tests.integration.harness import Node, best_mode, kvfs

MIB = 1 << 20
MEMORY = 32 * MIB
LATEST_S = 120.0


@dataclass
class Media:
    """A node with memory and a second disk."""

    node: Node
    ram: Path
    disk: Path

    def status(self) -> Any:
        return control.call(self.node.store / "run" / "control.sock", "status")

    def namespace(self, name: str, *options: str) -> Path:
        done = kvfs("namespace", "create", name, *options, "--store", str(self.node.store))
        assert done.returncode == 0, done.stderr
        return self.node.mount / name

    def places_of(self, path: Path) -> list[Path]:
        """The directories in which the file's data lie."""
        name = f"{path.stat().st_ino:016x}.*"
        return [
            place
            for place in (self.ram, self.disk, self.node.store / "data")
            if list(place.glob(f"???/{name}"))
        ]


@pytest.fixture(scope="module")
def media() -> Iterator[Media]:
    if filesystem_type(Path("/dev/shm")) != "tmpfs" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no memory to lend: /dev/shm is no tmpfs that we may write to")
    ram = Path(tempfile.mkdtemp(prefix="kvfs-test-", dir="/dev/shm"))
    node = Node.make(best_mode())
    disk = node.home / "disk"
    node.flags = ("--tier", f"ram={ram}:{MEMORY}", "--tier", f"ssd={disk}:1TiB")
    try:
        yield Media(node.up(), ram, disk)
    finally:
        print(node.log[-5000:])
        node.remove()
        shutil.rmtree(ram, ignore_errors=True)


def has_left(media: Media, path: Path) -> bool:
    """Whether it is in memory no more."""
    return media.places_of(path) != [media.ram]


def used(media: Media) -> int:
    """Bytes of the memory, as the node counts them."""
    return int(media.status()["tiers"][0]["used_bytes"])


def settled(media: Media, top: Path) -> Path:
    """The namespace, once the node puts its new files where they belong."""

    def in_memory() -> bool:
        probe = top / "probe"
        probe.write_bytes(b"x")
        places = media.places_of(probe)
        probe.unlink()
        return places == [media.ram]

    wait_until(in_memory, "new files are in memory", LATEST_S)
    return top


def test_what_is_used_least_goes_from_memory_to_disk(media: Media, seed: int) -> None:
    top = settled(media, media.namespace("fast", "--kind", "cache", "--media", "ram,ssd"))
    draw = random.Random(seed)
    content: dict[Path, bytes] = {}
    for number in range(64):
        path = top / f"block-{number}"
        content[path] = draw.randbytes(MIB)
        path.write_bytes(content[path])
        if number == 0:
            assert media.places_of(path) == [media.ram]
            mtime_ns = path.stat().st_mtime_ns
    wait_until(lambda: has_left(media, top / "block-0"), "it left the memory", LATEST_S)
    wait_until(lambda: used(media) <= MEMORY, "the memory is within its limit", LATEST_S)
    assert (top / "block-0").stat().st_mtime_ns == mtime_ns
    for path, data in content.items():
        assert path.read_bytes() == data
        assert len(media.places_of(path)) == 1
    with Client(media.node.store) as client:
        assert client.get("/fast/block-0") == content[top / "block-0"]
        client.put("/fast/by-client", b"c")
    assert (top / "by-client").read_bytes() == b"c"
    done = kvfs("rm", "-r", "/fast", "--store", str(media.node.store))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not list(media.ram.glob("???/*")), "the memory is empty", LATEST_S)


def test_a_file_that_somebody_writes_stays_where_it_is(media: Media, seed: int) -> None:
    top = settled(media, media.namespace("held", "--kind", "cache", "--media", "ram,ssd"))
    draw = random.Random(seed)
    with (top / "held").open("w+b", buffering=0) as file:
        file.write(b"before")
        assert media.places_of(top / "held") == [media.ram]
        for number in range(64):
            (top / f"block-{number}").write_bytes(draw.randbytes(MIB))
        wait_until(lambda: has_left(media, top / "block-0"), "it left the memory", LATEST_S)
        assert media.places_of(top / "held") == [media.ram]
        file.write(b" after")
    assert (top / "held").read_bytes() == b"before after"


def test_all_is_there_after_a_kill(media: Media, seed: int) -> None:
    top = settled(media, media.namespace("killed", "--kind", "cache", "--media", "ram,ssd"))
    draw = random.Random(seed)
    content = {top / f"block-{number}": draw.randbytes(MIB) for number in range(48)}
    for path, data in content.items():
        path.write_bytes(data)
    media.node.kill()
    media.node.up()
    for path, data in content.items():
        assert path.read_bytes() == data
    (top / "block-0").write_bytes(b"written again")
    assert (top / "block-0").read_bytes() == b"written again"


def test_the_status_shows_them(media: Media) -> None:
    done = kvfs("status", "--store", str(media.node.store))
    assert done.returncode == 0, done.stderr
    assert f"ram     {media.ram}, " in done.stdout
    assert f"ssd     {media.disk}, " in done.stdout


def test_a_durable_namespace_is_on_disk(media: Media) -> None:
    top = media.namespace("kept", "--media", "ssd")
    (top / "file").write_bytes(b"x" * MIB)
    (place,) = media.places_of(top / "file")
    assert place != media.ram


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--media", "ram,ssd"], "loses its data in a power cut"),
        (["--kind", "cache", "--media", "ram"], "ram,ssd"),
        (["--media", "shared:flash"], "the node has no shared:flash"),
        (["--media", "tape"], "a medium is"),
    ],
)
def test_what_cannot_be_kept_is_refused(media: Media, options: list[str], message: str) -> None:
    done = kvfs("namespace", "create", "no", *options, "--store", str(media.node.store))
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_a_writer_from_before_a_kill_changes_nothing_in_memory_either(media: Media) -> None:
    top = settled(media, media.namespace("old", "--kind", "cache", "--media", "ram,ssd"))
    path = top / "held"
    path.write_bytes(b"before")
    with path.open("r+b", buffering=0) as file:
        media.node.kill()
        media.node.up()
        assert path.read_bytes() == b"before"
        with contextlib.suppress(OSError):  # relayed: its mount has gone
            os.pwrite(file.fileno(), b"LATE", 0)
        assert path.read_bytes() == b"before"
        assert media.places_of(path) == [media.ram]
        with contextlib.suppress(OSError):
            file.close()
