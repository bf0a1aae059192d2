"""Whether what lies in a directory is encrypted on its way to the disk, as the kernel tells.

Two ways are known: fscrypt, which encrypts a directory's files, and dm-crypt, which encrypts the
device under a filesystem, also where volumes or arrays lie between. What cannot be told (another
kind of filesystem, a disk or a hypervisor that encrypts) counts as not encrypted: it is for the
administrator to say.
"""

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

FSCRYPT: Final = "fscrypt"
DM_CRYPT: Final = "dm-crypt"
_GET_POLICY: Final = 0xC009_6616  # FS_IOC_GET_ENCRYPTION_POLICY_EX
_POLICY_BYTES: Final = 24
_ENCRYPTING: Final = tuple(
    f"CRYPT-{kind}" for kind in ("LUKS1-", "LUKS2-", "PLAIN-", "LOOPAES-", "TCRYPT-", "BITLK-")
)
"""How the names begin that cryptsetup gives its devices; others of it protect integrity alone."""


def encrypted_by(directory: str, sysfs: Path = Path("/sys")) -> str:
    """FSCRYPT, DM_CRYPT, or empty: not, or it cannot be told. Raises OSError where the directory
    cannot be opened."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _has_policy(fd):
            return FSCRYPT
        device = os.fstat(fd).st_dev
    finally:
        os.close(fd)
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
    """Whether a device encrypts, or all those that it consists of do."""
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
