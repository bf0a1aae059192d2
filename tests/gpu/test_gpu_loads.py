"""Loads into GPU memory are those into memory of the host, byte for byte, on each way that the
machine has, in whichever stream, and leave nothing behind."""

import gc
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gds
from gds.probe.capability import Mode, probe
from kvfs.base.errors import Corrupt, Invalid, NoSpace, NotSupported
from tests.contract import client_store
from tests.gds.checkpoints import Meant, llama, meant, raw, write, write_shards
from tests.gds.loads.test_loading import EVERY_DTYPE

MIB = 1 << 20
BLOCK = meant("U8", (16 * MIB,), 1)


@pytest.fixture(params=["pinned", "kvikio", "cufile"])
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Each way in turn, forced: pinned copies, kvikio's own reads, and cuFile where it is GDS."""
    asked = str(request.param)
    if asked == "pinned":
        monkeypatch.setenv("KVFS_GPU_READS", asked)
        yield asked
        return
    compat = "ON" if asked == "kvikio" else "OFF"
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", compat)  # for programs that a test runs
    mode = probe(tmp_path)
    if mode.mode is Mode.POSIX or (asked == "cufile" and mode.mode is not Mode.GDS):
        pytest.skip(mode.mode_reason)
    monkeypatch.setenv("KVFS_GPU_READS", "cufile")
    with kvikio_with(compat):
        yield asked


def kvikio_with(compat: str) -> Any:
    """Until the block ends it uses cuFile, or does without."""
    from gds.device import cufile

    try:
        kvikio = cufile.require()
    except NotSupported as error:
        pytest.skip(str(error))
    return kvikio.defaults.set({"compat_mode": getattr(kvikio.CompatMode, compat)})


def devices() -> list[str]:
    """All that there are; one that is not where there are none, for the skip."""
    return [f"cuda:{at}" for at in range(max(1, len(probe().cuda.gpus)))]


def make_cold(path: Path) -> None:
    """cuFile is for what the page cache has not."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def assert_same(found: dict[str, Any], wanted: dict[str, Meant], device: str) -> None:
    assert set(found) == set(wanted)
    for name, each in wanted.items():
        assert str(found[name].device) == device
        assert raw(found[name].cpu()) == each.data, name
        if found[name].numel():
            assert found[name].data_ptr() % 16 == 0, name


@pytest.mark.parametrize("padding", [0, 1, 7, 8, 4000])
@pytest.mark.parametrize("device", devices())
def test_every_dtype_comes_whole(tmp_path: Path, way: str, padding: int, device: str) -> None:
    path = tmp_path / "a.safetensors"
    write(path, EVERY_DTYPE, padding)
    told: list[Any] = []
    for is_cold in (False, True):
        if is_cold:
            make_cold(path)
        assert_same(gds.load_file(path, device, report=told.append), EVERY_DTYPE, device)
    ways = [each for each in told if isinstance(each, gds.Taken)]
    assert {taken.way.name.lower() for taken in ways} == {way}


@pytest.mark.parametrize("device", devices())
@pytest.mark.usefixtures("way")
def test_several_files_of_odd_sizes_come_whole(tmp_path: Path, device: str) -> None:
    shards = [
        {f"{n}.{t}": meant("U8", (17 * MIB + 3 * t + 1,), 10 * n + t) for t in range(8)}
        for n in range(3)
    ]
    write_shards(tmp_path, shards)
    for path in tmp_path.glob("*.safetensors"):
        make_cold(path)
    assert_same(gds.load_model(tmp_path, device), shards[0] | shards[1] | shards[2], device)


@pytest.mark.parametrize("strategy", ["auto", "slice", "strided"])
@pytest.mark.usefixtures("way")
def test_ranks_and_dtypes_are_as_on_the_cpu(tmp_path: Path, strategy: str) -> None:
    import torch

    write_shards(tmp_path, [llama(1, 512), llama(1, 512, first=1)])
    for dtype in (None, torch.float32):
        asked: dict[str, Any] = {"rank": 1, "world_size": 4, "dtype": dtype, "strategy": strategy}
        wanted = gds.load_model(tmp_path, **asked)
        found = gds.load_model(tmp_path, "cuda:0", **asked)
        assert set(found) == set(wanted)
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            there = found[name].cpu().view(torch.uint8)
            assert torch.equal(there, tensor.view(torch.uint8)), name


@pytest.mark.usefixtures("way")
def test_memory_that_a_stream_still_writes_to_is_waited_for(tmp_path: Path) -> None:
    """The allocator gives a block at once to the stream that freed it, whatever that stream has
    yet to do with it: a run of 64 MiB, for cuFile a little more, which is rounded up."""
    import torch

    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": BLOCK for n in range(4)})
    with torch.cuda.stream(torch.cuda.Stream()):
        junk = torch.empty(80 * MIB, dtype=torch.uint8, device="cuda:0")
        torch.cuda._sleep(1_000_000_000)
        junk.fill_(0x5A)
        del junk
        make_cold(path)
        found = gds.load_file(path, "cuda:0")
        torch.cuda.synchronize()
    assert_same(found, dict.fromkeys(found, BLOCK), "cuda:0")


@pytest.mark.usefixtures("way")
def test_tensors_are_whole_to_every_stream_when_they_are_handed_over(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": BLOCK for n in range(12)})
    make_cold(path)
    wanted = torch.frombuffer(bytearray(BLOCK.data), dtype=torch.uint8).to("cuda:0")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for name, tensor in gds.iter_tensors(path, "cuda:0"):
        with torch.cuda.stream(stream):
            assert torch.equal(tensor, wanted), name


@pytest.mark.usefixtures("way")
def test_loads_of_several_threads_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {f"t{n}": meant("U8", (9 * MIB + n,), n) for n in range(8)}
    write(path, tensors)
    found: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: found.append(gds.load_file(path, "cuda:0")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for each in found:
        assert_same(each, tensors, "cuda:0")


@pytest.fixture
def memory() -> Iterator[Any]:
    """Bytes of the GPU that tensors have now, more than before; of all but this test's none."""
    import torch

    gc.collect()
    before = torch.cuda.memory_allocated(0)
    yield lambda: torch.cuda.memory_allocated(0) - before
    gc.collect()
    assert torch.cuda.memory_allocated(0) == before


@pytest.mark.usefixtures("way")
def test_who_drops_tensors_has_few_in_memory(tmp_path: Path, memory: Any) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {f"t{n:02d}": BLOCK for n in range(60)})
    make_cold(path)
    most = 0
    for _, tensor in gds.iter_tensors(path, "cuda:0"):
        most = max(most, memory())
        del tensor
    assert most < 512 * MIB


@pytest.mark.usefixtures("way", "memory")
def test_who_stops_early_leaves_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": BLOCK for n in range(20)})
    make_cold(path)
    found = gds.iter_tensors(path, "cuda:0")
    next(found)
    found.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]


@pytest.mark.usefixtures("way", "memory")
def test_a_read_that_fails_leaves_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": BLOCK for n in range(60)})
    make_cold(path)
    found = gds.iter_tensors(path, "cuda:0")
    next(found)
    os.truncate(path, 900 * MIB)  # more than is read ahead is missing
    with pytest.raises(Corrupt, match=path.name):
        for _, tensor in found:
            del tensor


@pytest.mark.usefixtures("way", "memory")
def test_a_gpu_that_is_full_names_the_tensor(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "a.safetensors"
    write(path, {f"t{n}": BLOCK for n in range(20)})
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated(0) + 100 * MIB
    torch.cuda.set_per_process_memory_fraction(room / total, 0)
    try:
        with pytest.raises(NoSpace, match=r"'t\d+'"):
            gds.load_file(path, "cuda:0")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": meant("U8", (3,), 1)})
    with pytest.raises(Invalid, match=r"cuda:99.*cuda:0"):
        gds.load_file(tmp_path / "a.safetensors", "cuda:99")


def test_the_gpu_that_is_current_is_meant_without_a_number(tmp_path: Path) -> None:
    import torch

    write(tmp_path / "a.safetensors", {"a": BLOCK})
    found = gds.load_file(tmp_path / "a.safetensors", "cuda")
    assert found["a"].device == torch.device("cuda", torch.cuda.current_device())


def test_the_probe_finds_the_gpus_that_torch_finds(tmp_path: Path) -> None:
    import torch

    found = probe(tmp_path)
    assert len(found.cuda.gpus) == torch.cuda.device_count()
    for at, gpu in enumerate(found.cuda.gpus):
        properties = torch.cuda.get_device_properties(at)
        assert gpu.name == properties.name
        assert math.isclose(gpu.total_bytes, properties.total_memory, rel_tol=0.05)
    assert found.torch.version
    assert found.mode_reason


def test_what_reads_by_itself_is_gds_or_pinned_copies(tmp_path: Path) -> None:
    told: list[Any] = []
    write(tmp_path / "a.safetensors", {"a": BLOCK})
    gds.load_file(tmp_path / "a.safetensors", "cuda:0", report=told.append)
    is_gds = probe(tmp_path).mode is Mode.GDS
    assert is_gds or told[0].way.value == "pinned copies"
    print(told[0])


def test_blocks_go_into_and_out_of_gpu_memory(tmp_path: Path) -> None:
    import torch

    import kvfs

    store = client_store.make(tmp_path / "store")
    with client_store.running_node(store, "1GiB"), kvfs.Client(store) as client:
        keys = [f"/cache/b{n}" for n in range(100)]
        device = torch.device("cuda:0")
        given = torch.randint(0, 256, (100, MIB), dtype=torch.uint8, device=device)
        stored = gds.write_blocks(keys, given, client=client)
        assert all(each.ok for each in stored), stored[:3]
        into = [torch.zeros(MIB, dtype=torch.uint8, device=device) for _ in range(101)]
        found = gds.read_blocks([*keys, "/cache/no"], into, client=client)
        assert [each.outcome for each in found] == [gds.Outcome.HIT] * 100 + [gds.Outcome.MISS]
        assert torch.equal(torch.stack(into[:100]), given)


# ---- contexts

CONTEXTS = """
import ctypes, sys, threading
import gds
gds.load_file(sys.argv[1], "cuda:" + sys.argv[2])
driver = ctypes.CDLL("libcuda.so.1")
for at in range(int(sys.argv[3])):
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(device), at) == 0
    asked = device, ctypes.byref(flags), ctypes.byref(active)
    assert driver.cuDevicePrimaryCtxGetState(*asked) == 0
    print(active.value, end="")
"""
ENTERED = """
import ctypes, threading
import torch
from gds.device.cuda import CudaDevice
torch.cuda.init()
device = CudaDevice(torch.device("cuda", 0))
driver = ctypes.CDLL("libcuda.so.1")
def current():
    found = ctypes.c_void_p()
    assert driver.cuCtxGetCurrent(ctypes.byref(found)) == 0
    return bool(found)
def enter():
    before = current()
    device.enter()
    print(before, current(), end="")
thread = threading.Thread(target=enter)
thread.start()
thread.join()
"""
FORKED = """
import os, sys
import torch
import gds
from kvfs.base.errors import NotSupported
torch.cuda.init()
child = os.fork()
if not child:
    try:
        gds.load_file(sys.argv[1], "cuda:0")
    except NotSupported as error:
        os._exit(0 if "fork" in str(error) else 2)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end="")
"""


def said(program: str, *arguments: str) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.usefixtures("way")
def test_a_load_makes_a_context_on_its_gpu_alone(tmp_path: Path) -> None:
    number = len(probe().cuda.gpus)
    if number < 2:
        pytest.skip("there is one GPU, so none that a load should leave alone")
    path = tmp_path / "a.safetensors"
    write(path, EVERY_DTYPE | {"block": BLOCK})
    for at in range(number):
        make_cold(path)
        alone = "".join(str(int(each == at)) for each in range(number))
        assert said(CONTEXTS, str(path), str(at), str(number)) == alone


def test_a_new_thread_has_the_context_of_the_gpu_it_enters() -> None:
    assert said(ENTERED) == "False True"


def test_a_process_forked_from_one_with_cuda_is_told_so(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a": BLOCK})
    assert said(FORKED, str(tmp_path / "a.safetensors")) == "0"
