"""A node that is killed while its own set changes goes on with a whole one: killed before and after
each step of the crash tables of `kvfs.holdings.own_set`, in the middle of one, and at random."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfs.holdings.fingerprints import BITS, RANGES, sums_by_range
from kvfs.holdings.own_set import OwnSet
from kvfs.holdings.own_set_file import MOST_INTENTS, OwnSetFile

RING = 2 * MOST_INTENTS
BASE = [number << 10 | 7 for number in range(1, 101)]
NEW = [number << 10 | 7 for number in range(101, 151)]
GONE = BASE[:30]


def u64(fingerprints: list[int]) -> np.ndarray[Any, Any]:
    return np.array(fingerprints, np.uint64)


def open_set(path: Path) -> OwnSet:
    return OwnSet.open(path, 1, 1, RING)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_while(act: Callable[[], None]) -> None:
    """Runs it in a process that must not survive it."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def dying(function: Callable[..., Any], after: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if after:
            function(*args)
        die()

    return run


def followed(own: OwnSet) -> set[int]:
    """What a node holds to be there that has applied all changes from the first on."""
    held: set[int] = set()
    sequence = 0
    while sequence < own.sequence:
        deltas = own.deltas_since(sequence, 50)
        assert deltas is not None
        held |= set(deltas.added.tolist())
        held -= set(deltas.removed.tolist())
        sequence = deltas.last
    return held


def assert_whole(own: OwnSet, *possible: set[int]) -> None:
    assert own.is_filled, own.reason
    held = {each for range_ in range(RANGES) for each in own.fingerprints(range_).tolist()}
    assert held in possible
    assert held == followed(own)
    assert len(own) == len(held)
    assert (own.checksums() == sums_by_range(u64(sorted(held)))).all()


def change(own: OwnSet) -> None:
    """One change that adds, removes, and counts a name once more."""
    fingerprints = u64(sorted([*NEW, *GONE, BASE[-1]]))
    by = np.array([-1 if each in GONE else 1 for each in fingerprints.tolist()], np.int64)
    own._change(fingerprints, by)


STEPS = ["_write_ring", "_write_intents", "_intend", "_counts.set", "_advance", "_finish"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step_of_a_change(tmp_path: Path, step: str, after: bool) -> None:
    path = tmp_path / "own"
    own = open_set(path)
    own.add(u64(BASE))
    own.mark_filled()

    def act() -> None:
        victim = open_set(path)
        *path_to, name = step.split(".")
        owner = getattr(victim, path_to[0]) if path_to else victim
        setattr(owner, name, dying(getattr(owner, name), after))
        change(victim)

    killed_while(act)
    again = open_set(path)
    is_decided = STEPS.index(step) + after > STEPS.index("_intend")
    final = (set(BASE) | set(NEW)) - set(GONE)
    assert_whole(again, final if is_decided else set(BASE))
    if not is_decided:
        change(again)
    assert_whole(again, final)
    again.remove(u64([BASE[-1]]))  # it was counted twice, however often the change was repeated
    assert_whole(open_set(path), final)
    again.remove(u64([BASE[-1]]))
    assert_whole(open_set(path), final - {BASE[-1]})


@pytest.mark.parametrize("count", [1, 20, 79])
def test_killed_when_some_counts_are_set(tmp_path: Path, count: int) -> None:
    path = tmp_path / "own"
    own = open_set(path)
    own.add(u64(BASE))
    own.mark_filled()

    def act() -> None:
        victim = open_set(path)
        whole = victim._counts.set

        def some(fingerprints: Any, counts: Any) -> None:
            whole(fingerprints[:count], counts[:count])
            die()

        vars(victim._counts)["set"] = some
        change(victim)

    killed_while(act)
    assert_whole(open_set(path), (set(BASE) | set(NEW)) - set(GONE))


DIVISION = ["_extend", "_copy_moving", "_clear_moved"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", DIVISION)
def test_killed_at_a_step_of_growth(tmp_path: Path, step: str, after: bool) -> None:
    path = tmp_path / "own"
    own = open_set(path)
    some = np.unique(np.random.default_rng(1).integers(0, 1 << BITS, 42_000, dtype=np.uint64))
    first, rest = some[:37_000], some[37_000:]
    for start in range(0, len(first), 1000):
        own.add(first[start : start + 1000])
    own.mark_filled()

    def act() -> None:
        victim = open_set(path)
        counts = victim._counts
        setattr(counts, step, dying(getattr(counts, step), after))
        for start in range(0, len(rest), 100):
            victim.add(rest[start : start + 100])

    killed_while(act)
    again = open_set(path)
    assert again.is_filled, again.reason
    assert len(again) >= len(first)
    assert again.holds(first).all()
    assert sum(len(again.fingerprints(range_)) for range_ in range(RANGES)) == len(again)
    again.ensure(some)
    assert len(again) == len(some)
    assert (again.checksums() == sums_by_range(some)).all()
    assert (open_set(path).checksums() == sums_by_range(some)).all()


@pytest.mark.parametrize("step", ["write_header", "sync"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_while_it_is_closed(tmp_path: Path, step: str, after: bool) -> None:
    path = tmp_path / "own"
    own = open_set(path)
    own.add(u64(BASE))
    own.mark_filled()

    def act() -> None:
        victim = open_set(path)
        setattr(victim._file, step, dying(getattr(victim._file, step), after))
        victim.close()

    killed_while(act)
    assert_whole(open_set(path), set(BASE))


def test_killed_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for writes in range(5):

        def act(writes: int = writes) -> None:
            made = os.pwrite
            left = iter(range(writes))

            def write(*args: Any) -> int:
                if next(left, None) is None:
                    die()
                return made(*args)

            monkeypatch.setattr(os, "pwrite", write)
            open_set(tmp_path / "own")
            die()

        killed_while(act)
        assert not open_set(tmp_path / "own").is_filled


def test_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "own"
    own = open_set(path)
    own.mark_filled()
    chance = random.Random(seed)
    held: set[int] = set()
    for round_ in range(12):
        rng = np.random.default_rng([seed, round_])
        batches = [rng.integers(0, 20_000, 500, dtype=np.uint64) for _ in range(200)]
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            victim = open_set(path)
            os.write(writing, b"o")
            for at, batch in enumerate(batches):
                victim.ensure(batch)
                victim.remove(batches[at - 1][:250])
                os.write(writing, b".")
            signal.pause()
        os.read(reading, 1)
        time.sleep(chance.random() / 30)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(writing)
        done = 0
        while read := os.read(reading, 4096):
            done += len(read)
        os.close(reading)
        states = [held]
        for at, batch in enumerate(batches[: done + 1]):
            states.append(states[-1] | set(batch.tolist()))
            states.append(states[-1] - set(batches[at - 1][:250].tolist()))
        own = open_set(path)
        assert own.is_filled, (own.reason, seed)
        held = {each for range_ in range(RANGES) for each in own.fingerprints(range_).tolist()}
        assert held in states[2 * done :], seed
        assert (own.checksums() == sums_by_range(u64(sorted(held)))).all()
    assert isinstance(own._file, OwnSetFile)
