"""Which mode a mount can have on this machine, and why not a faster one."""

import os
import pathlib
import platform
import re
from typing import Final

import msgspec

from kvfs.errors import NotSupported
from kvfs.store.probe import filesystem_type

_CAP_SYS_ADMIN: Final = 21
_PASSTHROUGH_SINCE: Final = (6, 9)
_STACKED: Final = ("overlay",)


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerated path, as `kvfs doctor` shows it."""

    name: str
    available: bool
    reason: str
    """Why not, or what it rests on."""
    remedy: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The mode to mount in."""

    mode: str
    reason: str
    """Why not the fastest mode; empty for it."""
    stack_depth: int
    """FUSE's max_stack_depth: 1, or 2 where the store lies on a stacked filesystem."""


def kernel_version() -> tuple[int, int]:
    """(major, minor) of the running kernel."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def has_sys_admin() -> bool:
    """Whether this process has CAP_SYS_ADMIN, which registering backing files needs."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def passthrough(store: str) -> Capability:
    """Whether reads and writes can go from the kernel to the data files directly."""
    version = kernel_version()
    name = "passthrough"
    if version < _PASSTHROUGH_SINCE:
        return Capability(
            name=name,
            available=False,
            reason=f"Linux {version[0]}.{version[1]} has no FUSE passthrough",
            remedy="boot Linux 6.9 or newer",
        )
    if not has_sys_admin():
        return Capability(
            name=name,
            available=False,
            reason="the daemon has no CAP_SYS_ADMIN",
            remedy="run as root, or give the container --cap-add SYS_ADMIN",
        )
    kind = filesystem_type(pathlib.Path(store))
    return Capability(
        name=name,
        available=True,
        reason=f"Linux {version[0]}.{version[1]}, store on {kind or 'unknown'}",
    )


def device() -> Capability:
    """Whether /dev/fuse can be opened: what the fast path needs."""
    name = "relay"
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        return Capability(name=name, available=True, reason="/dev/fuse can be opened")
    there = os.path.exists("/dev/fuse")
    return Capability(
        name=name,
        available=False,
        reason="/dev/fuse may not be opened" if there else "/dev/fuse does not exist",
        remedy="run as root"
        if there
        else "modprobe fuse, or give the container --device /dev/fuse",
    )


def choose(wanted: str, store: str) -> Choice:
    """The mode for a wish: 'auto' takes the fastest. Raises NotSupported for a mode that cannot be
    had here."""
    if wanted == "libfuse":
        return Choice(mode="libfuse", reason="asked for", stack_depth=0)
    best = passthrough(store)
    if best.available and wanted != "relay":
        depth = 2 if filesystem_type(pathlib.Path(store)) in _STACKED else 1
        return Choice(mode="passthrough", reason="", stack_depth=depth)
    if wanted == "passthrough":
        raise NotSupported(f"no passthrough: {best.reason}; {best.remedy}, or use --mode auto")
    return Choice(
        mode="relay", reason="asked for" if wanted == "relay" else best.reason, stack_depth=0
    )


def probe_modes(store: str) -> list[Capability]:
    """The three modes, fastest first."""
    libfuse = Capability(name="libfuse", available=True, reason="pyfuse3 is installed")
    return [passthrough(store), device(), libfuse]
