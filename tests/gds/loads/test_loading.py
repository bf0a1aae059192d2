"""Checkpoints become tensors, byte for byte, from a plain directory and from a mount."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvfs.base.errors import Conflict, Corrupt, Invalid, KvfsError, NotFound, NotSupported
from tests.gds.checkpoints import (
    Meant,
    assert_same,
    llama,
    meant,
    raw,
    write,
    write_shards,
)
from tests.integration.posix import let_clock_pass

MIB = 1 << 20
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


EVERY_DTYPE = {
    **{f"odd {dtype}": meant(dtype, (3, 5, 2), 1) for dtype in ("U8", "I8", "BOOL")},
    **{f"{dtype}": meant(dtype, (7, 4), 2) for dtype in ("I16", "U16", "F16", "BF16")},
    **{f"{dtype}": meant(dtype, (3, 4), 3) for dtype in ("I32", "U32", "F32", "I64", "U64", "F64")},
    **{f"{dtype}": meant(dtype, (4, 6), 4) for dtype in ("F8_E5M2", "F8_E4M3", "F8_E8M0", "F4")},
    "complex": meant("C64", (3, 3), 5),
    "scalar": meant("F32", (), 6),
    "empty": meant("F32", (0, 4), 7),
    "large": meant("BF16", (1024, 9 * 1024), 8),
    "empty too": meant("I64", (2, 0), 9),
}


@pytest.mark.parametrize("padding", [0, 1, 4000])
def test_every_dtype_comes_back_byte_for_byte(where: Path, padding: int) -> None:
    import torch

    import gds

    write(where / "a.safetensors", EVERY_DTYPE, padding)
    found = gds.load_file(where / "a.safetensors")
    assert_same(found, EVERY_DTYPE)
    assert found["BF16"].dtype == torch.bfloat16
    assert found["F4"].shape == (4, 3)  # torch has two in each of its elements
    assert all(
        found[name].shape == torch.Size(each.shape)
        for name, each in EVERY_DTYPE.items()
        if each.dtype != "F4"
    )


def test_what_torch_cannot_convert_stays_as_it_is(where: Path) -> None:
    import torch

    import gds

    packed = meant("F4", (4, 6), 1)
    write(where / "a.safetensors", {"p": packed})
    assert_same(gds.load_model(where / "a.safetensors", dtype=torch.float32), {"p": packed})


def test_a_dtype_that_torch_has_not_is_named(where: Path) -> None:
    import gds

    write(where / "a.safetensors", {"six": meant("F6_E2M3", (4, 4), 1)})
    with pytest.raises(NotSupported, match=r"'six'.*F6_E2M3"):
        gds.load_file(where / "a.safetensors")


@pytest.mark.parametrize("strategy", ["auto", "slice", "strided"])
def test_ranks_have_their_parts_and_all_of_them_the_whole(where: Path, strategy: str) -> None:
    import torch

    import gds

    shards = [llama(1, 256), llama(1, 256, first=1)]
    write_shards(where, shards)
    whole = gds.load_model(where)
    assert_same(whole, shards[0] | shards[1])
    ranks = [gds.load_model(where, rank=n, world_size=4, strategy=strategy) for n in range(4)]
    for name, tensor in whole.items():
        dimension = None if "norm" in name else int("o_proj" in name or "down_proj" in name)
        for rank, found in enumerate(ranks):
            expected = tensor if dimension is None else tensor.chunk(4, dimension)[rank]
            assert torch.equal(found[name].view(torch.int16), expected.view(torch.int16)), name


def test_elements_become_others_where_that_is_asked_for(where: Path) -> None:
    import torch

    import gds

    values = torch.arange(6_000_000, dtype=torch.float32).to(torch.bfloat16)
    numbers = meant("I32", (5,), 1)
    tensors = {"w": Meant("BF16", (3000, 2000), raw(values)), "n": numbers}
    write(where / "a.safetensors", tensors)
    found = gds.load_model(where / "a.safetensors", dtype=torch.float32)
    assert torch.equal(found["w"], values.to(torch.float32).reshape(3000, 2000))
    assert raw(found["n"]) == numbers.data
    columns = gds.load_model(
        where / "a.safetensors", rank=1, world_size=2, plan={"w": 1}, dtype=torch.float16
    )
    assert torch.equal(columns["w"], values.to(torch.float16).reshape(3000, 2000)[:, 1000:])


def test_tensors_come_one_by_one_and_those_that_go_give_their_memory_back(tmp_path: Path) -> None:
    import gds

    block = meant("U8", (16 * MIB,), 1)
    write(tmp_path / "a.safetensors", {f"t{n:02d}": block for n in range(60)})
    before, peak, seen = anonymous_bytes(), 0, []
    for name, tensor in gds.iter_tensors(tmp_path / "a.safetensors"):
        assert tensor.shape == (16 * MIB,)
        seen.append(name)
        peak = max(peak, anonymous_bytes())
        del tensor
    assert sorted(seen) == [f"t{n:02d}" for n in range(60)]
    assert peak - before < 512 * MIB


def anonymous_bytes() -> int:
    """Of this process."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_who_stops_early_leaves_no_thread(where: Path) -> None:
    import gds

    write(where / "a.safetensors", {f"t{n}": meant("U8", (MIB,), n) for n in range(100)})
    descriptors = len(os.listdir("/proc/self/fd"))
    tensors = gds.iter_tensors(where / "a.safetensors")
    next(tensors)
    tensors.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_progress_goes_from_nothing_to_all_that_is_read(where: Path) -> None:
    import gds

    shards = [llama(2, 256), llama(2, 256, first=2)]
    write_shards(where, shards)
    told: list[tuple[int, int]] = []
    gds.load_model(where, progress=lambda *bytes_: told.append(bytes_))
    size = sum(len(each.data) for shard in shards for each in shard.values())
    assert {of for _, of in told} == {size}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (told[0], told[-1]) == ((0, size), (size, size))


def test_what_progress_raises_ends_the_load(where: Path) -> None:
    import gds

    write(where / "a.safetensors", llama(1, 256))

    def refuse(done: int, _of: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gds.load_file(where / "a.safetensors", progress=refuse)
    assert not [each for each in threading.enumerate() if each.name.startswith("kvfs-load")]


def test_what_is_wrong_with_a_checkpoint_is_named(where: Path) -> None:
    import gds

    def refused(kind: type[KvfsError], *said: str) -> None:
        with pytest.raises(kind) as caught:
            gds.load_model(where)
        assert all(each in str(caught.value) for each in said), caught.value

    refused(NotFound, str(where))
    shards = [{"a": meant("U8", (100,), 1)}, {"b": meant("U8", (100,), 2)}]
    write_shards(where, shards)
    second = where / "model-00002-of-00002.safetensors"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    refused(Corrupt, second.name, "truncated")
    write(second, {"c": meant("U8", (100,), 2)})
    refused(Corrupt, second.name, "'b'")
    second.unlink()
    refused(NotFound, second.name, "index.json")
    write(second, shards[0] | shards[1])
    refused(Invalid, "'a'", second.name)
    index = where / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/passwd"}}))
    refused(Corrupt, "etc/passwd")
    index.write_text(json.dumps({"weight_map": {}}))
    refused(Corrupt, index.name, "empty")
    index.write_text("{")
    refused(Corrupt, index.name)
    index.write_text('{"weight_map": %s}' % ("9" * 5000))
    refused(Corrupt, index.name, "too many digits")
    index.unlink()
    os.mkfifo(index)
    refused(Invalid, index.name, "no regular file")


def test_a_config_that_is_a_pipe_is_refused_and_not_waited_for(where: Path) -> None:
    import gds

    write(where / "a.safetensors", {"a": meant("U8", (4,), 1)})
    os.mkfifo(where / "config.json")
    with pytest.raises(Invalid, match=r"config\.json is no regular file"):
        gds.load_model(where, rank=0, world_size=2)


def test_paths_may_be_bytes_and_come_once(where: Path) -> None:
    import gds

    tensors = {"a": meant("U8", (100,), 1)}
    path = where / "a.safetensors"
    write(path, tensors)
    assert_same(gds.load_file(bytes(path)), tensors)
    assert_same(gds.load_file(where), tensors)
    with pytest.raises(Invalid, match=r"a\.safetensors is named 2 times"):
        gds.load_model([path, bytes(path)])


def test_a_file_that_is_written_to_while_it_loads_is_refused(where: Path) -> None:
    import gds

    path = where / "a.safetensors"
    write(path, {f"t{n}": meant("U8", (MIB,), n) for n in range(8)})
    tensors = gds.iter_tensors(path)
    next(tensors)
    let_clock_pass(path)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(Conflict, match=r"a\.safetensors"):
        list(tensors)


def test_a_file_that_is_replaced_while_it_loads_is_read_as_it_was(where: Path) -> None:
    import gds

    path = where / "a.safetensors"
    old = {f"t{n}": meant("U8", (MIB,), n) for n in range(8)}
    write(path, old)
    tensors = gds.iter_tensors(path)
    found = dict([next(tensors)])
    write(where / "b", {f"t{n}": meant("U8", (MIB,), n + 100) for n in range(8)})
    os.rename(where / "b", path)
    assert_same(found | dict(tensors), old)


def test_a_device_that_is_not_there_is_refused(where: Path) -> None:
    import gds

    write(where / "a.safetensors", {"a": meant("U8", (3,), 1)})
    for device in ("cuda:99", "nonsense"):
        with pytest.raises((Invalid, NotSupported), match=device):
            gds.load_file(where / "a.safetensors", device)


def test_without_torch_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None; from gds import load_file"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ModuleNotFoundError: loading needs torch: pip install 'kvfs[torch]'")


def test_importing_kvfs_and_gds_brings_no_torch() -> None:
    code = "import sys, kvfs, kvfs.client, gds; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
