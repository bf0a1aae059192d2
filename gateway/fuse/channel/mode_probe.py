"""Finds the modes that a mount can have on this machine, and the reason where a faster one is
missing."""

import os
import pathlib
import platform
import re
from typing import Final

import msgspec

from gateway.fuse.channel import device as dev
from kvfs.base.errors import NotSupported
from kvfs.datastore.kernel.filesystem_probe import filesystem_type

_CAP_SYS_ADMIN: Final = 21
_PASSTHROUGH_SINCE: Final = (6, 9)
_EPOCHS_SINCE: Final = (6, 16)
"""FUSE_NOTIFY_INC_EPOCH (Linux 2396356a945b)."""
_DIRECT_MAPS_SINCE: Final = (6, 6)
"""A file that is opened with FOPEN_DIRECT_IO can be mapped shared (FUSE_DIRECT_IO_ALLOW_MMAP)."""
_COHERENT_SINCE: Final = (6, 19)
_COHERENT_STABLE: Final = {(6, 6): 120, (6, 12): 64, (6, 18): 3}
"""The first patch level of each stable series (every kernel from the newest on) that drops a file's
cached pages after an FOPEN_DIRECT_IO write too (Linux b359af8275a9). Older ones drop them only
before it: pages that are read between the two stay in the cache with their old content."""
_STACKED: Final = ("overlay",)


class AcceleratedPath(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerated path, as `kvfs doctor` shows it."""

    name: str
    available: bool
    reason: str
    """The reason why it is not active, or what it rests on."""
    remedy: str = ""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The mode to mount in."""

    mode: str
    reason: str
    """The reason why it is not the fastest mode; empty for the fastest."""
    stack_depth: int
    """FUSE's max_stack_depth: 1, or 2 where the store lies on a stacked filesystem."""


def kernel_version() -> tuple[int, int, int]:
    """Returns (major, minor, patch level) of the running kernel; the patch level is 0 for
    distributions that count otherwise."""
    return version_of(platform.release())


def version_of(release: str) -> tuple[int, int, int]:
    """Returns the (major, minor, patch level) that a release string begins with, else zeros."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (0, 0, 0)


def keeps_coherent(version: tuple[int, int, int]) -> bool:
    """Returns whether readers always see what was written past the page cache."""
    series, patch = version[:2], version[2]
    return series >= _COHERENT_SINCE or patch >= _COHERENT_STABLE.get(series, patch + 1)


def has_sys_admin() -> bool:
    """Returns whether this process has CAP_SYS_ADMIN, which registering backing files needs."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def passthrough(store: str) -> AcceleratedPath:
    """Tells whether reads and writes can go from the kernel to the data files directly."""
    version = kernel_version()
    name = "passthrough"
    if version[:2] < _PASSTHROUGH_SINCE:
        return AcceleratedPath(
            name=name,
            available=False,
            reason=f"Linux {version[0]}.{version[1]} has no FUSE passthrough",
            remedy="boot Linux 6.9 or newer",
        )
    if not has_sys_admin():
        return AcceleratedPath(
            name=name,
            available=False,
            reason="the daemon has no CAP_SYS_ADMIN",
            remedy="run as root, or give the container --cap-add SYS_ADMIN",
        )
    kind = filesystem_type(pathlib.Path(store))
    return AcceleratedPath(
        name=name,
        available=True,
        reason=f"Linux {version[0]}.{version[1]}, store on {kind or 'unknown'}",
    )


def device() -> AcceleratedPath:
    """Tells whether /dev/fuse can be opened, which the fast path needs."""
    name = "relay"
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        return AcceleratedPath(name=name, available=True, reason="/dev/fuse can be opened")
    there = os.path.exists("/dev/fuse")
    return AcceleratedPath(
        name=name,
        available=False,
        reason="/dev/fuse may not be opened" if there else "/dev/fuse does not exist",
        remedy="run as root"
        if there
        else "modprobe fuse, or give the container --device /dev/fuse",
    )


def direct_writes() -> AcceleratedPath:
    """Tells whether relay mode may write past the mount's page cache."""
    version = kernel_version()
    available = keeps_coherent(version)
    known = f"Linux {version[0]}.{version[1]}.{version[2]}"
    return AcceleratedPath(
        name="direct writes",
        available=available,
        reason=f"relay: new files are written past the page cache, {known} keeps it right"
        if available
        else f"relay: through the page cache, as {known} could keep old pages otherwise",
        remedy="" if available else "boot Linux 6.6.120, 6.12.64, 6.18.3, 6.19 or newer",
    )


def direct_reads() -> AcceleratedPath:
    """Tells whether files that are still being fetched may be read past the page cache."""
    version = kernel_version()
    available = version[:2] >= _DIRECT_MAPS_SINCE
    known = f"Linux {version[0]}.{version[1]}"
    return AcceleratedPath(
        name="direct reads",
        available=available,
        reason=f"files that are still coming are read past the page cache, {known} maps them too"
        if available
        else f"files that are still coming are read through the page cache: else {known} could not "
        "map them",
        remedy="" if available else "boot Linux 6.6 or newer",
    )


def cache_drop() -> AcceleratedPath:
    """Tells whether the kernel can be made to forget all names at once."""
    version = kernel_version()
    available = version[:2] >= _EPOCHS_SINCE
    known = f"Linux {version[0]}.{version[1]}"
    return AcceleratedPath(
        name="cache drop",
        available=available,
        reason=f"{known} drops what it remembers where one name takes too long"
        if available
        else f"{known} forgets names one by one: a change waits for locks, or is answered with 503",
        remedy="" if available else "boot Linux 6.16 or newer",
    )


def takeover() -> AcceleratedPath:
    """Tells whether another daemon can go on with a mount: the kernel sends again what was not
    answered, forgets the names that others may have changed meanwhile, and lets the holder end the
    mount of a daemon that it cannot let go of."""
    version = kernel_version()
    known = f"Linux {version[0]}.{version[1]}"
    if version[:2] < _EPOCHS_SINCE:
        return AcceleratedPath(
            name="takeover",
            available=False,
            reason=f"a mount ends with its daemon: {known} cannot have another go on with it",
            remedy="boot Linux 6.16 or newer",
        )
    available = dev.reaches_connections()
    return AcceleratedPath(
        name="takeover",
        available=available,
        reason=f"{known} lets another daemon go on with a mount (the setting takeover_s)"
        if available
        else "a mount ends with its daemon: the kernel's list of connections cannot be reached",
        remedy="" if available else "root, or mount -t fusectl fusectl /sys/fs/fuse/connections",
    )


def watchdog() -> AcceleratedPath:
    """Tells whether a mount's watchdog can end it when the node was killed."""
    way = dev.can_abort()
    return AcceleratedPath(
        name="watchdog",
        available=bool(way),
        reason=f"a killed node's mount is ended through {way}"
        if way
        else "a killed node that the kernel cannot let go of leaves its mount hanging",
        remedy="" if way else "root, or mount -t fusectl fusectl /sys/fs/fuse/connections",
    )


def choose(wanted: str, store: str) -> Choice:
    """Returns the mode for a wish: 'auto' takes the fastest. Raises NotSupported for a mode that
    this machine does not have."""
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


def probe_modes(store: str) -> list[AcceleratedPath]:
    """Returns the three modes, fastest first."""
    libfuse = AcceleratedPath(name="libfuse", available=True, reason="pyfuse3 is installed")
    return [passthrough(store), device(), libfuse]
