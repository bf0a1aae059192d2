"""`kvfs bench gds`: figures of loads beside those of the disk, and nothing left behind."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gds.io.page_cache import cached_bytes
from tests.cluster.waiting import wait_until
from tests.gds.checkpoints import llama, meant, write, write_shards
from tests.gds.command import with_torch
from tests.integration.harness import Node, base_directory, best_mode, kvfs

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a disk, as far as the machine has one for tests."""
    with tempfile.TemporaryDirectory(prefix="kvfs-test-", dir=base_directory()) as home:
        yield Path(home)


def can_be_cold(place: Path) -> bool:
    """Whether the page cache there lets go of a file, and the kernel says so."""
    path = place / "probe"
    path.write_bytes(b"x" * 4096)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = cached_bytes(file.fileno(), 0, 0)
    path.unlink()
    return found == 0


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    words, environment = with_torch("bench", "gds", "--rounds", "1", *arguments)
    return subprocess.run(
        words, env=environment, cwd="/", capture_output=True, text=True, timeout=200, check=False
    )


def test_a_test_file_is_measured_and_removed(place: Path) -> None:
    if not can_be_cold(place):
        pytest.skip(f"{place}: the page cache keeps files there, or this kernel does not tell")
    done = bench("--directory", str(place), "--size", "16MiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {(each["state"], each["name"]): each for each in found["rows"]}
    assert all(each["bytes_per_s"] > 0 for each in found["rows"])
    assert ("read", found["best_read"]) in rows
    cold, best = rows["cold", "gds.load_file"], rows["read", found["best_read"]]
    assert cold["of_limit"] == pytest.approx(cold["bytes_per_s"] / best["bytes_per_s"], rel=1e-3)
    warm, copy = rows["warm", "gds.load_file"], rows["memory", "copy"]
    assert warm["of_limit"] == pytest.approx(warm["bytes_per_s"] / copy["bytes_per_s"], rel=1e-3)
    assert found["no_cold_figures"] is None
    assert not list(place.iterdir())


def test_there_are_no_cold_figures_where_the_page_cache_is_the_file() -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("/dev/shm cannot be written")
    with tempfile.TemporaryDirectory(prefix="kvfs-test-", dir=memory) as home:
        done = bench("--directory", home, "--size", "16MiB", "--json")
        assert done.returncode == 0, done.stderr
        assert not list(Path(home).iterdir())
    found = json.loads(done.stdout)
    assert "page cache" in found["no_cold_figures"]
    assert {each["state"] for each in found["rows"]} == {"memory", "warm"}


def test_a_checkpoint_on_the_mount_is_measured_by_its_largest_file() -> None:
    node = Node.make(best_mode())
    try:
        node.up()
        home = node.mount / "models" / "llama"
        home.mkdir()
        write_shards(home, [llama(1, 256), {"large": meant("U8", (20 << 20,), 1)}])
        done = bench("/models/llama", "--json", "--store", str(node.store))
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["file"] == str(home / "model-00002-of-00002.safetensors")
        before = sorted(os.listdir(node.mount / "models"))
        done = bench("--size", "16MiB", "--store", str(node.store))
        assert done.returncode == 0, done.stderr
        assert f"{node.mount}/models/kvfs-bench-" in done.stdout
        assert "gds.load_file" in done.stdout
        assert sorted(os.listdir(node.mount / "models")) == before
    finally:
        node.remove()


def test_ctrl_c_leaves_nothing(place: Path) -> None:
    words, environment = with_torch("bench", "gds", "--rounds", "99", "--size", "16MiB")
    with subprocess.Popen(
        [*words, "--directory", str(place)],
        env=environment,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: bool(list(place.glob("*/*"))), "the test file is made")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not list(place.iterdir())


def test_the_next_run_removes_what_a_kill_left(place: Path) -> None:
    words, environment = with_torch("bench", "gds", "--rounds", "99999", "--size", "16MiB")
    with contextlib.ExitStack() as stack:
        killed, running = (
            stack.enter_context(
                subprocess.Popen(
                    [*words, "--directory", str(place)],
                    env=environment,
                    cwd="/",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            for _ in range(2)
        )
        stack.callback(running.kill)
        stack.callback(killed.kill)
        wait_until(lambda: len(list(place.glob("*/model*"))) == 2, "the test files are made")
        running.send_signal(signal.SIGSTOP)  # else it takes a core from the others
        killed.kill()
        killed.wait()
        done = bench("--directory", str(place), "--size", "16MiB")
        assert done.returncode == 0, done.stderr
        assert running.poll() is None
        assert len(list(place.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--directory", "{place}", "--size", "9PiB"], 6, "has no room for a test file of 9.0 PiB"),
        (["--directory", "{place}", "--size", "1MiB"], 2, "a test file has 16.0 MiB at least"),
        (["{place}/small.safetensors"], 2, "too little to measure"),
        (["{place}/nothing"], 7, "no such file here, and no node runs"),
        (["{place}", "--directory", "{place}"], 2, "exclude each other"),
        (["--store", "{place}/no-store"], 7, "no node with a mount runs"),
    ],
)
def test_what_cannot_be_measured_is_said(
    place: Path, arguments: list[str], code: int, says: str
) -> None:
    write(place / "small.safetensors", {"a": meant("F32", (100,), 1)})
    done = bench(*(each.format(place=place) for each in arguments))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_torch_the_remedy_is_one_line() -> None:
    done = kvfs("bench", "gds")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvfs: loading needs torch: pip install 'kvfs[torch]' (")
    assert done.stderr.count("\n") == 1
