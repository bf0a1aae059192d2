"""The privileges that a node keeps: what serving needs, and nothing else from its start on.

Given up before the first thread is made, as each has its own, and by children therefore too. A
dump of a node's memory would hold keys; none is written, and of a node of root no process reads it
that may not trace all others (CAP_SYS_PTRACE).

A user's node stays open to that user's programs, which could read its keys' files as well: they
write for it to the kernel's device when it hangs (`kvfs.base.fuse_device`). And it mounts by the
set-uid fusermount3, so it may still gain privileges, and has no filter of system calls.
"""

import contextlib
import ctypes
import os
import resource
from typing import Any, Final

from gateway import system_calls
from kvfs.base.processes import hide_memory, is_memory_hidden

KEPT: Final = {
    "mount(2), passthrough's backing files, the jail of NFS": {"SYS_ADMIN": 21},
    "files of all users": {
        "CHOWN": 0,
        "DAC_OVERRIDE": 1,
        "DAC_READ_SEARCH": 2,
        "FOWNER": 3,
        "FSETID": 4,
        "LEASE": 28,
        "LINUX_IMMUTABLE": 9,
        "SETFCAP": 31,
    },
    "NFS-Ganesha and its jail": {"KILL": 5, "MKNOD": 27, "SETGID": 6, "SETUID": 7, "SETPCAP": 8},
    "which system call a program is in, whoever it is; buffers that hold a request of the kernel": {
        "SYS_PTRACE": 19,
        "NET_ADMIN": 12,
    },
    "low ports, memory for RDMA, priority, descriptors": {
        "NET_BIND_SERVICE": 10,
        "IPC_LOCK": 14,
        "SYS_NICE": 23,
        "SYS_RESOURCE": 24,
    },
}
"""Capabilities (capabilities(7)) and their numbers, by what needs them."""
_VERSION: Final = 0x20080522
_LAST: Final = 63
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 23, 24, 38
_PR_GET_SECCOMP, _FILTER = 21, 2
_NO_DUMP: Final = 1
"""The limit of a dump's size that ends dumps into pipes too, for which 0 says nothing."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        *(("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32)),
        ("inheritable", ctypes.c_uint32),
    )


def give_up() -> None:
    """Gives up what a node does not need, for good. Raises OSError."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 0 if most == 0 else _NO_DUMP  # a limit of 0 is not everybody's to raise
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    if os.geteuid() != 0:
        return  # a user has no capabilities, and mounts by the set-uid fusermount3
    kept = sum(1 << number for names in KEPT.values() for number in names.values())
    for number in range(_LAST + 1):
        if not kept >> number & 1 and _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1:
            # Refused without CAP_SETPCAP: then children get what this process may not have.
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _keep(kept)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    hide_memory()
    with contextlib.suppress(OSError):  # `report` tells
        system_calls.refuse_needless()


async def report() -> dict[str, Any]:
    """Returns its part of the node's status."""
    return {
        "hides_memory": is_memory_hidden(),
        "filters_calls": _libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) == _FILTER,
        "is_root": os.geteuid() == 0,
    }


def _keep(kept: int) -> None:
    """Gives up all other capabilities of this thread."""
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    _call(_libc.capget(ctypes.byref(header), sets))
    for part, found in enumerate(sets):
        found.permitted &= kept >> 32 * part & 0xFFFF_FFFF
        found.effective = found.permitted
        found.inheritable = 0
    _call(_libc.capset(ctypes.byref(header), sets))


def _call(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
