"""A memory barrier on every processor that runs a registered process: membarrier(2).

It lets the frequent side of a protocol between processes go without barriers of its own: the rare
side asks the kernel to run one on each processor where the frequent side may be (Linux 4.16).
"""

import ctypes
import os
from typing import Final

_CALL: Final = {"x86_64": 324, "aarch64": 283}.get(os.uname().machine)
_GLOBAL: Final = 1 << 0
_GLOBAL_EXPEDITED: Final = 1 << 1
_REGISTER: Final = 1 << 2
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _membarrier(command: int) -> int:
    return -1 if _CALL is None else int(_libc.syscall(_CALL, command, 0, 0))


def register() -> bool:
    """Makes `barrier` of other processes reach this one; False: the kernel cannot, or refuses."""
    return _membarrier(_REGISTER) == 0


def barrier() -> bool:
    """Returns when each registered process has run a full memory barrier on every processor that
    runs it (a few microseconds); False: the kernel cannot, or refuses."""
    return _membarrier(_GLOBAL_EXPEDITED) == 0


def barrier_for_all() -> bool:
    """Like `barrier`, for all processes, registered or not: up to some tens of milliseconds."""
    return _membarrier(_GLOBAL) == 0
