"""This machine's equipment for loads into GPU memory: one probe, one record.

The probe is safe everywhere. It imports neither torch nor kvikio: it reads their versions from
their packages' descriptions. kvikio without a CUDA driver can be imported and fails at its first
read, so nothing here touches it.

Modes, best first
- GDS: cuFile has the disk write into GPU memory (nvidia-fs, a filesystem that cuFile knows).
- COMPATIBILITY: cuFile, or kvikio itself, reads into memory of the host and copies from there.
- POSIX: cuFile is not available; `gds` reads into pinned buffers and copies from there itself.
"""

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from gds.device.cuda_driver import Driver, ask_driver
from gds.io import native_aio
from gds.io.direct_io import Alignment, alignment, alignment_in
from gds.io.memory import huge_pages
from gds.probe import numa
from kvfs.base.descriptors import closing
from kvfs.datastore.kernel.filesystem_probe import mount_of

_NEED_NVME: Final = ("ext4", "xfs")
_KNOWN: Final = ("beegfs", "gpfs", "lustre", "nfs", "nfs4", "wekafs")
"""Filesystems that cuFile reads from by GDS, on NVMe disks and over a network (NVIDIA GPUDirect
Storage, release notes, "Supported filesystems")."""
_KVIKIO: Final = ("kvikio-cu13", "kvikio-cu12", "kvikio")
_TORCH: Final = ("torch",)
_MODULES: Final = Path("/proc/modules")
_UDEV: Final = Path("/run/udev")


class Mode(Enum):
    """The mode of cuFile for a file on this machine."""

    GDS = "GDS"
    COMPATIBILITY = "compatibility"
    POSIX = "POSIX"


class Package(NamedTuple):
    """A Python package of this environment."""

    version: str
    """The version; empty: it is not installed, or useless here."""
    reason: str
    """The reason why it is useless; empty if it is not."""


class BackingPlace(NamedTuple):
    """The place of a backing file, or of one that would be made."""

    filesystem: str
    """The filesystem's type; empty if the mount table does not list it."""
    mount: str
    direct: Alignment | None
    """The alignment that O_DIRECT needs; None: not known, or not available."""
    nvme: bool
    numa_node: int | None
    """The NUMA node of the disk."""


class Capability(NamedTuple):
    """The record. Nodes are NUMA nodes, None if the kernel does not tell."""

    cuda: Driver
    driver: str
    """The version of NVIDIA's kernel module; empty: not known."""
    gpu_nodes: tuple[int | None, ...]
    """The NUMA nodes of `cuda.gpus`, in their order."""
    torch: Package
    kvikio: Package
    lists_modules: bool
    """Whether the kernel lists its modules (/proc/modules). If not, cuFile never returns from
    opening a file, and no signal ends that."""
    own_reads: str
    """The reason why kvikio would read without cuFile, as far as that is visible from outside; else
    empty."""
    nvidia_fs: str
    """The version of the kernel module; empty: it is not loaded."""
    place: BackingPlace | None
    """The place of the file; None: no file was named."""
    mode: Mode
    mode_reason: str
    native_aio: str
    """The reason why it is missing; empty: it is available."""
    huge_pages: str
    """always, madvise, never; empty: the kernel has none."""
    nodes: Mapping[int, frozenset[int]]
    """CPUs by node."""
    network_nodes: Mapping[str, int | None]

    def nodes_of_gpu(self, index: int) -> tuple[int | None, ...]:
        """Returns the nodes near which reads for a GPU should run: its own, else the disk's."""
        gpu = self.gpu_nodes[index] if index < len(self.gpu_nodes) else None
        return (gpu, self.place.numa_node if self.place else None)


def probe(path: str | os.PathLike[str] | int | None = None) -> Capability:
    """Examines this machine and, if given, the place beneath `path`: a file, its descriptor, or a
    directory of backing files. Raises only an OSError of `path`."""
    machine = _machine()
    place = None if path is None else place_of(path)
    found = machine._replace(place=place, own_reads=own_reads(os.environ, _UDEV))
    mode, reason = mode_of(found)
    return found._replace(mode=mode, mode_reason=reason)


def place_of(path: str | os.PathLike[str] | int, sys: Path = numa.SYS) -> BackingPlace:
    """Raises OSError."""
    device = os.stat(path).st_dev
    mount = mount_of(device)
    return BackingPlace(
        filesystem=mount.type,
        mount=mount.directory,
        direct=alignment(path) if isinstance(path, int) else _alignment(path),
        nvme=numa.is_on_nvme(device, sys),
        numa_node=numa.node_of_disk(device, sys),
    )


def own_reads(environment: Mapping[str, str], udev: Path) -> str:
    """Returns why kvikio would read without cuFile (kvikio, "Compatibility mode"); empty: it would
    not."""
    asked = environment.get("KVIKIO_COMPAT_MODE", "")
    if asked.lower() in ("on", "true", "yes", "1"):
        return f"KVIKIO_COMPAT_MODE={asked}"
    if asked.lower() in ("off", "false", "no", "0") or os.access(udev, os.R_OK):
        return ""
    return f"{udev} cannot be read"


def mode_of(machine: Capability) -> tuple[Mode, str]:
    """Returns the mode of cuFile for files at its place, and why it is no better. Pure; ignores the
    mode in the record.

    Newer versions (CUDA 12.8) can work without nvidia-fs, by PCI P2PDMA, which cannot be seen from
    outside: there KVFS_GPU_READS=cufile takes what this calls compatibility."""
    if not machine.cuda.gpus:
        return Mode.POSIX, machine.cuda.reason
    if not machine.kvikio.version:
        return Mode.POSIX, machine.kvikio.reason
    if not machine.lists_modules:
        return Mode.POSIX, "this kernel has no /proc/modules, without which cuFile opens no file"
    if machine.own_reads:
        return Mode.COMPATIBILITY, f"kvikio does without cuFile: {machine.own_reads}"
    if not machine.nvidia_fs:
        return Mode.COMPATIBILITY, "the kernel module nvidia-fs is not loaded"
    return _mode_at(machine.place, f"nvidia-fs {machine.nvidia_fs}")


def _mode_at(place: BackingPlace | None, nvidia_fs: str) -> tuple[Mode, str]:
    if place is None or place.filesystem in _KNOWN:
        return Mode.GDS, nvidia_fs
    if place.filesystem not in _NEED_NVME:
        kind = place.filesystem or "an unknown filesystem"
        return Mode.COMPATIBILITY, f"cuFile does not know {kind}"
    if not place.nvme:
        return Mode.COMPATIBILITY, f"{place.mount} lies on no NVMe disk"
    return Mode.GDS, f"{nvidia_fs}, {place.filesystem} on NVMe"


@functools.cache
def _machine() -> Capability:
    """Returns the facts that no file changes, examined once."""
    cuda = ask_driver()
    return Capability(
        cuda=cuda,
        driver=_module("nvidia"),
        gpu_nodes=tuple(numa.node_of_pci(gpu.address) for gpu in cuda.gpus),
        torch=torch_package(package(_TORCH)),
        kvikio=package(_KVIKIO),
        lists_modules=_MODULES.exists(),
        own_reads="",
        nvidia_fs=_module("nvidia_fs"),
        place=None,
        mode=Mode.POSIX,
        mode_reason="",
        native_aio=native_aio.why_not(),
        huge_pages=huge_pages(),
        nodes=numa.nodes(),
        network_nodes=numa.network_nodes(),
    )


def package(names: tuple[str, ...]) -> Package:
    """Returns the first of the packages that is installed."""
    for name in names:
        try:
            return Package(importlib.metadata.version(name), "")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Package("", f"{names[-1]} is not installed")


def torch_package(found: Package) -> Package:
    """Completes torch's record: its version shows whether it was built without CUDA. Pure."""
    if found.version.partition("+")[2].startswith(("cpu", "rocm", "xpu")):
        return Package("", f"torch {found.version} was built without CUDA")
    return found


def _alignment(path: str | os.PathLike[str]) -> Alignment | None:
    if os.path.isdir(path):
        return alignment_in(path)
    with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
        return alignment(fd)


def _module(name: str) -> str:
    """Returns a kernel module's version, 'loaded' if it tells none; empty: it is not loaded."""
    directory = numa.SYS / "module" / name
    try:
        return (directory / "version").read_text().strip()
    except OSError:
        return "loaded" if directory.is_dir() else ""
