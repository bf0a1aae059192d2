"""Lines of `kvfs doctor` on TLS: of S3, between nodes, and by the kernel."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from cli.commands.service.doctor_line import DoctorLine

_DAY_S: Final = 86400.0
_PROTOCOLS: Final = Path("/proc/sys/net/ipv4/tcp_available_ulp")
"""Lists what the kernel can put above TCP, of modules those that are loaded."""


def lines(status: dict[str, Any] | None) -> Iterator[DoctorLine]:
    """Yields the lines; `status` is that of the node that runs."""
    yield _of_s3(status)
    cluster = status.get("cluster") if status else None
    if cluster is not None and "tls" in cluster:  # not of the version before
        yield _between_nodes(cluster)
    yield _by_kernel()


def _of_s3(status: dict[str, Any] | None) -> DoctorLine:
    from s3api.server.admin_port import certificate_ends

    s3 = status.get("s3") if status else None
    if s3 is None or not s3["tls"]:
        return DoctorLine(
            name="s3 TLS",
            available=True,
            active=None if status is None else False,
            reason="no certificate is set",
            remedy="s3_certificate and s3_private_key",
        )
    ends, expires_s = certificate_ends(s3), s3.get("certificate_expires_s")
    until = "" if expires_s is None else f", certificate until {_day(expires_s)}"
    return DoctorLine(
        name="s3 TLS",
        available=not ends,
        active=True,
        reason=f"{s3['endpoint']}{until}{f': {ends}' if ends else ''}",
        remedy="replace both files: they are read at the next connection" if ends else "",
    )


def _between_nodes(cluster: dict[str, Any]) -> DoctorLine:
    name, tls = "TLS between nodes", cluster["tls"]
    if tls["mode"] == "off":
        return DoctorLine(
            name=name,
            available=True,
            active=False,
            reason="off: names and data cross the network as they are",
            remedy="--peer-tls accept on all nodes, then require",
        )
    others = [each for each in cluster["nodes"] if each["number"] != cluster["node"]]
    plain = [each["name"] for each in others if each["lease"] == "held" and not each["tls"]]
    left_s = tls["certificate_expires_s"] - time.time()
    reason = (
        f"TLS 1.3, {tls['mode']}, certificate until {_day(tls['certificate_expires_s'])}, made"
        " anew each day"
    )
    if left_s < _DAY_S:
        return DoctorLine(
            name=name, available=False, active=False, reason=reason, remedy="set this host's clock"
        )
    if plain:
        what = "refused" if tls["mode"] == "require" else "met without TLS"
        reason += f"; {what}, since they speak none: {', '.join(plain)}"
        remedy = "upgrade them, or --peer-tls accept there"
        return DoctorLine(name=name, available=True, active=True, reason=reason, remedy=remedy)
    remedy = "" if tls["mode"] == "require" else "--peer-tls require, once no node lacks it"
    return DoctorLine(name=name, available=True, active=True, reason=reason, remedy=remedy)


def _by_kernel() -> DoctorLine:
    has = kernel_has_tls(_PROTOCOLS, Path("/lib/modules", os.uname().release))
    return DoctorLine(
        name="kernel TLS",
        available=has,
        active=False,
        reason="TLS is done in the processes, and bodies are copied for it: "
        + ("not used, although the kernel has it" if has else "the kernel has none"),
        remedy="" if has else "none yet: it is not used where there is one (CONFIG_TLS)",
    )


def kernel_has_tls(protocols: Path, modules: Path) -> bool:
    """Returns whether the kernel can encrypt for a socket (kTLS), perhaps once its module is
    loaded. Loads nothing, as asking a socket would.

    `protocols`: the kernel's list of them; `modules`: the directory of its modules, which need not
    exist."""
    with contextlib.suppress(OSError):
        if "tls" in protocols.read_text().split():
            return True
    with contextlib.suppress(OSError):
        for line in (modules / "modules.dep").read_text().splitlines():
            if line.partition(":")[0].partition(".ko")[0].endswith("/net/tls/tls"):
                return True
    return False


def _day(time_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(time_s))
