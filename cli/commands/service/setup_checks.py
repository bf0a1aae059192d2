"""Checks of a machine on which a node is to be set up."""

import errno
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cli.commands.service import doctor, systemd_unit
from cli.commands.service.doctor_line import DoctorLine
from kvfs.base import descriptors
from kvfs.base.config import ADMIN_USUAL, NFS_USUAL, PEER_PORT, S3_USUAL, Address, Config

_EXAMINED: Final = (
    *("passthrough", "relay", "watchdog", "leases", "O_DIRECT", "spare data files"),
    "s3 hardware CRC",
)
"""Lines of `kvfs doctor` that tell of the machine. Priority and descriptors are the service's, not
this process's."""


def examine(config: Config, store: Path, status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """Yields what is there and what is not; `store`: the store, or the directory where it would be
    made, `status`: that of the node that runs on it."""
    for line in doctor.examine(store, status):
        if line.name in _EXAMINED:
            yield line
    yield _descriptors()
    yield _fusermount()
    for name, wanted, usual in _addresses(config):
        if status is None and wanted != "off":
            yield _port(name, wanted if isinstance(wanted, Address) else usual, wanted == "auto")


def obstacles(lines: list[DoctorLine]) -> list[DoctorLine]:
    """Returns those of the lines without which no node can start."""
    return [
        line
        for line in lines
        if not line.available and (line.name == "relay" or line.name.startswith("port of"))
    ]


def _descriptors() -> DoctorLine:
    most = descriptors.most_of_system()
    is_enough = most >= systemd_unit.MOST_DESCRIPTORS
    return DoctorLine(
        name="descriptors",
        available=is_enough,
        active=None,
        reason=f"the kernel lets a process have {most:,}",
        remedy="" if is_enough else f"sysctl fs.nr_open={systemd_unit.MOST_DESCRIPTORS}",
    )


def _fusermount() -> DoctorLine:
    found = shutil.which("fusermount3")
    return DoctorLine(
        name="fusermount3",
        available=bool(found),
        active=None,
        reason=found or "a node that is not root's cannot mount, and nobody but root can unmount",
        remedy="" if found else "apt-get install fuse3",
    )


def _addresses(config: Config) -> Iterator[tuple[str, Address | str, Address]]:
    yield "s3", config.s3, S3_USUAL
    yield "admin", config.admin if config.s3 != "off" else "off", ADMIN_USUAL
    yield "nfs", config.nfs, NFS_USUAL
    if config.engine:
        yield "peer", config.peer, Address("0.0.0.0", PEER_PORT)  # noqa: S104  asked, not served


def _port(name: str, address: Address, may_differ: bool) -> DoctorLine:
    """Tells whether an address is free. An automatic one that is not is no obstacle."""
    refused = _refusal(address)
    label = f"port of {name}"
    if refused and may_differ:
        reason = f"{address}: {refused}; any free port is taken"
        return DoctorLine(name=label, available=True, active=None, reason=reason)
    return DoctorLine(
        name=label,
        available=not refused,
        active=None,
        reason=f"{address}: {refused or 'free'}",
        remedy=f"end what listens there, or choose another address with --{name}"
        if refused
        else "",
    )


def _refusal(address: Address) -> str:
    """Returns why nothing can listen there; empty: something can."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in found[:1]:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return "something listens there" if taken else error.strerror or str(error)
    return ""
