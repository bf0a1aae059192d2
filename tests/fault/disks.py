"""Small disks that can be filled up or lose their power: a loop-mounted image, cut with its
filesystem's shutdown ioctl."""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.waiting import wait_until

_GOING_DOWN: Final = 0x8004587D
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are one number."""
EVERYTHING: Final = 0
LOG_FLUSHED: Final = 1
NO_LOG_FLUSH: Final = 2
"""What still reaches the disk: all that was written; the filesystem's own log; nothing."""
_MIB: Final = 1 << 20
SIZES: Final = {"ext4": 256 * _MIB, "xfs": 512 * _MIB}


class Disk:
    """A filesystem of its own in an image file.

    It keeps its loop device: one that mount takes anew each time may be the last one, still on its
    way out, and every access to it then fails with EIO.
    """

    def __init__(self, image: Path, mountpoint: Path) -> None:
        self.image = image
        self.mountpoint = mountpoint
        command = ["losetup", "--find", "--show", str(image)]
        self._device = subprocess.check_output(command, text=True).strip()

    def mount(self) -> None:
        self.mountpoint.mkdir(exist_ok=True)
        subprocess.run(["mount", self._device, self.mountpoint], check=True)

    def unmount(self) -> None:
        """Returns when the filesystem has ended: who copied the mounts meanwhile (a namespace of
        another test) keeps it, shut down as it may be, and the next mount would be of the same. A
        process that ends may have it open for a moment yet."""
        wait_until(self._leave, f"{self.mountpoint} is nobody's")
        wait_until(self._is_free, f"{self._device} is nobody's")

    def _leave(self) -> bool:
        command = ["umount", str(self.mountpoint)]
        return not subprocess.run(command, check=False, capture_output=True).returncode

    def _is_free(self) -> bool:
        try:
            os.close(os.open(self._device, os.O_RDONLY | os.O_EXCL))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def detach(self) -> None:
        subprocess.run(["losetup", "--detach", self._device], check=True)

    def power_cycle(self) -> None:
        """What the machine does after `cut`: recover the journal, mount again."""
        self.unmount()
        self.mount()


def cut(mountpoint: Path, flags: int = NO_LOG_FLUSH) -> None:
    """From now on nothing reaches the disk, and what had not been flushed never will."""
    fd = os.open(mountpoint, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _GOING_DOWN, struct.pack("I", flags))
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk(
    directory: Path, kind: str, size: int = 0, *, mountpoint: Path | None = None
) -> Iterator[Disk]:
    """A mounted, empty disk, its image in `directory`. Skips the test, saying why, where that
    cannot be had."""
    if os.getuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("loop mounts need root and /dev/loop-control")
    tool = f"mkfs.{kind}"
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    directory.mkdir(exist_ok=True)
    image = directory / f"{kind}.image"
    with image.open("wb") as file:
        file.truncate(size or SIZES[kind])
    subprocess.run([tool, "-q", image], check=True, capture_output=True)
    made = Disk(image, mountpoint or directory / kind)
    try:
        made.mount()
        try:
            yield made
        finally:
            if os.path.ismount(made.mountpoint):
                made.unmount()
    finally:
        made.detach()
        image.unlink()


def fill(mountpoint: Path) -> Path:
    """A foreign file that takes every block, down to those that are kept for root; where it is
    there already, what has come free since."""
    path = mountpoint / "foreign"
    with path.open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):
            free = os.fstatvfs(file.fileno()).f_bavail * os.fstatvfs(file.fileno()).f_frsize
            os.posix_fallocate(file.fileno(), path.stat().st_size, max(free - 8 * _MIB, 1))
        for size in (_MIB, 4096):
            while True:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    break
    return path
