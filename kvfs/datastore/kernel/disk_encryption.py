"""Tells whether a directory's data are encrypted on their way to the disk, as far as the kernel
knows.

Two ways are known: fscrypt, which encrypts a directory's files, and dm-crypt, which encrypts the
device under a filesystem, even beneath volumes or arrays. If it cannot be told (another kind of
filesystem, a disk or a hypervisor that encrypts), they count as not encrypted: the administrator
has to say.
"""

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from kvfs.base.descriptors import closing

FSCRYPT: Final = "fscrypt"
DM_CRYPT: Final = "dm-crypt"
_GET_POLICY: Final = 0xC009_6616  # FS_IOC_GET_ENCRYPTION_POLICY_EX
_POLICY_BYTES: Final = 24
_ENCRYPTING: Final = tuple(
    f"CRYPT-{kind}" for kind in ("LUKS1-", "LUKS2-", "PLAIN-", "LOOPAES-", "TCRYPT-", "BITLK-")
)
"""Beginnings of the names that cryptsetup gives its encrypting devices; others of it protect
integrity alone."""


def encrypted_by(directory: str, sysfs: Path = Path("/sys")) -> str:
    """Returns FSCRYPT, DM_CRYPT, or empty: not encrypted, or it cannot be told. Raises OSError if
    the directory cannot be opened."""
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        if _has_policy(fd):
            return FSCRYPT
        device = os.fstat(fd).st_dev
    block = sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    return DM_CRYPT if _is_crypt(block) else ""


def _has_policy(fd: int) -> bool:
    buffer = bytearray(struct.pack("Q", _POLICY_BYTES) + bytes(_POLICY_BYTES))
    try:
        fcntl.ioctl(fd, _GET_POLICY, buffer)
    except OSError:  # it has none, or its filesystem knows none
        return False
    return True


def _is_crypt(block: Path) -> bool:
    """Returns whether a device encrypts, or all devices do that it consists of."""
    try:
        if (block / "dm" / "uuid").read_text().startswith(_ENCRYPTING):
            return True
    except OSError:
        pass
    try:
        below = list((block / "slaves").iterdir())
    except OSError:
        return False
    return bool(below) and all(map(_is_crypt, below))
