"""Lines of `kvfs doctor` on what a node has given up: system calls, and being looked into."""

import os
from collections.abc import Iterator
from typing import Any, Final

from cli.commands.service.doctor_line import DoctorLine

_AS_ROOT: Final = "a node of root"
_LOG: Final = "/dev/kmsg"
_RECORD_BYTES: Final = 8192
_MOST_RECORDS: Final = 100_000


def lines(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """Yields the lines; `status` is that of the node that runs."""
    found = {} if status is None else status.get("confinement", {})  # not of the version before
    yield _of_calls(status, found)
    yield _of_memory(found)


def _of_memory(found: dict[str, Any]) -> DoctorLine:
    name = "hidden memory"
    reason = "no process without CAP_SYS_PTRACE looks into a node of root (py-spy, gdb: as root)"
    if not found:
        return DoctorLine(name=name, available=True, active=None, reason=reason)
    if not found["is_root"]:
        reason = (
            "a user's node is open to that user's programs, as its files are; its S3 workers not"
        )
    return DoctorLine(
        name=name,
        available=found["is_root"],
        active=found["hides_memory"],
        reason=reason,
        remedy="" if found["is_root"] else _AS_ROOT,
    )


def _of_calls(status: dict[str, Any] | None, found: dict[str, Any]) -> DoctorLine:
    name, reason = "system calls", "those that no part of a node needs are refused (EPERM)"
    if status is None or not found:
        return DoctorLine(name=name, available=True, active=None, reason=reason)
    if not found["filters_calls"]:
        lacks = "no filter is written for this kind of processor, or the kernel has none"
        is_user = "a user's node is not filtered: it mounts by the set-uid fusermount3"
        return DoctorLine(
            name=name,
            available=False,
            active=False,
            reason=lacks if found["is_root"] else is_user,
            remedy="a kernel with CONFIG_SECCOMP_FILTER" if found["is_root"] else _AS_ROOT,
        )
    refused = _refused(status)
    if refused is None:
        reason += "; those that were stand in the kernel's log (type=1326), which root may read"
    elif refused:
        reason += f"; so far: {', '.join(refused)}"
    remedy = "report it: the node, or a library, tried them" if refused else ""
    return DoctorLine(name=name, available=True, active=True, reason=reason, remedy=remedy)


def _refused(status: dict[str, Any]) -> list[str] | None:
    """Returns the calls that the node and its workers were refused; None: the log is not ours to
    read."""
    from gateway.system_calls import refused_in

    pids = {status["pid"], *((status.get("s3") or {}).get("workers", ()))}
    try:
        return refused_in(_kernel_log(), pids)
    except OSError:
        return None


def _kernel_log() -> Iterator[str]:
    """Yields the records that the kernel has kept. Raises OSError."""
    log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_MOST_RECORDS):
            try:
                yield os.read(log, _RECORD_BYTES).decode(errors="replace")
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # that record was written over
    finally:
        os.close(log)
