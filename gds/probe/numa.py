"""The NUMA nodes of this machine's parts (sysfs), and the CPUs for reading threads: those of the
node where the bytes end, or begin. Memory that a thread writes first lies on its node, so its
buffers follow."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

SYS: Final = Path("/sys")
_MOST_PARENTS: Final = 32


def nodes(sys: Path = SYS) -> dict[int, frozenset[int]]:
    """Returns the CPUs of each node; empty if the kernel does not tell."""
    found = {}
    for path in sys.glob("devices/system/node/node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = parse_cpus(_read(path))
    return found


def parse_cpus(text: str) -> frozenset[int]:
    """Parses a kernel's list: '0-3,8'."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_of_pci(address: str, sys: Path = SYS) -> int | None:
    """Returns the node of a PCI device. None: the kernel does not tell."""
    return _node(sys / "bus/pci/devices" / address)


def node_of_disk(device: int, sys: Path = SYS) -> int | None:
    """Returns the node of the disk with a filesystem whose st_dev is `device`; of one laid over
    others, the first that tells. None: there is no such disk (tmpfs, a network), or the kernel does
    not tell."""
    for disk in _disks(device, sys):
        for parent in (disk, *disk.parents)[:_MOST_PARENTS]:
            found = _number(parent / "numa_node")
            if found is not None:
                return found
    return None


def is_on_nvme(device: int, sys: Path = SYS) -> bool:
    """Returns whether the filesystem whose st_dev is `device` lies on an NVMe disk, or over
    some."""
    return any(part.startswith("nvme") for disk in _disks(device, sys) for part in disk.parts[-3:])


def _disks(device: int, sys: Path) -> Iterator[Path]:
    """Yields the disk in sysfs, then those that it is laid over."""
    start = sys / f"dev/block/{os.major(device)}:{os.minor(device)}"
    for link in (start, *sorted(start.glob("slaves/*"))):
        try:
            yield link.resolve(strict=True)
        except (OSError, RuntimeError):
            continue


def network_nodes(sys: Path = SYS) -> dict[str, int | None]:
    """Returns the nodes of the hardware network cards and RDMA devices, by name."""
    found = {}
    for kind in ("net", "infiniband"):
        for path in sorted(sys.glob(f"class/{kind}/*/device")):
            found[path.parent.name] = _node(path)
    return found


def cpus_near(
    wanted: Iterable[int | None], nodes: Mapping[int, frozenset[int]], allowed: frozenset[int]
) -> frozenset[int] | None:
    """Returns the CPUs for threads that serve devices on the nodes `wanted`, the most important
    first; `allowed`: those on which this process may run. None: any that the scheduler likes, as
    there is one node, or no CPU of theirs is allowed. Pure."""
    if len(nodes) < 2:
        return None
    for node in wanted:
        near = nodes.get(node, frozenset()) & allowed if node is not None else frozenset()
        if near:
            return None if near == allowed else near
    return None


def run_on(cpus: frozenset[int] | None) -> None:
    """Runs this thread on these CPUs from now on; does nothing if the kernel refuses: it is only
    about speed."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            return


def _node(device: Path) -> int | None:
    return _number(device / "numa_node")


def _number(path: Path) -> int | None:
    """Returns the number; None: there is none, or -1, by which the kernel says that it does not
    know."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
