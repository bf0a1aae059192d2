"""The lines of `kvfs doctor` on loads of weights: GPUs, the way of reading for them, memory, NUMA
nodes."""

from collections.abc import Iterator
from pathlib import Path

from cli.commands.service.doctor_line import DoctorLine
from gds.probe.capability import Capability, Mode, probe

_KVIKIO = "pip install 'kvfs[gds-cu13]' (CUDA 12: kvfs[gds-cu12])"


def lines(directory: Path) -> Iterator[DoctorLine]:
    """Yields the lines for files whose data files lie in `directory`."""
    yield from show(probe(directory))


def show(found: Capability) -> Iterator[DoctorLine]:
    """Yields the lines for a capability. Pure. `active`: whether a load into GPU memory goes that
    way."""
    loads = bool(found.cuda.gpus and found.torch.version)
    yield _cuda(found)
    yield DoctorLine(
        name="torch with CUDA",
        available=bool(found.torch.version),
        active=loads,
        reason=found.torch.version or f"{found.torch.reason}: no loads into GPU memory",
        remedy="" if found.torch.version else "pip install 'kvfs[torch]'",
    )
    yield _storage(found, loads)
    yield _pinned(found, loads)
    yield _native_aio(found)
    yield _huge_pages(found)
    yield _numa(found)


def _cuda(found: Capability) -> DoctorLine:
    gpus = found.cuda.gpus
    if not gpus:
        return DoctorLine(
            name="cuda",
            available=False,
            active=False,
            reason=f"{found.cuda.reason}: weights go to memory of the host",
            remedy="an NVIDIA GPU and its driver, lent to the container too",
        )
    names = ", ".join(f"cuda:{at} {gpu.name}" for at, gpu in enumerate(gpus))
    driver = f"driver {found.driver}, " if found.driver else ""
    reason = f"{names}; {driver}CUDA {found.cuda.cuda}"
    return DoctorLine(name="cuda", available=True, active=True, reason=reason)


def _storage(found: Capability, loads: bool) -> DoctorLine:
    is_direct = found.mode is Mode.GDS
    remedy = ""
    if not found.kvikio.version:
        remedy = _KVIKIO
    elif not found.cuda.gpus:
        remedy = "an NVIDIA GPU and its driver"
    elif not found.lists_modules:
        remedy = "a kernel with /proc/modules (loadable modules)"
    elif found.own_reads:
        remedy = "the host's /run/udev in the container, and no KVIKIO_COMPAT_MODE"
    elif not found.nvidia_fs:
        remedy = "load nvidia-fs on the host (package nvidia-gds)"
    elif not is_direct:
        remedy = "a store on ext4 or xfs on NVMe"
    kvikio = f"kvikio {found.kvikio.version}, " if found.kvikio.version else ""
    reason = f"{kvikio}cuFile mode {found.mode.value}: {found.mode_reason}"
    return DoctorLine(
        name="GPUDirect Storage",
        available=is_direct,
        active=is_direct and loads,
        reason=reason,
        remedy=remedy,
    )


def _pinned(found: Capability, loads: bool) -> DoctorLine:
    """Reads into pinned memory, copied from there."""
    is_used = loads and found.mode is not Mode.GDS
    if is_used:
        reason = "reads and copies to the GPU overlap"
    elif loads:
        reason = "not needed: the disk writes into GPU memory"
    else:
        reason = "no loads into GPU memory"
    return DoctorLine(
        name="pinned copies",
        available=loads,
        active=is_used,
        reason=reason,
        remedy="" if loads else "a GPU, and torch with CUDA",
    )


def _native_aio(found: Capability) -> DoctorLine:
    """Native AIO: it reads pieces of columns (strategy "strided") past the page cache, many at
    once."""
    is_there = not found.native_aio
    direct = found.place.direct if found.place else None
    has_blocks = direct is not None and direct.block is not None
    if not is_there:
        reason = f"{found.native_aio}: pieces of columns go through the page cache"
    elif has_blocks:
        reason = "pieces of columns are read past the page cache"
    else:
        reason = "not used: the disk's blocks are as large as pages, or not known"
    return DoctorLine(
        name="native AIO",
        available=is_there,
        active=is_there and has_blocks,
        reason=reason,
        remedy=""
        if is_there
        else "Linux with CONFIG_AIO, io_setup allowed, a larger fs.aio-max-nr",
    )


def _huge_pages(found: Capability) -> DoctorLine:
    is_there = found.huge_pages in ("always", "madvise")
    return DoctorLine(
        name="huge pages",
        available=is_there,
        active=is_there,
        reason=found.huge_pages or "not in this kernel",
        remedy=""
        if is_there
        else "write madvise to /sys/kernel/mm/transparent_hugepage/enabled, as root",
    )


def _numa(found: Capability) -> DoctorLine:
    """NUMA placement: threads that read run near the GPU, else near the disk."""
    if len(found.nodes) < 2:
        reason = "one node: threads run where the scheduler likes"
        return DoctorLine(name="NUMA", available=True, active=False, reason=reason)
    where = {f"cuda:{at}": node for at, node in enumerate(found.gpu_nodes)}
    where["disk"] = found.place.numa_node if found.place else None
    where |= found.network_nodes
    known = [f"{name} on {node}" for name, node in where.items() if node is not None]
    told = ", ".join(known) or "none of its devices tells where it is"
    reason = f"{len(found.nodes)} nodes: {told}"
    return DoctorLine(name="NUMA", available=True, active=bool(known), reason=reason)
