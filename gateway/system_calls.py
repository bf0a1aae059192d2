"""System calls that no part of a node needs, refused by the kernel from its start on (seccomp(2)).

They are those that change the machine: its clock, modules, kernel, swap, names and accounts, and
those that look into other programs or the kernel; what the systemd unit leaves out
(`SystemCallFilter`), for nodes that are started without it. Refused is a call by EPERM, and in the
kernel's log, which `refused_in` reads: no process is ended by one.

The node's children have the same filter: S3 workers, watchdogs, NFS-Ganesha and its jail, which
adds one of its own (`gateway.nfs.name_guard`).
"""

import ctypes
import os
import re
from collections.abc import Iterable
from typing import Final

from gateway.nfs.name_guard import Machine, machine

NEEDLESS: Final[dict[str, tuple[int | None, int | None]]] = {
    "acct": (163, 89),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "perf_event_open": (298, 241),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
"""Their numbers on x86_64 and aarch64 (syscalls(2)); None: there is none."""
_AUDIT_X86_64: Final = 0xC000_003E
_SET_MODE_FILTER = 1
_LOG, _SPEC_ALLOW = 2, 4
_ALLOW, _EPERM = 0x7FFF_0000, 0x0005_0001
_EQUAL, _AT_LEAST, _LOAD, _RETURN = 0x15, 0x35, 0x20, 0x06
_OTHER_TABLE: Final = 0x4000_0000
"""The numbers of x32, another table of the same processor, begin here."""
_is_refusal: Final = re.compile(
    r"type=1326 .*\bpid=(\d+) .*\barch=(?:c000003e|c00000b7) syscall=(\d+)\b"
).search
_libc: Final = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_needless() -> None:
    """Refuses them to this thread and all that come of it, for good. The process has given up
    gaining privileges (PR_SET_NO_NEW_PRIVS). Raises OSError: the kernel has no filters, or the
    machine is of a kind for which none is written."""
    numbers = machine()
    code = program(numbers)
    made = _Filter(len(code) // 8, code)
    flags = _LOG | _SPEC_ALLOW
    if _libc.syscall(numbers.seccomp, _SET_MODE_FILTER, flags, ctypes.byref(made)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"no filter of system calls (seccomp): {os.strerror(number)}")


def program(numbers: Machine) -> bytes:
    """Returns the filter (BPF). It looks at no arguments, so the kernel knows ahead what it says of
    a number, and does not run it (Linux 5.11)."""
    refused = [each for each in _numbers(numbers).values() if each is not None]
    parts = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 0, len(refused) + 3, numbers.audit),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, len(refused) + 1, 0, _OTHER_TABLE),
        *((_EQUAL, len(refused) - at, 0, each) for at, each in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(
        code.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
        for code, yes, no, value in parts
    )


def refused_in(log: Iterable[str], pids: set[int]) -> list[str]:
    """Returns the names of calls that these processes were refused, by lines of the kernel's
    log."""
    names = {number: name for name, number in _numbers(machine()).items()}
    found = (match for line in log if (match := _is_refusal(line)) and int(match[1]) in pids)
    return sorted({names.get(int(each[2]), f"number {each[2]}") for each in found})


def _numbers(numbers: Machine) -> dict[str, int | None]:
    at = 0 if numbers.audit == _AUDIT_X86_64 else 1
    return {name: both[at] for name, both in NEEDLESS.items()}
