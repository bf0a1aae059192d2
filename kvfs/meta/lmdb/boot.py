"""The id of the running boot, alone and together with the filesystems that hold a store: two
records with the same one were written with no power cut between them.

A disk can lose unsynced data without the machine's going down: it is detached by force, or set back
to a snapshot. Later use is by another mount of it, in the same boot. So records that must not
outlive such a moment name the boot as a filesystem sees it (`boot_of`): the kernel's boot id and
the present life of that filesystem's superblock. A bind mount (a restarted container) is the same
superblock.
"""

import ctypes
import functools
import hashlib
import os
import struct
from pathlib import Path
from typing import Final

_SOURCE: Final = Path("/proc/sys/kernel/random/boot_id")
_WITH_DEVICE: Final = ("ext4", "xfs", "f2fs")
"""Filesystems that have a directory named after their device in /sys/fs."""
_STATX_MNT_ID_UNIQUE: Final = 0x4000
_STATX_SIZE: Final = 256
_MNT_ID_AT: Final = 144
_AT_FDCWD: Final = -100


@functools.cache
def boot_id() -> int:
    """Returns 63 bits of the kernel's boot id, never 0 (which stands for 'on disk, whatever the
    boot')."""
    digits = _SOURCE.read_text(encoding="ascii").strip().replace("-", "")
    return int(digits[:16], 16) >> 1 or 1


def boot_of(*paths: str | os.PathLike[str]) -> int:
    """Returns the running boot as the filesystems at `paths` see it: another one once any of them
    was unmounted. 63 bits, never 0. Raises OSError."""
    lives = repr([boot_id(), *sorted({_life(os.fspath(path)) for path in paths})])
    digest = hashlib.blake2b(lives.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 or 1


def _life(path: str) -> tuple[int, str, int]:
    """Returns the device, and a value that the kernel never gives to another life of a filesystem
    in one boot: the inode number of its directory in sysfs (a counter that grows), else the unique
    id of the mount. With neither (before Linux 6.8, few filesystems) the device alone."""
    device = os.stat(path).st_dev
    for directory in _in_sysfs(device):
        try:
            return device, directory, os.stat(directory).st_ino
        except OSError:
            continue
    return device, "mount", _mount_id(path)


def _in_sysfs(device: int) -> list[str]:
    number = f"{os.major(device)}:{os.minor(device)}"
    if os.major(device) == 0:  # has no device: network filesystems have one for each superblock
        return [f"/sys/class/bdi/{number}"]
    try:
        name = os.path.basename(os.readlink(f"/sys/dev/block/{number}"))
    except OSError:
        return []
    return [f"/sys/fs/{kind}/{name}" for kind in _WITH_DEVICE]


def _mount_id(path: str) -> int:
    """Returns 0 if the kernel tells none that is never used again."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return 0
    found = ctypes.create_string_buffer(_STATX_SIZE)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_MNT_ID_UNIQUE, found):
        return 0
    (mask,) = struct.unpack_from("=I", found)
    (number,) = struct.unpack_from("=Q", found, _MNT_ID_AT)
    return int(number) if mask & _STATX_MNT_ID_UNIQUE else 0
