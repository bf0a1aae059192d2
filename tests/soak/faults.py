"""What may happen to a host in a soak, beside the faults of all campaigns: a full disk, a slow
link.

A host's store lies on a disk of its own, an image that is mounted where the store is to be.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.cluster.cluster import Cluster, Host
from tests.cluster.histories.faults import Fault
from tests.fault.disks import Disk

DISK_BYTES: Final = 3 << 30
_SLOW_MBIT_S: Final = 4.0
"""A block takes half a second; packets wait up to 100 ms."""
_FILLER: Final = "filler"
_LEAST_BYTES: Final = 4096


def why_no_disks() -> str:
    """Why hosts cannot have disks of their own here; empty where they can."""
    if os.getuid() != 0 or not Path("/dev/loop-control").exists():
        return "loop mounts need root and /dev/loop-control"
    return "" if shutil.which("mkfs.ext4") else "mkfs.ext4 is not installed"


@contextlib.contextmanager
def own_disks(root: Path, hosts: Sequence[int]) -> Iterator[None]:
    """Gives each host a disk for its store where that can be had, before the cluster below `root`
    is up; gone afterwards, as the cluster has to be."""
    if why_no_disks():
        yield
        return
    with contextlib.ExitStack() as closing:
        for number in hosts:
            home = root / str(number)
            home.mkdir()
            image = root / f"{number}.image"
            with image.open("wb") as file:
                file.truncate(DISK_BYTES)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
            made = Disk(image, home / "store")
            closing.callback(made.detach)
            made.mount()
            closing.callback(made.unmount)
        yield


def further_faults(cluster: Cluster, host: Host) -> list[Fault]:
    """Returns those of this host; its disk is filled where it has one of its own."""
    alone, network = frozenset([host.number]), cluster.network
    slow = Fault(
        lambda: network.limit(host.name, _SLOW_MBIT_S),
        lambda: network.limit(host.name, 0),
        f"slow down the link of node {host.number}",
        alone,
    )
    if not os.path.ismount(host.store):
        return [slow]
    full = Fault(
        lambda: fill(host.store),
        lambda: (host.store / _FILLER).unlink(),
        f"fill the disk of node {host.number}",
        alone,
        empties=True,
    )
    return [slow, full]


def fill(disk: Path) -> None:
    """Takes all the space that is left, but for less than a block."""
    size, at = DISK_BYTES, 0
    with (disk / _FILLER).open("wb") as file:
        while size >= _LEAST_BYTES:
            try:
                os.posix_fallocate(file.fileno(), at, size)
                at += size
            except OSError:
                size //= 2
