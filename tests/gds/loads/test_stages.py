"""What a load says of its stages: on how many bytes each was spent, and whose time it was."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import gds
from gds.io import timings
from gds.io.timings import Spent, Stage, Stages, during, start_watch, stop_watch, together
from kvfs.base.errors import Corrupt
from kvfs.datastore.checksum import CHUNK_BYTES
from tests.gds.checkpoints import meant, write
from tests.gds.sealing import wait_for_checksums
from tests.integration.harness import Node, best_mode

pytestmark = pytest.mark.timeout(1200)  # the first test may have to install torch
ROWS: Final = 3000
COLUMNS: Final = 4096
SIZE: Final = ROWS * COLUMNS * 2
TENSORS: Final = {"t": meant("BF16", (ROWS, COLUMNS), 1)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "a.safetensors", TENSORS)
    return tmp_path / "a.safetensors"


def told(path: Path, **how: Any) -> Stages:
    """In the end, by a load of it."""
    found: list[Any] = []
    gds.load_model(path, report=found.append, **how)
    way, spent = found
    assert isinstance(way, gds.Taken)
    assert isinstance(spent, gds.Stages)
    assert spent.threads > 0
    assert spent.wait.size_bytes == 0
    return spent


def sizes(found: Stages) -> tuple[int, int, int]:
    return found.read.size_bytes, found.check.size_bytes, found.copy.size_bytes


def test_what_is_read_to_where_it_belongs_is_not_copied(path: Path) -> None:
    found = told(path)
    assert sizes(found) == (SIZE, 0, 0)
    assert found.check == Spent(0, 0.0)


def test_what_becomes_another_dtype_is_copied_whole(path: Path) -> None:
    import torch

    assert sizes(told(path, dtype=torch.float32)) == (SIZE, 0, SIZE)


@pytest.mark.parametrize(("strategy", "of_the_file"), [("slice", 1), ("strided", 4)])
def test_of_columns_lines_are_read_or_pieces(path: Path, strategy: str, of_the_file: int) -> None:
    found = told(path, rank=1, world_size=4, plan={"t": 1}, strategy=strategy)
    assert sizes(found) == (SIZE // of_the_file, 0, SIZE // of_the_file)


def test_rows_are_read_alone(path: Path) -> None:
    assert sizes(told(path, rank=1, world_size=4, plan={"t": 0})) == (SIZE // 4, 0, 0)


def test_of_a_mapped_file_nothing_is_told(path: Path) -> None:
    found: list[Any] = []
    gds.load_file(path, copy=False, report=found.append)
    assert not found


def test_a_load_that_ends_early_or_fails_tells_no_stages(path: Path) -> None:
    found: list[Any] = []
    passing = gds.iter_tensors(path, report=found.append)
    next(passing)
    passing.close()
    assert [type(each) for each in found] == [gds.Taken]
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(Corrupt):
        gds.load_file(path, report=found.append)
    assert not any(isinstance(each, gds.Stages) for each in found)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node.make(best_mode())
    try:
        node.up()
        yield node
    finally:
        node.remove()


def test_what_is_verified_is_read_and_checked_in_whole_chunks(node: Node) -> None:
    path = node.mount / "models" / "a.safetensors"
    write(path, TENSORS)
    wait_for_checksums(node.store, "models/a.safetensors")
    size = path.stat().st_size
    # The chunk with the header is read aside, and what the tensor has of it is copied from there.
    assert sizes(told(path, verify=True)) == (size, size, CHUNK_BYTES - (size - SIZE))
    last_row = {"rank": ROWS - 1, "world_size": ROWS, "plan": {"t": 0}}
    chunk = size % CHUNK_BYTES
    assert sizes(told(path, verify=True, **last_row)) == (chunk, chunk, 2 * COLUMNS)


# ---- the watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is."""
    now = [0.0]
    monkeypatch.setattr(timings, "_clock", lambda: now[0])
    return now


def pass_s(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


def test_a_stage_within_another_stops_that_one(clock: list[float]) -> None:
    start_watch()
    pass_s(clock, 1)
    with during(Stage.COPY, 10):
        pass_s(clock, 2)
        with during(Stage.READ, 20):
            pass_s(clock, 4)
            with during(Stage.CHECK, 30):
                pass_s(clock, 8)
            pass_s(clock, 16)
        pass_s(clock, 32)
    with during(Stage.WAIT):
        pass_s(clock, 64)
    assert stop_watch() == {
        Stage.COPY: Spent(10, 35.0),
        Stage.READ: Spent(20, 20.0),
        Stage.CHECK: Spent(30, 8.0),
        Stage.WAIT: Spent(0, 64.0),
    }


def test_of_what_fails_the_time_counts_and_not_the_bytes(clock: list[float]) -> None:
    start_watch()
    with pytest.raises(OSError, match="the disk"), during(Stage.READ, 10):
        pass_s(clock, 3)
        raise OSError("the disk")
    pass_s(clock, 1)
    lap = stop_watch()
    assert (lap[Stage.READ], lap[Stage.COPY]) == (Spent(0, 3.0), Spent(0, 1.0))


def test_each_thread_has_a_watch_and_rates_are_those_of_all(clock: list[float]) -> None:
    laps = []

    def work() -> None:
        start_watch()
        with during(Stage.READ, 6 * 10**9):
            pass_s(clock, 2)
        laps.append(stop_watch())

    start_watch()
    with during(Stage.CHECK, 1):
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    found = together(laps)
    assert (found.threads, found.read, found.check) == (2, Spent(12 * 10**9, 4.0), Spent(0, 0.0))
    assert (found.seconds(found.read), found.gb_per_s(found.read)) == (2.0, 6.0)
    assert (found.seconds(found.check), found.gb_per_s(found.check)) == (0.0, 0.0)
    assert together([]).gb_per_s(Spent(0, 0.0)) == 0.0
