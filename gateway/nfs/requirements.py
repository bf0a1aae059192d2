"""Requirements of the NFS door on the machine, and how to meet them."""

import glob
import os
import shutil
from typing import Final, NamedTuple

from kvfs.base.errors import NotSupported

PROGRAM: Final = "ganesha.nfsd"
_PATH: Final = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
_MODULES: Final = (
    "/usr/lib/*/ganesha/libfsalvfs.so",
    "/usr/lib/ganesha/libfsalvfs.so",
    "/usr/lib64/ganesha/libfsalvfs.so",
)
_NEEDED: Final = {
    "CAP_SYS_ADMIN": 21,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_SETUID": 7,
    "CAP_SETGID": 6,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_SETPCAP": 8,
    "CAP_MKNOD": 27,
}
INSTALL: Final = "apt-get install nfs-ganesha nfs-ganesha-vfs"


class Lack(NamedTuple):
    """Something that is not there."""

    what: str
    remedy: str


def lacks() -> list[Lack]:
    """Returns the requirements that are not met here; empty if the door can be opened."""
    found = []
    if program() is None:
        found.append(Lack(f"{PROGRAM} is not installed", INSTALL))
    elif not any(glob.glob(each) for each in _MODULES):
        found.append(Lack("NFS-Ganesha's module for local filesystems is not installed", INSTALL))
    missing = [name for name, bit in _NEEDED.items() if not _capabilities() >> bit & 1]
    if missing:
        found.append(
            Lack(
                f"the node lacks {', '.join(missing)}",
                "run as root, a container with --cap-add for each of them",
            )
        )
    return found


def require() -> str:
    """Returns the path of Ganesha's program. Raises NotSupported, which names what is missing and
    its remedy."""
    missing = lacks()
    if missing:
        told = "; ".join(f"{each.what}: {each.remedy}" for each in missing)
        raise NotSupported(f"no NFS: {told}")
    path = program()
    assert path is not None
    return path


def program() -> str | None:
    """Returns the path of Ganesha's program if it is installed."""
    return shutil.which(PROGRAM, path=_PATH)


def _capabilities() -> int:
    """Returns the capabilities in effect, as bits."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return -1 if os.geteuid() == 0 else 0
