"""Loads to a device: the same bytes as to the host, whatever it does late, or does not do at all.

The device is one in memory of the host; that CUDA's own behaves so is for `tests/gpu`.
"""

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kvfs.base.errors import Corrupt, Invalid, KvfsError, NoSpace, NotSupported, Unavailable
from tests.gds.checkpoints import assert_same, llama, meant, write, write_shards
from tests.gds.loads.test_loading import EVERY_DTYPE

if TYPE_CHECKING:
    import torch

    from gds.io.source import SourceFile
    from gds.io.target import Target
    from tests.gds.late_device import LateDevice

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
Maker = Callable[[Any, "LateDevice", "torch.dtype | None", Sequence["SourceFile"]], "Target"]


def by_buffers(
    plan: Any, device: "LateDevice", dtype: Any, _sources: Sequence["SourceFile"]
) -> Any:
    from gds.device.device_target import DeviceTarget

    return DeviceTarget(plan, device, dtype)


def tensors(
    path: Path,
    device: "LateDevice",
    *,
    make: Maker = by_buffers,
    dtype: "torch.dtype | None" = None,
    rank: int = 0,
    ranks: int = 1,
    strategy: str = "auto",
    budget: int | None = None,
    opened: Callable[[], object] = lambda: None,
) -> Generator[tuple[str, "torch.Tensor"], None, None]:
    """As `gds.iter_tensors`, to this device."""
    from gds.format.checkpoint import open_checkpoint
    from gds.load import _Asked, _wanted
    from gds.loader import Loader
    from gds.plan.load_plan import Strategy, make_plan

    with open_checkpoint(path) as checkpoint:
        opened()
        asked = _Asked(path, rank=rank, ranks=ranks, dtype=dtype)
        wanted = list(_wanted(checkpoint, asked))
        plan = make_plan(wanted, Strategy(strategy), 32 * MIB)
        target = make(plan, device, dtype, checkpoint.sources)
        loader = Loader(plan, checkpoint.sources, target, threads=4, budget=budget)
        with contextlib.closing(loader.tensors()) as found:
            for at, tensor in found:
                yield wanted[at].tensor.name, tensor


def assert_quiet(device: "LateDevice") -> None:
    """Nothing is under way, lent, or left to write into memory that was handed over."""
    assert device.pending == 0
    assert device.lent == 0
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]
    device.do_all()


@pytest.fixture
def device() -> "LateDevice":
    from tests.gds.late_device import LateDevice

    return LateDevice()


@pytest.mark.parametrize("padding", [0, 1, 7, 4000])
def test_every_dtype_comes_whole_and_aligned(
    tmp_path: Path, device: "LateDevice", padding: int
) -> None:
    write(tmp_path / "a.safetensors", EVERY_DTYPE, padding)
    found = dict(tensors(tmp_path / "a.safetensors", device))
    assert_quiet(device)
    assert_same(found, EVERY_DTYPE)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found.values() if tensor.numel())


@pytest.mark.parametrize("strategy", ["auto", "slice", "strided"])
def test_ranks_and_other_dtypes_are_cut_and_converted_there(
    tmp_path: Path, device: "LateDevice", strategy: str
) -> None:
    import torch

    import gds

    write_shards(tmp_path, [llama(1, 256), llama(1, 256, first=1)])
    for dtype in (None, torch.float32):
        found = dict(tensors(tmp_path, device, dtype=dtype, rank=1, ranks=4, strategy=strategy))
        assert_quiet(device)
        wanted = gds.load_model(tmp_path, rank=1, world_size=4, dtype=dtype, strategy=strategy)
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_buffers_are_used_again_when_their_copies_are_done(
    tmp_path: Path, device: "LateDevice"
) -> None:
    shards = [
        {f"{n}.{t}": meant("U8", (13 * MIB + t,), 10 * n + t) for t in range(6)} for n in (1, 2)
    ]
    write_shards(tmp_path, shards)
    found = dict(tensors(tmp_path, device, budget=48 * MIB))
    assert_quiet(device)
    assert_same(found, shards[0] | shards[1])
    assert 2 <= device.most_lent <= 2 * 4


def test_who_stops_early_leaves_no_copy_under_way(tmp_path: Path, device: "LateDevice") -> None:
    write(tmp_path / "a.safetensors", {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(8)})
    found = tensors(tmp_path / "a.safetensors", device)
    next(found)
    found.close()
    assert_quiet(device)


def refused(kind: type[KvfsError], found: Any, *said: str) -> None:
    with pytest.raises(kind) as caught:
        list(found)
    assert all(each in str(caught.value) for each in said), caught.value


def test_a_read_that_fails_is_told_and_frees_all(tmp_path: Path, device: "LateDevice") -> None:
    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(4)})
    found = tensors(path, device, opened=lambda: os.truncate(path, 20 * MIB))
    refused(Corrupt, found, path.name, "truncated", "'t")
    assert_quiet(device)


def test_each_thread_that_reads_enters_the_device_once(
    tmp_path: Path, device: "LateDevice"
) -> None:
    write(tmp_path / "a.safetensors", {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(8)})
    dict(tensors(tmp_path / "a.safetensors", device))
    assert sorted(device.entered) == [f"kvfs-load-{n}" for n in range(4)]


def test_loads_of_every_kind_use_the_same_buffers(tmp_path: Path, device: "LateDevice") -> None:
    from gds.io.target import STAGE_BYTES

    write(tmp_path / "a.safetensors", llama(2, 2048))
    dict(tensors(tmp_path / "a.safetensors", device))
    assert device.pinned
    dict(tensors(tmp_path / "a.safetensors", device, rank=1, ranks=2, strategy="slice"))
    assert sum(device.pinned.values()) <= 2 * 4 * STAGE_BYTES


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_device_without_room_names_the_tensor(tmp_path: Path, ranks: int) -> None:
    from tests.gds.late_device import LateDevice

    device = LateDevice(room=24 * MIB)
    name = "model.layers.0.mlp.down_proj.weight"
    write(tmp_path / "a.safetensors", {name: meant("U8", (32, 2 * MIB), 1)})
    refused(NoSpace, tensors(tmp_path, device, ranks=ranks), name, "little")
    assert_quiet(device)


def test_a_device_without_room_for_a_buffer_names_the_tensor(tmp_path: Path) -> None:
    import torch

    from tests.gds.late_device import LateDevice

    device = LateDevice(room=10 * MIB)
    write(tmp_path / "a.safetensors", {"w": meant("BF16", (MIB,), 1)})
    found = tensors(tmp_path / "a.safetensors", device, dtype=torch.float32)
    refused(NoSpace, found, "'w'", "little")
    assert_quiet(device)


def test_a_device_that_fails_ends_the_load(tmp_path: Path) -> None:
    from tests.gds.late_device import LateDevice

    def fails() -> None:
        raise Unavailable("the device fell off the bus")

    device = LateDevice(fails=fails)
    write(tmp_path / "a.safetensors", {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(8)})
    refused(Unavailable, tensors(tmp_path / "a.safetensors", device), "fell off the bus")
    assert device.lent == 0


# ---- cuFile


class FakeCuFile:
    """kvikio's, on memory of the host: no more than 3 MiB a read."""

    reads: ClassVar[list[tuple[int, int, int]]]
    error: ClassVar[str] = ""
    raises_at_end: ClassVar[bool] = True
    """As without GDS; with it a read ends there."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)

    def raw_read(self, buffer: "torch.Tensor", _size: int | None, file_offset: int) -> int:
        if self.error:
            raise RuntimeError(self.error)
        if self.raises_at_end and file_offset + len(buffer) > os.fstat(self._fd).st_size:
            raise RuntimeError("POSIX error on pread: EOF")
        self.reads.append((buffer.data_ptr(), file_offset, len(buffer)))
        return os.preadv(self._fd, [memoryview(buffer.numpy())[: 3 * MIB]], file_offset)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> type[FakeCuFile]:
    from gds.io.source import SourceFile

    made = type("Made", (FakeCuFile,), {"reads": []})
    module = types.ModuleType("kvikio")
    module.CuFile = made  # type: ignore[attr-defined]
    module.defaults = types.ModuleType("kvikio.defaults")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", module.defaults)
    monkeypatch.setattr(SourceFile, "is_cold", lambda _self, _begin, _end: True)
    return made


@contextlib.contextmanager
def cufile() -> Any:
    """Makes targets that read by cuFile."""
    from gds.device.cufile import CuFile, CuFileTarget

    with contextlib.ExitStack() as stack:

        def make(plan: Any, device: Any, dtype: Any, sources: Sequence["SourceFile"]) -> Any:
            files = {source: CuFile(source) for source in sources}
            for file in files.values():
                stack.callback(file.close)
            return CuFileTarget(plan, device, dtype, files)

        yield make


@pytest.mark.parametrize("padding", [0, 1, 8, 4000])
def test_cufile_reads_whole_pages_into_place(
    tmp_path: Path, device: "LateDevice", kvikio: type[FakeCuFile], padding: int
) -> None:
    write(tmp_path / "a.safetensors", EVERY_DTYPE, padding)
    with cufile() as make:
        found = dict(tensors(tmp_path / "a.safetensors", device, make=make))
    assert_quiet(device)
    assert_same(found, EVERY_DTYPE)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found.values() if tensor.numel())
    assert len(kvikio.reads) > 2
    assert all(address % 4096 == offset % 4096 == 0 for address, offset, _ in kvikio.reads)


def test_cufile_leaves_what_the_page_cache_holds_to_buffers(
    tmp_path: Path,
    device: "LateDevice",
    kvikio: type[FakeCuFile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gds.io.source import SourceFile

    monkeypatch.setattr(SourceFile, "is_cold", lambda _self, begin, _end: begin > 8 * MIB)
    write(tmp_path / "a.safetensors", EVERY_DTYPE)
    with cufile() as make:
        found = dict(tensors(tmp_path / "a.safetensors", device, make=make))
    assert_quiet(device)
    assert_same(found, EVERY_DTYPE)
    assert kvikio.reads
    assert min(offset for _, offset, _ in kvikio.reads) >= 8 * MIB


def test_cufile_reads_what_the_kernel_tells_nothing_of(
    tmp_path: Path,
    device: "LateDevice",
    kvikio: type[FakeCuFile],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gds.io.source import SourceFile

    monkeypatch.setattr(SourceFile, "is_cold", lambda _self, _begin, _end: None)
    write(tmp_path / "a.safetensors", EVERY_DTYPE)
    with cufile() as make:
        found = dict(tensors(tmp_path / "a.safetensors", device, make=make))
    assert_same(found, EVERY_DTYPE)
    assert kvikio.reads


@pytest.mark.parametrize("raises_at_end", [True, False])
def test_what_cufile_cannot_read_is_told(
    tmp_path: Path, device: "LateDevice", kvikio: type[FakeCuFile], raises_at_end: bool
) -> None:
    path = tmp_path / "a.safetensors"
    kvikio.raises_at_end = raises_at_end
    write(path, {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(4)})
    with cufile() as make:
        cut = tensors(path, device, make=make, opened=lambda: os.truncate(path, 20 * MIB))
        refused(Corrupt, cut, path.name, "truncated")
    write(path, {f"t{n}": meant("U8", (8 * MIB,), n) for n in range(4)})
    kvikio.error = "cuFile error: internal"
    with cufile() as make:
        refused(Unavailable, tensors(path, device, make=make), path.name, "internal", "'t")
    assert_quiet(device)


# ---- which way


def test_the_way_follows_from_the_mode_unless_it_is_asked_for() -> None:
    from gds.probe.capability import Mode
    from gds.probe.io_path import Way, choose

    assert choose(Mode.GDS, "nvidia-fs 2.22", "").way is Way.CUFILE
    assert choose(Mode.GDS, "nvidia-fs 2.22", "pinned").way is Way.PINNED
    for mode in (Mode.COMPATIBILITY, Mode.POSIX):
        taken = choose(mode, "no nvidia-fs", "auto")
        assert taken.way is Way.PINNED
        assert "no nvidia-fs" in taken.reason
    assert choose(Mode.COMPATIBILITY, "no nvidia-fs", "cufile").way is Way.CUFILE
    with pytest.raises(NotSupported, match="kvikio is not installed"):
        choose(Mode.POSIX, "kvikio is not installed", "cufile")
    with pytest.raises(Invalid, match="KVFS_GPU_READS=fast"):
        choose(Mode.GDS, "", "fast")


def test_a_load_tells_its_way(tmp_path: Path) -> None:
    import gds
    from gds.probe.io_path import Way

    told: list[Any] = []
    write(tmp_path / "a.safetensors", {"a": meant("U8", (3,), 1)})
    gds.load_file(tmp_path / "a.safetensors", report=told.append)
    assert told[0].way is Way.HOST
    assert told[0].reason


def test_a_device_of_another_kind_is_refused_with_what_there_is() -> None:
    from gds.probe.io_path import device_of

    with pytest.raises(NotSupported, match="cpu and cuda"):
        device_of("meta")
    with pytest.raises(Invalid, match="nonsense"):
        device_of("nonsense")


# ---- pinned buffers


def test_pinned_buffers_are_lent_again_and_kept_within_a_bound() -> None:
    from gds.device.pinned import PinnedPool

    registered: list[int] = []
    pool = PinnedPool(
        lambda address, _size: registered.append(address) or "",
        registered.remove,
        kept_bytes=3 * MIB,
    )
    lent = [pool.lend(MIB) for _ in range(5)]
    assert len(set(registered)) == 5
    assert all(address % 4096 == 0 for address in registered)
    for each in lent:
        pool.give_back(each)
    assert len(registered) == 3
    assert pool.lend(MIB).raw.data_ptr() in registered
    assert len(pool.lend(2 * MIB).memory) == 2 * MIB
    assert len(registered) == 4


def test_memory_that_cannot_be_pinned_is_lent_and_not_kept() -> None:
    from gds.device.pinned import PinnedPool

    refusals = ["no more pinned memory", ""]
    released: list[int] = []
    pool = PinnedPool(lambda _address, _size: refusals.pop(0), released.append, kept_bytes=0)
    lent = pool.lend(MIB)
    assert (len(lent.memory), lent.refused) == (MIB, "no more pinned memory")
    pool.give_back(lent)
    assert not released
    lent = pool.lend(MIB)
    assert not lent.refused
    pool.give_back(lent)
    assert released == [lent.raw.data_ptr()]
