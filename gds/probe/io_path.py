"""The way of a load: into memory of the host; into a GPU's by cuFile, if the disk writes there
itself (GDS); else by reads into pinned buffers and copies from them; if nothing can be pinned, from
other memory, which the driver copies once more.

In its compatibility mode cuFile reads into buffers of its own and copies as well, without reading
the next ones meanwhile, and so does kvikio when it avoids cuFile; therefore both are taken only on
request: KVFS_GPU_READS=cufile (or pinned).
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from gds.device.devices import first_line
from gds.io.checked_source import CheckedSource
from gds.io.source import SourceFile
from gds.io.target import HostTarget, Target
from gds.io.timings import Stages
from gds.plan.load_plan import LoadPlan
from gds.probe import numa
from gds.probe.capability import Mode, probe
from kvfs.base.errors import Invalid, NotSupported, Unavailable

if TYPE_CHECKING:
    from gds.device.cufile import CuFile

log = logging.getLogger(__name__)
ASKED: Final = "KVFS_GPU_READS"
_AVOIDED: Final = "KVIKIO_COMPAT_MODE says so, or its library or /run/udev is not to be had"


class Way(Enum):
    """The way of bytes to their places."""

    HOST = "memory of the host"
    CUFILE = "cuFile"
    KVIKIO = "kvikio's own reads"
    PINNED = "pinned copies"
    PAGEABLE = "copies that are not pinned"


class Taken(NamedTuple):
    """The way of one load."""

    way: Way
    reason: str


Report = Callable[[Taken | Stages], object]
"""Called with the way that a load takes, before it reads; once more, by a thread of the load, if it
turns out that memory cannot be pinned; and, when the last tensor was taken, with the stages of the
load."""


class OpenedTarget(NamedTuple):
    """The target of a load's reads."""

    target: Target
    cpus: frozenset[int] | None
    """The CPUs for threads that read; None: any."""


def choose(mode: Mode, mode_reason: str, asked: str) -> Taken:
    """Chooses a way into a GPU's memory. `asked`: 'cufile', 'pinned', empty: the best. Raises
    Invalid, NotSupported. Pure."""
    if asked not in ("", "auto", "cufile", "pinned"):
        raise Invalid(f"{ASKED}={asked}: auto, cufile and pinned are known")
    told = f"cuFile mode {mode.value}: {mode_reason}"
    if asked == "pinned":
        return Taken(Way.PINNED, f"{ASKED}=pinned")
    if asked == "cufile":
        if mode is Mode.POSIX:
            raise NotSupported(f"{ASKED}=cufile: {mode_reason}; see kvfs doctor")
        return Taken(Way.CUFILE, f"{ASKED}=cufile, {told}")
    return Taken(Way.CUFILE if mode is Mode.GDS else Way.PINNED, told)


def device_of(device: str | torch.device) -> torch.device:
    """Returns an existing device, with its index if it is a GPU. Raises Invalid, NotSupported."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        why = first_line(error)
        raise Invalid(f"{device!r} is no device: {why}: cpu, cuda and cuda:N are known") from None
    if found.type == "cpu":
        return found
    if found.type != "cuda":
        raise NotSupported(f"{device}: loads go to cpu and cuda")
    if torch.version.cuda is not None:
        _start_cuda(found)  # before the driver is asked: torch knows what a fork did to it
    number = _gpus(found)
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= number:
        there = ", ".join(f"cuda:{at}" for at in range(number))
        raise Invalid(f"{device}: there is no such device: there are {there}")
    return torch.device("cuda", index)


def _gpus(device: torch.device) -> int:
    """Returns how many GPUs torch may use. Raises NotSupported."""
    machine = probe()
    why = machine.torch.reason if torch.version.cuda is None else machine.cuda.reason
    if not why:
        number = int(torch.cuda.device_count())
        if number:
            return number
        why = "torch finds no GPU that it can use"
    raise NotSupported(f"{device}: {why}: see kvfs doctor")


def _start_cuda(device: torch.device) -> None:
    """Starts CUDA. Raises NotSupported: the driver is too old, or this process was forked by one
    that uses it."""
    try:
        torch.cuda.init()
    except Exception as error:  # torch wraps what was asked of it before in an error of its own
        raise NotSupported(
            f"{device}: CUDA does not start: {first_line(error)}: see kvfs doctor"
        ) from None


@contextlib.contextmanager
def open_target(
    plan: LoadPlan,
    device: torch.device,
    dtype: torch.dtype | None,
    sources: Sequence[SourceFile],
    report: Report | None = None,
) -> Iterator[OpenedTarget]:
    """Opens the target of a load's reads, until the block ends. `device`: by `device_of`. To be
    called in the thread that the tensors are for. Raises NotSupported, Invalid, Unavailable."""
    report = report or (lambda _taken: None)
    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            _tell(Taken(Way.HOST, "the device is the CPU"), report)
            yield OpenedTarget(HostTarget(plan, dtype), _near_disk(sources))
        else:
            yield _opened(plan, device, dtype, sources, report, stack)


def _opened(
    plan: LoadPlan,
    device: torch.device,
    dtype: torch.dtype | None,
    sources: Sequence[SourceFile],
    report: Report,
    stack: contextlib.ExitStack,
) -> OpenedTarget:
    from gds.device.cuda import CudaDevice
    from gds.device.cufile import CuFileTarget
    from gds.device.device_target import DeviceTarget

    found = probe(sources[0].fd)
    asked = os.environ.get(ASKED, "")
    taken = choose(found.mode, found.mode_reason, asked)
    files: dict[SourceFile, CuFile] = {}
    if taken.way is Way.CUFILE:
        taken, files = _by_cufile(taken, sources, stack, is_asked=asked == "cufile")
    _tell(taken, report)
    cpus = numa.cpus_near(found.nodes_of_gpu(device.index), found.nodes, _allowed())
    gpu = CudaDevice(device, lambda why: _tell(Taken(Way.PAGEABLE, why), report))
    if taken.way is Way.PINNED:
        return OpenedTarget(DeviceTarget(plan, gpu, dtype), cpus)
    return OpenedTarget(CuFileTarget(plan, gpu, dtype, files), cpus)


def _by_cufile(
    taken: Taken,
    sources: Sequence[SourceFile],
    stack: contextlib.ExitStack,
    *,
    is_asked: bool,
) -> "tuple[Taken, dict[SourceFile, CuFile]]":
    """Returns the files as kvikio opens them; or another way, if that fails. Raises NotSupported
    and Unavailable only if kvikio was asked for."""
    from gds.device import cufile

    if any(isinstance(each, CheckedSource) for each in sources):
        return Taken(Way.PINNED, "what is verified is hashed by the CPU"), {}
    files = {}
    try:
        if cufile.avoids_cufile():
            if not is_asked:
                return Taken(Way.PINNED, f"kvikio does without cuFile: {_AVOIDED}"), {}
            taken = Taken(Way.KVIKIO, f"{ASKED}=cufile, without it: {_AVOIDED}")
        for source in sources:
            files[source] = cufile.CuFile(source)
            stack.callback(files[source].close)
    except (NotSupported, Unavailable) as error:
        if is_asked:
            raise
        return Taken(Way.PINNED, str(error)), {}
    return taken, files


def _tell(taken: Taken, report: Report) -> None:
    log.debug("loads by %s: %s", taken.way.value, taken.reason)
    report(taken)


def _near_disk(sources: Sequence[SourceFile]) -> frozenset[int] | None:
    nodes = numa.nodes()
    if len(nodes) < 2:
        return None
    disks = (numa.node_of_disk(os.fstat(source.fd).st_dev) for source in sources[:1])
    return numa.cpus_near(disks, nodes, _allowed())


def _allowed() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))
