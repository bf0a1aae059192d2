"""`kvfs model`: inspect, load and prefetch, as a user calls them."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.base.units import format_size
from tests.cluster.waiting import lives, wait_until
from tests.gds.checkpoints import llama, meant, write, write_shards
from tests.gds.command import with_torch
from tests.integration.harness import Node, best_mode, kvfs
from tests.integration.several import several

SHARDS = [llama(2, 256), llama(2, 256, first=2)]
SIZE = sum(len(each.data) for shard in SHARDS for each in shard.values())
pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    made = Node.make(best_mode())
    try:
        made.up()
        (made.mount / "models" / "llama").mkdir()
        write_shards(made.mount / "models" / "llama", SHARDS)
        yield made
    finally:
        made.remove()


def model(node: Node, *arguments: str) -> "subprocess.CompletedProcess[str]":
    words, environment = with_torch("model", *arguments, "--store", str(node.store))
    return subprocess.run(
        words, env=environment, cwd="/", capture_output=True, text=True, timeout=120, check=False
    )


def told(node: Node, *arguments: str) -> Any:
    done = model(node, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_load_reads_a_checkpoint_whole(node: Node) -> None:
    found = told(node, "load", str(node.mount / "models" / "llama"))
    assert (found["files"], found["read_bytes"], found["ranks"]) == (2, SIZE, 1)
    (only,) = found["loaded"]
    assert only["way"] == "memory of the host"
    assert only["why"]
    assert (only["rank"], only["tensor_bytes"]) == (0, SIZE)
    assert only["tensors"] == sum(map(len, SHARDS))
    assert found["wall_s"] > 0
    assert found["gb_per_s"] > 0
    assert only["start_s"] > 0
    stages = only["stages"]
    assert stages["threads"] > 0
    assert [stages[name]["bytes"] for name in ("read", "check", "copy", "wait")] == [SIZE, 0, 0, 0]
    assert stages["read"]["gb_per_s"] == pytest.approx(SIZE / stages["read"]["seconds"] / 1e9)
    shown = model(node, "load", "/models/llama")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1].startswith("all in ")
    _, head, row, stages_head, stages_row, *_ = map(str.split, shown.stdout.splitlines())
    assert "START" in head
    assert len(row) > len(head)
    assert stages_head == ["RANK", "THREADS", "READING", "CHECKING", "COPYING", "WAITING"]
    assert (stages_row[4], stages_row[6:8]) == ("at", ["GB/s", "-"])
    assert "by memory of the host: the device is the CPU" in shown.stdout


def test_ranks_are_processes_that_share_a_checkpoint(node: Node) -> None:
    found = told(node, "load", "/models/llama", "--ranks", "2", "--strategy", "strided")
    assert [each["rank"] for each in found["loaded"]] == [0, 1]
    norms = sum(
        len(each.data) for shard in SHARDS for name, each in shard.items() if "norm" in name
    )
    assert [each["tensor_bytes"] for each in found["loaded"]] == [(SIZE + norms) // 2] * 2
    alone = told(node, "load", "/models/llama", "--ranks", "2", "--rank", "1")
    assert [each["rank"] for each in alone["loaded"]] == [1]


def test_verify_finds_what_the_disk_changed(node: Node) -> None:
    path = node.mount / "models" / "verified.safetensors"
    write(path, SHARDS[0])
    inside = "/models/verified.safetensors"
    wait_until(lambda: sealed(node, inside), "it has its checksums")
    assert model(node, "load", inside, "--verify").returncode == 0
    (data_file,) = (node.store / "data").glob(f"*/{path.stat().st_ino:016x}.*")
    with open(data_file, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    done = model(node, "load", inside, "--verify")
    assert (done.returncode, done.stdout) == (8, ""), done.stderr
    assert "verified.safetensors" in done.stderr


def sealed(node: Node, path: str) -> bool:
    done = kvfs("where", "--json", path, "--store", str(node.store))
    return bool(json.loads(done.stdout)["sealed"])


def test_inspect_needs_no_torch_and_says_what_ranks_have(node: Node) -> None:
    path = "/models/llama"
    done = kvfs("model", "inspect", path, "--ranks", "2", "--json", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tensors"], found["tensor_bytes"]) == (sum(map(len, SHARDS)), SIZE)
    assert found["dtypes"] == {"BF16": SIZE}
    listed = {each["name"]: each for file in found["files"] for each in file["tensors"]}
    for shard in SHARDS:
        for name, each in shard.items():
            assert tuple(listed[name]["shape"]) == each.shape
            assert listed[name]["bytes"] == len(each.data)
    loaded = told(node, "load", path, "--ranks", "2")["loaded"]
    assert found["ranks"] == [
        {key: each[key] for key in ("rank", "tensor_bytes", "read_bytes")} for each in loaded
    ]
    shown = kvfs("model", "inspect", path, "--store", str(node.store)).stdout.splitlines()
    cells = ["model.layers.3.mlp.down_proj.weight", "BF16", "256", "x", "768", "384.0", "KiB"]
    assert cells in [line.split() for line in shown]
    assert "in 2 files: BF16" in shown[-1]


def test_without_torch_the_remedy_is_one_line(node: Node) -> None:
    done = kvfs("model", "load", "/models/llama", "--store", str(node.store))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvfs: loading needs torch: pip install 'kvfs[torch]' (")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["/models/nothing"], 3, "no such file"),
        (["/models/llama", "--rank", "1"], 2, "rank 1 is none of 1 ranks"),
        (["/models/llama", "--ranks", "3"], 2, "cannot be divided among 3 ranks"),
        (["/models/llama", "--device", "nonsense"], 2, "'nonsense' is no device"),
        (["/models/llama", "--device", "mps"], 2, "'mps' is no device to load to: cpu, cuda"),
        (["/models/llama", "--ranks", "2", "--device", "cuda:99"], 2, "kvfs: rank "),
        (["/models/llama", "--device", "cuda:99"], 2, "kvfs: cuda:99: "),
        (["/models/torn.safetensors"], 8, "truncated"),
    ],
)
def test_what_goes_wrong_is_one_line(
    node: Node, arguments: list[str], code: int, says: str
) -> None:
    torn = node.mount / "models" / "torn.safetensors"
    write(torn, {"a": meant("F32", (100,), 1)})
    os.truncate(torn, torn.stat().st_size - 4)
    done = model(node, "load", *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_leaves_no_process(node: Node) -> None:
    words, environment = with_torch("model", "load", "/models/llama", "--store", str(node.store))
    with subprocess.Popen(
        words, env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        ranks: list[int] = []

        def has_rank() -> bool:
            ranks.extend(children(process.pid))
            return bool(ranks)

        wait_until(has_rank, "it has a rank")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    # One that was just being started ends by itself, since nobody tells it to begin.
    wait_until(lambda: not any(map(lives, ranks)), "its ranks have ended")


def test_what_no_rank_can_load_is_refused_before_any_starts(node: Node, tmp_path: Path) -> None:
    """A torch that cannot be imported is as good as any."""
    (tmp_path / "torch.py").write_text("raise ImportError('it was imported')")
    words, environment = with_torch("model", "load", "/models/llama", "--store", str(node.store))
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    for more, said in [
        (["--ranks", "3"], "cannot be divided among 3 ranks"),
        (["--device", "mps"], "'mps' is no device"),
        ([], "it was imported"),
    ]:
        done = subprocess.run(
            [*words, *more], env=environment, cwd="/", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def test_ranks_end_with_who_started_them(node: Node, tmp_path: Path) -> None:
    """They sleep instead of importing torch, so that they would go on."""
    (tmp_path / "torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'here')!r}).touch()\ntime.sleep(600)"
    )
    words, environment = with_torch("model", "load", "/models/llama", "--store", str(node.store))
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    with subprocess.Popen(words, env=environment, cwd="/") as process:
        wait_until((tmp_path / "here").exists, "its rank imports torch")
        ranks = children(process.pid)
        process.kill()
    assert ranks
    wait_until(lambda: not any(map(lives, ranks)), "its rank has ended")


def test_on_a_terminal_it_says_how_many_ranks_have_started(node: Node, tmp_path: Path) -> None:
    """None of them comes so far: they sleep instead of importing torch."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    words, environment = with_torch(
        "model", "load", "/models/llama", "--ranks", "2", "--store", str(node.store)
    )
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    ours, theirs = os.openpty()
    said = b""
    try:
        with subprocess.Popen(words, env=environment, cwd="/", stderr=theirs) as process:
            while b"0 of 2 ranks have started" not in said:
                assert select.select([ours], [], [], 60)[0], said
                said += os.read(ours, 4096)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
    finally:
        os.close(theirs)
        os.close(ours)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_prefetch_brings_what_an_index_names() -> None:
    with several(2) as cluster:
        a, b = cluster.nodes
        home = a.mount / "models" / "llama"
        home.mkdir()
        write_shards(home, SHARDS)
        size = format_size(sum(each.stat().st_size for each in home.iterdir()))
        (home / "not-named").write_bytes(b"x")
        index = str(b.mount / "models" / "llama" / "model.safetensors.index.json")
        done = kvfs("model", "prefetch", index, "--store", str(b.store))
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"brought 3 files, {size}\n"
        whole = kvfs("model", "prefetch", "/models/llama", "--to", "all", "--store", str(b.store))
        assert "brought 4 files to 2 nodes" in whole.stdout, whole.stderr
        assert whole.stdout.endswith(" each\n")
        found = told(b, "load", "/models/llama")
        assert found["read_bytes"] == SIZE


def test_prefetch_of_a_directory_misses_what_its_index_names(node: Node) -> None:
    home = node.mount / "models" / "lacking"
    home.mkdir()
    write_shards(home, SHARDS)
    (home / "model-00002-of-00002.safetensors").unlink()
    done = kvfs("model", "prefetch", "/models/lacking", "--store", str(node.store))
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "model-00002-of-00002.safetensors: no such file" in done.stderr


def test_an_empty_path_is_said_to_be_that(node: Node) -> None:
    for verb in ("inspect", "load", "prefetch"):
        done = model(node, verb, "")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert "the path is empty" in done.stderr


def test_prefetch_of_what_is_on_no_mount_says_so(node: Node, tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", llama(1, 64))
    done = kvfs("model", "prefetch", str(tmp_path / "a.safetensors"), "--store", str(node.store))
    assert done.returncode != 0
    assert f"{tmp_path / 'a.safetensors'} is on no mount of KVFS" in done.stderr


def test_all_nodes_of_a_node_alone_are_that_node(node: Node) -> None:
    done = kvfs("model", "prefetch", "/models/llama", "--to", "all", "--store", str(node.store))
    assert done.returncode == 0, done.stderr
    assert "brought 3 files" in done.stdout
    named = kvfs("model", "prefetch", "/models/llama", "--to", "b", "--store", str(node.store))
    assert "in no cluster" in named.stderr


def test_without_a_node_a_path_within_is_not_said_to_be_missing(tmp_path: Path) -> None:
    done = kvfs("model", "inspect", "/models/llama", "--store", str(tmp_path))
    assert done.returncode != 0
    assert "no node runs on the store" in done.stderr


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"a\nb\x1b[31m": meant("U8", (1,), 1)})
    shown = kvfs("model", "inspect", str(tmp_path / "a.safetensors"))
    assert "\na\\nb\\x1b[31m  U8" in shown.stdout, shown.stderr


def test_help_says_what_a_path_is() -> None:
    done = kvfs("model", "--help")
    assert done.returncode == 0
    for name in ("inspect", "prefetch", "load"):
        assert f"\n  {name} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]
