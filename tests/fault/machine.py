"""A real node whose store, and the tier that it may have, lie on disks of the test's own: they lose
their power together, and are mounted again in the same boot of this machine."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.fault.disks import NO_LOG_FLUSH, Disk, cut, disk
from tests.integration.harness import Node, best_mode, is_mounted


class Machine:
    """A node and its disks. `tier`: of a second one, where new files of both namespaces go."""

    def __init__(
        self, home: Path, store: Disk, tier: Disk | None, flags: Sequence[str] = ()
    ) -> None:
        flags = (*flags, *(("--tier", f"ssd={tier.mountpoint}/data:64MiB") if tier else ()))
        self.node = Node(best_mode(), home, flags)
        self.disks = [each for each in (store, tier) if each is not None]

    @property
    def models(self) -> Path:
        """The directory of the durable namespace."""
        return self.node.mount / "models"

    @property
    def meta(self) -> Path:
        return self.node.store / "meta"

    def data_files(self) -> Iterator[int]:
        """The inode numbers on the disks, which renames leave alone, of all data files that there
        are, those in quarantine among them."""
        for each in self.disks:
            for path in each.mountpoint.glob("data/*/*"):
                if path.is_file():
                    yield path.stat().st_ino

    def write_back(self) -> None:
        """As the kernel does twice a minute: everything so far is on the disks."""
        for each in self.disks:
            subprocess.run(["sync", "--file-system", each.mountpoint], check=True)

    def lose_power(
        self, flags: Sequence[int] = (), ended: Callable[[], object] = lambda: None
    ) -> None:
        """Nothing that is not on the disks by now ever will be, but for what `flags` says for each;
        then they are mounted again. `ended` returns when nobody uses the mount any more."""
        for each, how in zip(self.disks, flags or [NO_LOG_FLUSH] * len(self.disks), strict=True):
            cut(each.mountpoint, how)
        if self.node.pid is not None:
            self.node.kill()
        ended()
        self.end()
        for each in self.disks:
            each.mount()

    def end(self) -> None:
        """Kill the node, and unmount everything."""
        if self.node.pid is not None:
            self.node.kill()
        if is_mounted(self.node.mount):
            subprocess.run(["umount", "-l", self.node.mount], check=True)
        for each in self.disks:
            if is_mounted(each.mountpoint):
                each.unmount()


@contextlib.contextmanager
def machine(
    directory: Path, kind: str, disks: int = 1, flags: Sequence[str] = ()
) -> Iterator[Machine]:
    """One whose node, of these flags, is not up yet. Skips the test, saying why, where disks cannot
    be had."""
    home = directory / "home"
    (home / "mnt").mkdir(parents=True)
    with contextlib.ExitStack() as closing:
        store = closing.enter_context(disk(directory, kind, mountpoint=home / "store"))
        tier = None
        if disks > 1:
            tier = closing.enter_context(disk(directory / "second", kind))
        made = Machine(home, store, tier, flags)
        try:
            yield made
        finally:
            made.end()
            subprocess.run(["chattr", "-i", home / "mnt"], check=False, capture_output=True)


def write(path: Path, content: bytes) -> None:
    """As a careful program does: what it wrote is acknowledged by fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
