"""Loads to GPUs that are made up: which context they need, which errors they tell, and which way
they take where something of the machine will not do."""

import ctypes
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import gds
from kvfs.base.errors import KvfsError, NoSpace, NotSupported, Unavailable
from tests.gds.checkpoints import Meant, assert_same, meant, write
from tests.gds.loads.test_loading import EVERY_DTYPE

if TYPE_CHECKING:
    import torch

    from gds.probe.capability import Mode
    from tests.gds.fake_cuda import Cuda

MIB = 1 << 20
BLOCKS = {f"t{n}": meant("U8", (20 * MIB,), n) for n in range(4)}
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture
def pinned() -> dict[int, int]:
    """Sizes of what is pinned, by address."""
    return {}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, pinned: dict[int, int]) -> "Cuda":
    """Two GPUs."""
    import torch

    from gds.device import cuda
    from tests.gds.fake_cuda import Cuda, Torch

    def pin(address: int, size: int) -> str:
        assert made.bound is not None, "the driver pins memory where the thread has a context"
        pinned[address] = size
        return ""

    def copy(to: int, source: int, size: int, _stream: int) -> str:
        assert made.bound is not None, "the driver copies where the thread has a context"
        ctypes.memmove(to, source, size)
        return ""

    made = Cuda()
    monkeypatch.setattr(cuda, "torch", Torch(made))
    monkeypatch.setattr(cuda, "copy_async", copy)
    monkeypatch.setattr(cuda, "pin", pin)
    monkeypatch.setattr(cuda, "unpin", pinned.pop)
    monkeypatch.setattr(cuda, "_made_pool", functools.cache(cuda._made_pool.__wrapped__))
    monkeypatch.setattr("gds.probe.io_path._gpus", lambda _device: 2)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("KVFS_GPU_READS", raising=False)
    return made


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Callable[["Mode"], None]:
    """Has the probe find what it is told."""
    from gds.probe.capability import Capability, probe

    def find(mode: "Mode") -> None:
        def found(path: Any = None) -> Capability:
            return probe(path)._replace(mode=mode, mode_reason="as it was made up")

        monkeypatch.setattr("gds.probe.io_path.probe", found)

    return find


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, cuda: "Cuda") -> types.ModuleType:
    """As it reads by the driver: with the context that the thread has. Files count as cold. It
    would use cuFile, unless its `defaults` are told otherwise."""
    from gds.io.source import SourceFile

    class CuFile:
        def __init__(self, path: str) -> None:
            self._fd = os.open(path, os.O_RDONLY)

        def raw_read(self, buffer: "torch.Tensor", _size: int | None, file_offset: int) -> int:
            if cuda.bound is None:
                raise RuntimeError("cuFile: no context")
            return os.preadv(self._fd, [memoryview(buffer.numpy())], file_offset)

        def close(self) -> None:
            os.close(self._fd)

    module = types.ModuleType("kvikio")
    defaults = types.ModuleType("kvikio.defaults")
    module.CuFile = CuFile  # type: ignore[attr-defined]
    module.defaults = defaults  # type: ignore[attr-defined]
    defaults.is_compat_mode_preferred = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(SourceFile, "is_cold", lambda _self, _begin, _end: True)
    return module


def load(path: Path, device: str, wanted: dict[str, Meant]) -> list[Any]:
    """What was told of the way, and in the end of the stages."""
    told: list[Any] = []
    write(path, wanted)
    assert_same(gds.load_file(path, device, report=told.append), wanted)
    return told


def refused(kind: type[KvfsError], path: Path, device: str, *said: str) -> None:
    with pytest.raises(kind) as caught:
        gds.load_file(path, device)
    assert all(each in str(caught.value) for each in said), caught.value


@pytest.mark.parametrize("index", [0, 1])
def test_a_load_makes_a_context_on_its_gpu_alone(tmp_path: Path, cuda: "Cuda", index: int) -> None:
    load(tmp_path / "a.safetensors", f"cuda:{index}", EVERY_DTYPE)
    assert cuda.contexts == {index}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.usefixtures("kvikio")
def test_every_thread_has_the_context_that_cufile_reads_with(
    tmp_path: Path,
    cuda: "Cuda",
    mode: Callable[["Mode"], None],
    index: int,
) -> None:
    from gds.probe.capability import Mode
    from gds.probe.io_path import Way

    mode(Mode.GDS)
    one_run = {"t": meant("U8", (100 * MIB,), 1)}
    taken, stages = load(tmp_path / "a.safetensors", f"cuda:{index}", one_run)
    assert taken.way is Way.CUFILE
    assert cuda.contexts == {index}
    assert (stages.read.size_bytes, stages.copy.size_bytes) == (100 * MIB, 0)


# ---- what fails


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError"])
def test_a_gpu_that_is_full_and_one_that_is_dead_are_told_apart(
    tmp_path: Path, cuda: "Cuda", name: str
) -> None:
    import torch

    def fails() -> None:
        raise getattr(torch, name)("CUDA says no\nand gives advice")

    write(tmp_path / "a.safetensors", BLOCKS)
    cuda.fails = fails
    is_full = name == "OutOfMemoryError"
    named = ["'t0'"] if is_full else ["cuda:1"]
    kind = NoSpace if is_full else Unavailable
    refused(kind, tmp_path / "a.safetensors", "cuda:1", "CUDA says no", *named)


def test_a_gpu_that_others_have_for_themselves_is_unavailable(
    tmp_path: Path, cuda: "Cuda", monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_device: object) -> None:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(cuda, "mem_get_info", busy)
    write(tmp_path / "a.safetensors", BLOCKS)
    refused(Unavailable, tmp_path / "a.safetensors", "cuda:0", "busy")


@pytest.mark.usefixtures("cuda")
def test_a_process_that_cannot_start_cuda_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def forked() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with ...")

    monkeypatch.setattr(torch.cuda, "init", forked)
    monkeypatch.setattr(
        "gds.probe.io_path._gpus", lambda _device: pytest.fail("the driver knows of no fork")
    )
    write(tmp_path / "a.safetensors", BLOCKS)
    refused(NotSupported, tmp_path / "a.safetensors", "cuda:0", "forked", "kvfs doctor")


def test_nothing_is_under_way_of_work_that_failed_halfway(cuda: "Cuda") -> None:
    import torch

    from gds.device.cuda import CudaDevice

    def work() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    queue = CudaDevice(torch.device("cuda", 0)).queue()
    with pytest.raises(NoSpace, match="out of memory"):
        queue.submit(work)
    assert len(cuda.synchronized) == 1
    queue.submit(int)
    assert len(cuda.synchronized) == 1


# ---- what will not do


@pytest.mark.usefixtures("cuda")
def test_memory_that_cannot_be_pinned_is_copied_from_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gds.probe.io_path import Way

    monkeypatch.setattr("gds.device.cuda.pin", lambda _address, _size: "operation not permitted")
    *told, stages = load(tmp_path / "a.safetensors", "cuda:0", BLOCKS)
    assert [taken.way for taken in told] == [Way.PINNED, Way.PAGEABLE]
    assert "not permitted" in told[1].reason
    assert (stages.read.size_bytes, stages.copy.size_bytes) == (80 * MIB, 80 * MIB)


@pytest.mark.parametrize("fault", ["cannot be imported", "cannot start", "cannot open"])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@pytest.mark.usefixtures("cuda")
def test_without_a_kvikio_that_works_loads_go_by_buffers(
    tmp_path: Path,
    kvikio: types.ModuleType,
    mode: Callable[["Mode"], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    kind: type[Exception],
) -> None:
    from gds.probe.capability import Mode
    from gds.probe.io_path import Way

    def fails(*_arguments: object) -> None:
        raise kind("it has to be a positive integer")

    mode(Mode.GDS)
    if fault == "cannot open":
        kvikio.CuFile = fails  # type: ignore[attr-defined]
    elif fault == "cannot start":
        kvikio.defaults.is_compat_mode_preferred = fails
    else:
        monkeypatch.setitem(sys.modules, "kvikio", None)
    path = tmp_path / "a.safetensors"
    told, _ = load(path, "cuda:0", BLOCKS)
    assert told.way is Way.PINNED
    assert "kvikio cannot" in told.reason or "positive integer" in told.reason
    monkeypatch.setenv("KVFS_GPU_READS", "cufile")
    gone = fault == "cannot be imported"
    refused(NotSupported if gone else Unavailable, path, "cuda:0", told.reason)


@pytest.mark.parametrize("found", ["GDS", "COMPATIBILITY"])
@pytest.mark.usefixtures("cuda")
def test_what_kvikio_reads_without_cufile_is_not_said_to_be_read_by_cufile(
    tmp_path: Path,
    kvikio: types.ModuleType,
    mode: Callable[["Mode"], None],
    monkeypatch: pytest.MonkeyPatch,
    found: str,
) -> None:
    from gds.probe.capability import Mode
    from gds.probe.io_path import Way

    mode(Mode[found])
    kvikio.defaults.is_compat_mode_preferred = lambda: True
    told, _ = load(tmp_path / "a.safetensors", "cuda:0", BLOCKS)
    assert told.way is Way.PINNED
    monkeypatch.setenv("KVFS_GPU_READS", "cufile")
    told, stages = load(tmp_path / "b.safetensors", "cuda:0", BLOCKS)
    assert told.way is Way.KVIKIO
    assert (stages.read.size_bytes, stages.copy.size_bytes) == (80 * MIB, 0)


@pytest.mark.usefixtures("cuda")
def test_cufile_is_not_opened_where_it_would_never_come_back(
    tmp_path: Path,
    kvikio: types.ModuleType,
    mode: Callable[["Mode"], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gds.probe.capability import Mode
    from gds.probe.io_path import Way

    mode(Mode.POSIX)  # as the probe has it without /proc/modules
    kvikio.CuFile = lambda _path: pytest.fail("cuFile was opened")  # type: ignore[attr-defined]
    path = tmp_path / "a.safetensors"
    told, _ = load(path, "cuda:0", BLOCKS)
    assert told.way is Way.PINNED
    monkeypatch.setenv("KVFS_GPU_READS", "cufile")
    refused(NotSupported, path, "cuda:0", "KVFS_GPU_READS=cufile", "kvfs doctor")


# ---- the benchmark's clock


@pytest.mark.usefixtures("cuda")
def test_copies_of_a_load_can_be_timed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from benchmarks import _gpu_rows

    turns = itertools.count()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1

        def record(self, _stream: object = None) -> None:
            self.at = next(turns)

        def elapsed_time(self, later: "Event") -> float:
            return (later.at - self.at) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with _gpu_rows.timed_copies() as copies:
        load(tmp_path / "a.safetensors", "cuda:0", BLOCKS)
        assert not copies
    assert len(copies) >= 80 // 16  # reads have 16 MiB
    assert {moment for copy in copies for moment in copy} == set(range(1, 1 + 2 * len(copies)))
    load(tmp_path / "a.safetensors", "cuda:0", BLOCKS)
    assert next(turns) == 1 + 2 * len(copies)
