"""What loads take beyond the tensors: little, whatever the size of tensors and how they are cut."""

import json
import math
from pathlib import Path
from typing import Final

import pytest

from tests.gds import children, holes
from tests.gds.checkpoints import Meant, meant, write

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
MIB: Final = 1 << 20

_PEAK: Final = """
import gds, json, torch

def of(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

def beyond(load):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted anew
    before = of("VmRSS")
    found = load()
    return of("VmHWM") - before - sum(tensor.nbytes for tensor in found.values())

def passing(**how):
    # of tensors that are dropped as they come: all that it takes
    for _, tensor in gds.iter_tensors(path, **how):
        del tensor
    return {}

path, small = sys.argv[1:3]
gds.load_file(small)
rank = {"rank": 1, "world_size": 4}
print(json.dumps({
    "whole": beyond(lambda: gds.load_file(path)),
    "rows": beyond(lambda: gds.load_model(path, **rank, plan={"t": 0})),
    "columns": beyond(lambda: gds.load_model(path, **rank, plan={"t": 1})),
    "strided": beyond(lambda: gds.load_model(path, **rank, plan={"t": 1}, strategy="strided")),
    "converted": beyond(lambda: gds.load_model(path, dtype=torch.float32)),
    "passing, converted": beyond(lambda: passing(dtype=torch.float32)),
}))
"""


@pytest.mark.parametrize(
    ("where", "count", "shape", "aligned"),
    [
        ("plain", 2, (16384, 16384), True),
        ("mount", 90, (4400, 1024), True),
        ("plain", 90, (4400, 1024), False),
    ],
    indirect=["where"],
)
def test_a_load_takes_little_memory_beyond_the_tensors(
    where: Path, count: int, shape: tuple[int, int], aligned: bool
) -> None:
    """Some large tensors, and many of which a rank's rows are a little longer than a huge page,
    also those that do not begin in the file where their elements may in memory."""
    path, small = where / "large.safetensors", where / "small.safetensors"
    holes.write(path, count, shape, "BF16", aligned=aligned)
    holes.write(small, 1, [16])
    found = json.loads(children.run(_PEAK, path, small))
    passing = found.pop("passing, converted")
    largest = 4 * math.prod(shape)
    assert passing < max(512 * 10**6, 2 * largest), (passing, found)
    assert max(found.values()) < 512 * 10**6, found
    if aligned:
        assert max(found["whole"], found["rows"]) < 64 * MIB, found


_PARSING: Final = """
import json, os, sys
from gds.format.safetensors import read_header

def of(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

small, large = (os.open(path, os.O_RDONLY) for path in sys.argv[1:3])
read_header(small, "small")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = of("VmRSS")
header = read_header(large, "large")
print(json.dumps([len(header.tensors), header.data_begin, of("VmHWM") - before]))
"""


def test_a_header_takes_the_memory_of_what_it_says(tmp_path: Path) -> None:
    """Neither its text nor all that JSON makes of it, which was nine times its length."""
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    expert = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    names = [expert.format(layer, number) for layer in range(400) for number in range(256)]
    write(small, {"a": meant("U8", (1,), 1)})
    write(large, {name: Meant("U8", (1,), b"x") for name in names})
    found, length, taken = json.loads(children.run(_PARSING, small, large))
    assert found == len(names)
    assert length > 10**7
    assert taken < 5 * length, (taken, length)


_MANY: Final = """
import gds, json, sys

def of(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key + ":"))

gds.load_file(sys.argv[1])
before = of("VmRSS")
found = gds.load_file(sys.argv[2])
print(json.dumps([len(found), (of("VmRSS") - before) / len(found)]))
"""


def test_a_small_tensor_takes_little_beside_its_bytes(tmp_path: Path) -> None:
    """torch notes of a view what it is a view of, in 600 bytes each."""
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    write(small, {"a": meant("U8", (1,), 1)})
    write(large, {f"t{number}": Meant("U8", (1,), b"x") for number in range(100_000)})
    count, taken = json.loads(children.run(_MANY, small, large))
    assert count == 100_000
    assert taken < 900, taken
