"""What breaks in the midst of a load: one error that names file and tensor, nothing left behind.

The files are larger than what `iter_tensors` reads ahead of who takes tensors: when the first one
is there, the last ones are not read yet.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import gds
from kvfs.base.errors import Corrupt, KvfsError
from tests.fault.disks import cut, disk
from tests.gds import children, holes
from tests.integration.harness import Node, best_mode

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20
COUNT: Final = 9
SIZE: Final = 64 * MIB


@pytest.fixture
def large(where: Path) -> Iterator[Path]:
    path = where / "large.safetensors"
    holes.write(path, COUNT, [SIZE])
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    opened = set(os.listdir("/proc/self/fd"))
    yield
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]
    assert set(os.listdir("/proc/self/fd")) <= opened


def test_a_file_that_is_cut_short_while_it_loads_is_refused(large: Path) -> None:
    tensors = gds.iter_tensors(large)
    next(tensors)
    os.truncate(large, MIB)
    with pytest.raises(Corrupt, match=r"large\.safetensors: truncated.*tensor 't\d\d'"):
        list(tensors)


def test_a_file_that_is_removed_while_it_loads_comes_whole(large: Path) -> None:
    """As the evictor removes it."""
    tensors = gds.iter_tensors(large)
    name, first = next(tensors)
    found = {name: first[0].item()}
    large.unlink()
    for name, tensor in tensors:
        found[name] = tensor[0].item()
    assert found == {f"t{n:02d}": n for n in range(COUNT)}


def dies_under_a_load(mountpoint: Path, path: Path) -> None:
    """The disk at `mountpoint` does, as `path`, which lies on it, is loaded."""
    holes.write(path, COUNT, [SIZE])
    tensors = gds.iter_tensors(path)
    next(tensors)
    cut(mountpoint)
    with pytest.raises(Corrupt, match=r"large\.safetensors.*cannot read.*tensor 't\d\d'"):
        list(tensors)


def test_a_disk_that_dies_under_a_load_is_told_by_file_and_tensor(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", 1024 * MIB) as made:
        dies_under_a_load(made.mountpoint, made.mountpoint / "large.safetensors")
        made.power_cycle()


def test_a_disk_that_dies_under_a_mount_is_told_by_file_and_tensor(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4", 1024 * MIB) as made:
        home = made.mountpoint / "node"
        (home / "mnt").mkdir(parents=True)
        node = Node(best_mode(), home).up()
        try:
            path = node.mount / "models" / "large.safetensors"
            dies_under_a_load(made.mountpoint, path)
            with pytest.raises((KvfsError, OSError), match=r"large\.safetensors"):
                gds.load_file(path)
        finally:
            node.remove()
        made.power_cycle()


def test_a_daemon_that_dies_holds_no_load_up() -> None:
    """The data file is open: what began is completed. What begins later is refused."""
    node = Node.make(best_mode()).up()
    try:
        path = node.mount / "models" / "large.safetensors"
        holes.write(path, COUNT, [SIZE])
        tensors = gds.iter_tensors(path)
        name, first = next(tensors)
        found = {name: first[0].item()}
        node.kill()
        for name, tensor in tensors:
            found[name] = tensor[0].item()
        assert found == {f"t{n:02d}": n for n in range(COUNT)}
        with pytest.raises((KvfsError, OSError), match=r"large\.safetensors"):
            gds.load_file(path)
    finally:
        node.remove()


_STATE: Final = """
import os
os.environ["OMP_NUM_THREADS"] = "1"  # torch's own threads end the process where memory ends
import gds, resource, signal, threading, torch
from kvfs.base.errors import Invalid, NoSpace

def of(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

def state():
    names = [each.name for each in threading.enumerate()]
    return len(os.listdir("/proc/self/fd")), sum(name.startswith("kvfs-load") for name in names)

path, small = sys.argv[1:3]
gds.load_file(small)
before, resident = state(), of("VmRSS")
"""

_LITTLE_MEMORY: Final = (
    _STATE
    + """
unlimited = resource.getrlimit(resource.RLIMIT_AS)
for room in map(int, sys.argv[3:]):
    for kwargs in ({}, {"dtype": torch.float32}, {"rank": 0, "world_size": 2, "plan": {"t": 1}}):
        resource.setrlimit(resource.RLIMIT_AS, (of("VmSize") + (room << 20), unlimited[1]))
        try:
            gds.load_model(path, **kwargs)
        except NoSpace as error:
            print(error)
        else:
            raise AssertionError("it was loaded")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert state() == before, state()
        assert of("VmRSS") - resident < 64 << 20, of("VmRSS") - resident
del kwargs
assert len(gds.load_file(path)) == 4
"""
)


def test_memory_that_is_not_to_be_had_is_told_and_what_was_had_given_back(where: Path) -> None:
    path, small = where / "large.safetensors", where / "small.safetensors"
    holes.write(path, 4, [8192, 8192], "BF16")
    holes.write(small, 1, [16])
    rooms = (24, 100, 400)
    said = children.run(_LITTLE_MEMORY, path, small, *rooms).splitlines()
    assert len(said) == 3 * len(rooms)


_INTERRUPTED: Final = (
    _STATE
    + """
import gds.io.source, itertools
read, calls = gds.io.source.os.preadv, itertools.count(1)

def preadv(*arguments):
    if next(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGINT)
    return read(*arguments)

gds.io.source.os.preadv = preadv
for load in (gds.load_file, gds.load_model, lambda path: list(gds.iter_tensors(path))):
    calls = itertools.count(1)
    try:
        load(path)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it was not interrupted")
    assert state() == before, state()
    assert of("VmRSS") - resident < 64 << 20, of("VmRSS") - resident
"""
)


@pytest.mark.parametrize("read", [1, 2, 9])
def test_an_interrupt_ends_a_load_and_leaves_nothing(where: Path, read: int) -> None:
    path, small = where / "large.safetensors", where / "small.safetensors"
    holes.write(path, 4, [SIZE])
    holes.write(small, 1, [16])
    children.run(_INTERRUPTED, path, small, read)


_FORKED: Final = (
    _STATE
    + """
def forked(do):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    signal.alarm(60)
    try:
        do()
        os._exit(0)
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr)
        os._exit(1)

def go_on():
    try:
        next(tensors)
    except Invalid:
        return
    raise AssertionError("it went on")

tensors = gds.iter_tensors(path)
found = [next(tensors)[0]]
assert forked(go_on) == 0
assert forked(tensors.close) == 0
assert forked(lambda: gds.load_file(small)["t00"][0].item()) == 0
found += [name for name, tensor in tensors]
assert len(found) == 9, found
assert state() == before, state()
"""
)


def test_a_process_that_is_forked_in_a_load_neither_hangs_nor_disturbs_it(where: Path) -> None:
    path, small = where / "large.safetensors", where / "small.safetensors"
    holes.write(path, COUNT, [SIZE])
    holes.write(small, 1, [16])
    children.run(_FORKED, path, small)
