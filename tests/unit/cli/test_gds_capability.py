"""What the probe of GPU loads decides, from machines that are made up here."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.commands.service import doctor_loads
from gds.device.cuda_driver import Driver, Gpu, ask_driver, pin, unpin
from gds.io.direct_io import Alignment, alignment
from gds.probe import numa
from gds.probe.capability import (
    BackingPlace,
    Capability,
    Mode,
    Package,
    mode_of,
    own_reads,
    probe,
    torch_package,
)

H200 = Driver((Gpu("NVIDIA H200", "0000:1b:00.0", 1 << 37),), "13.0", "")
NO_GPU = Driver((), "", "no CUDA driver: libcuda.so.1 cannot be loaded")
KVIKIO = Package("26.10.0", "")
NO_KVIKIO = Package("", "kvikio is not installed")


def place(filesystem: str, nvme: bool = True, node: int | None = None) -> BackingPlace:
    return BackingPlace(filesystem, "/data", None, nvme, node)


def bare(cuda: Driver, kvikio: Package, nvidia_fs: str, where: BackingPlace | None) -> Capability:
    """A machine of one node, without torch; no mode was found yet."""
    return Capability(
        cuda=cuda,
        driver="580.159.03",
        gpu_nodes=(1,) * len(cuda.gpus),
        torch=Package("", "torch is not installed"),
        kvikio=kvikio,
        lists_modules=True,
        own_reads="",
        nvidia_fs=nvidia_fs,
        place=where,
        mode=Mode.POSIX,
        mode_reason="",
        native_aio="",
        huge_pages="madvise",
        nodes={0: frozenset({0})},
        network_nodes={"eth0": None},
    )


def with_mode(found: Capability) -> Capability:
    mode, reason = mode_of(found)
    return found._replace(mode=mode, mode_reason=reason)


def machine(cuda: Driver, kvikio: Package, nvidia_fs: str, nodes: int, torch: str) -> Capability:
    found = bare(cuda, kvikio, nvidia_fs, place("ext4", node=0))
    return with_mode(
        found._replace(
            torch=Package(torch, "" if torch else "torch is not installed"),
            native_aio="io_setup: Operation not permitted" if nodes == 2 else "",
            huge_pages="never" if nodes == 2 else "madvise",
            nodes={n: frozenset({n}) for n in range(nodes)},
        )
    )


@pytest.mark.parametrize(
    ("cuda", "kvikio", "nvidia_fs", "where", "mode", "said"),
    [
        (H200, KVIKIO, "2.22", place("ext4"), Mode.GDS, "ext4 on NVMe"),
        (H200, KVIKIO, "2.22", place("lustre", nvme=False), Mode.GDS, "2.22"),
        (H200, KVIKIO, "2.22", None, Mode.GDS, "2.22"),
        (H200, KVIKIO, "2.22", place("xfs", nvme=False), Mode.COMPATIBILITY, "/data"),
        (H200, KVIKIO, "2.22", place("overlay"), Mode.COMPATIBILITY, "overlay"),
        (H200, KVIKIO, "2.22", place(""), Mode.COMPATIBILITY, "unknown filesystem"),
        (H200, KVIKIO, "", place("ext4"), Mode.COMPATIBILITY, "nvidia-fs"),
        (H200, NO_KVIKIO, "2.22", place("ext4"), Mode.POSIX, "kvikio is not installed"),
        (NO_GPU, KVIKIO, "2.22", place("ext4"), Mode.POSIX, "libcuda.so.1"),
    ],
)
def test_the_mode_of_cufile_follows_from_what_is_there(
    cuda: Driver, kvikio: Package, nvidia_fs: str, where: BackingPlace | None, mode: Mode, said: str
) -> None:
    found, reason = mode_of(bare(cuda, kvikio, nvidia_fs, where))
    assert found is mode
    assert said in reason


GDS = with_mode(bare(H200, KVIKIO, "2.22", place("ext4")))


def test_cufile_is_left_alone_where_it_would_never_come_back() -> None:
    found = with_mode(GDS._replace(lists_modules=False))
    assert found.mode is Mode.POSIX
    assert "/proc/modules" in found.mode_reason
    (line,) = (each for each in doctor_loads.show(found) if each.name == "GPUDirect Storage")
    assert not line.available
    assert "/proc/modules" in line.remedy


@pytest.mark.parametrize(
    ("asked", "udev", "said"),
    [
        ("", True, ""),
        ("AUTO", True, ""),
        ("", False, "cannot be read"),
        ("ON", True, "KVIKIO_COMPAT_MODE=ON"),
        ("true", True, "KVIKIO_COMPAT_MODE=true"),
        ("OFF", False, ""),
    ],
)
def test_who_has_kvikio_read_without_cufile_is_told_so(
    tmp_path: Path, asked: str, udev: bool, said: str
) -> None:
    why = own_reads({"KVIKIO_COMPAT_MODE": asked}, tmp_path / ("" if udev else "nothing"))
    assert bool(why) is bool(said)
    assert said in why
    found = with_mode(GDS._replace(own_reads=why))
    assert found.mode is (Mode.COMPATIBILITY if said else Mode.GDS)
    assert why in found.mode_reason
    assert all(line.available or line.remedy for line in doctor_loads.show(found))


def test_a_torch_that_was_built_without_cuda_is_of_no_use() -> None:
    assert torch_package(Package("2.13.0", "")).version == "2.13.0"
    assert torch_package(Package("2.13.0+cu130", "")).version == "2.13.0+cu130"
    assert "without CUDA" in torch_package(Package("2.13.0+cpu", "")).reason


@pytest.mark.parametrize("text", ["0-3,8", "8,0-3\n", "0,1,2,3,8"])
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(text: str) -> None:
    assert numa.parse_cpus(text) == {0, 1, 2, 3, 8}
    assert not numa.parse_cpus("\n")


NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3}), 2: frozenset[int]()}
ALL = frozenset({0, 1, 2, 3})


@pytest.mark.parametrize(
    ("wanted", "nodes", "allowed", "cpus"),
    [
        ((1, 0), NODES, ALL, {2, 3}),
        ((None, 0), NODES, ALL, {0, 1}),
        ((2, 0), NODES, ALL, {0, 1}),
        ((1, None), NODES, frozenset({0, 3}), {3}),
        ((1, 0), NODES, frozenset({0}), None),
        ((None, None), NODES, ALL, None),
        ((7,), NODES, ALL, None),
        ((0,), {0: ALL}, ALL, None),
        ((0,), {}, ALL, None),
    ],
)
def test_threads_run_near_the_first_device_whose_node_is_known(
    wanted: tuple[int | None, ...],
    nodes: dict[int, frozenset[int]],
    allowed: frozenset[int],
    cpus: set[int] | None,
) -> None:
    assert numa.cpus_near(wanted, nodes, allowed) == cpus


def test_nodes_of_devices_are_read_from_sysfs(tmp_path: Path) -> None:
    nvme = tmp_path / "devices/pci0000:20/0000:21:00.0"
    disk = nvme / "nvme/nvme0/nvme0n1/nvme0n1p1"
    disk.mkdir(parents=True)
    (nvme / "numa_node").write_text("1\n")
    virtual = tmp_path / "devices/virtual/block/dm-0"
    (virtual / "slaves").mkdir(parents=True)
    (virtual / "slaves/nvme0n1p1").symlink_to(disk)
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / "dev/block/259:1").symlink_to(disk)
    (tmp_path / "dev/block/252:0").symlink_to(virtual)
    gpu = tmp_path / "bus/pci/devices/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("0\n")
    for name, node in (("net/eth0", "1"), ("net/eth1", "-1"), ("infiniband/mlx5_0", "0")):
        card = tmp_path / "class" / name / "device"
        card.mkdir(parents=True)
        (card / "numa_node").write_text(node)
    (tmp_path / "class/net/lo").mkdir()
    for number, cpus in enumerate(("0-1", "2-3")):
        directory = tmp_path / f"devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpus)

    for device in (os.makedev(259, 1), os.makedev(252, 0)):
        assert numa.node_of_disk(device, tmp_path) == 1
        assert numa.is_on_nvme(device, tmp_path)
    assert numa.node_of_disk(os.makedev(0, 40), tmp_path) is None
    assert not numa.is_on_nvme(os.makedev(0, 40), tmp_path)
    assert numa.node_of_pci("0000:1b:00.0", tmp_path) == 0
    assert numa.network_nodes(tmp_path) == {"eth0": 1, "eth1": None, "mlx5_0": 0}
    assert numa.nodes(tmp_path) == {0: {0, 1}, 1: {2, 3}}


def test_what_o_direct_asks_for_is_enough_for_it(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 256)
    with open(path, "rb") as file:
        found = alignment(file.fileno())
    if found is None:
        pytest.skip("this kernel or filesystem tells no alignment")
    direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        from gds.io.memory import allocate

        memory = allocate(1 << 16)[found.memory : found.memory + 4 * found.offset]
        assert os.preadv(direct, [memory], found.offset) == 4 * found.offset
        assert memory == path.read_bytes()[found.offset : 5 * found.offset]
    finally:
        os.close(direct)


def test_the_probe_says_what_lies_beneath_a_file_and_a_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    found = probe(tmp_path / "f").place
    assert found is not None
    assert found.filesystem == (probe(tmp_path).place or found).filesystem
    assert not found.mount or tmp_path.is_relative_to(found.mount)
    assert probe().place is None


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device"; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int at) { *device = at + 5; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1024ul << 30; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "GPU", size); return 0; }
int cuDeviceGetPCIBusId(char *address, int size, int device) {
    strncpy(address, device == 5 ? "0000:1B:00.0" : "0000:C3:00.0", size);
    return 0;
}
int cuMemHostRegister_v2(char *memory, size_t bytes, unsigned flags) {
    return FAILS || memory != (char *)0x7F0000001000 || bytes != 1ul << 33 || flags != 1;
}
int cuMemHostUnregister(char *memory) { return FAILS; }
"""


def driver(directory: Path, fails: int) -> str:
    """A library that answers as CUDA's driver does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, to make a driver for the test")
    source, library = directory / "cuda.c", directory / f"libcuda{fails}.so"
    source.write_text("#include <stddef.h>" + DRIVER.replace("FAILS", str(fails)))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_the_driver_tells_its_gpus_or_why_there_are_none(tmp_path: Path) -> None:
    found = ask_driver(driver(tmp_path, 0))
    assert found.cuda == "13.0"
    assert [gpu.address for gpu in found.gpus] == ["0000:1b:00.0", "0000:c3:00.0"]
    assert found.gpus[0] == Gpu("GPU", "0000:1b:00.0", 1024 << 30)
    refused = ask_driver(driver(tmp_path, 100))
    assert not refused.gpus
    assert "no CUDA-capable device" in refused.reason
    assert "no CUDA driver" in ask_driver(str(tmp_path / "nothing.so")).reason


def test_memory_is_pinned_by_the_driver_or_it_is_said_why_not(tmp_path: Path) -> None:
    address = 0x7F0000001000
    assert not pin(address, 1 << 33, driver(tmp_path, 0))
    unpin(address, driver(tmp_path, 0))
    assert "no CUDA-capable device" in pin(address, 1 << 33, driver(tmp_path, 100))
    unpin(address, driver(tmp_path, 100))
    assert "cannot be pinned" in pin(address, 1, str(tmp_path / "nothing.so"))


@pytest.mark.parametrize(
    ("cuda", "kvikio", "nvidia_fs", "torch", "active"),
    [
        (H200, KVIKIO, "2.22", "2.13.0", "GPUDirect Storage"),
        (H200, KVIKIO, "", "2.13.0", "pinned copies"),
        (H200, NO_KVIKIO, "", "2.13.0", "pinned copies"),
        (H200, KVIKIO, "2.22", "", None),
        (NO_GPU, KVIKIO, "", "2.13.0", None),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_doctor_says_which_way_loads_go_and_how_to_get_a_better_one(
    cuda: Driver, kvikio: Package, nvidia_fs: str, torch: str, active: str | None, nodes: int
) -> None:
    found = {
        line.name: line
        for line in doctor_loads.show(machine(cuda, kvikio, nvidia_fs, nodes, torch))
    }
    ways = [name for name in ("GPUDirect Storage", "pinned copies") if found[name].active]
    assert ways == ([active] if active else [])
    for line in found.values():
        assert line.reason
        assert line.available or line.remedy, line
    assert found["native AIO"].available is (nodes == 1)
    assert found["NUMA"].active is (nodes == 2)
    assert ("disk on 0" in found["NUMA"].reason) is (nodes == 2)


@pytest.mark.parametrize(
    ("asked", "refused", "active", "said"),
    [
        (Alignment(4, 512), "", True, "past the page cache"),
        (Alignment(4096, 4096), "", False, "as large as pages"),
        (None, "", False, "not known"),
        (Alignment(4, 512), "io_setup: Function not implemented", False, "through the page cache"),
    ],
)
def test_doctor_says_how_pieces_of_columns_are_read(
    asked: Alignment | None, refused: str, active: bool, said: str
) -> None:
    found = machine(NO_GPU, NO_KVIKIO, "", 1, "")
    where = place("ext4")._replace(direct=asked)
    lines = doctor_loads.show(found._replace(place=where, native_aio=refused))
    (line,) = [line for line in lines if line.name == "native AIO"]
    assert line.active is active
    assert said in line.reason


def test_the_benchmark_of_gpus_says_that_it_measured_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu

    monkeypatch.setattr(gpu, "probe", lambda _path: machine(NO_GPU, NO_KVIKIO, "", 1, ""))
    monkeypatch.setattr("sys.argv", ["gpu", "--dir", str(tmp_path)])
    monkeypatch.setattr("signal.signal", lambda _number, _handler: None)
    assert gpu.main() == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"not measured: no CUDA device: {NO_GPU.reason}"
    assert json.loads(last)["rows"] == []
