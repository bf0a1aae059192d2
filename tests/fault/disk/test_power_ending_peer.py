"""The power of a node goes while a namespace ends being `peer`, at a moment from a printed seed:
the change is made or is taken back, what was acknowledged as synced is there on both nodes, whole,
and nothing that was removed comes back."""

import contextlib
import random
import time
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.waiting import wait_until
from tests.conftest import LONG, SEED
from tests.fault.disks import EVERYTHING, LOG_FLUSHED, NO_LOG_FLUSH
from tests.fault.machine import Machine, machine, write
from tests.integration.coherence.coherence_clients import change, content, is_there, waits_for
from tests.integration.harness import Node
from tests.integration.several import several

_CASES: Final = 25 if LONG else 1
_LONGEST_S: Final = 1.4
"""So long the change takes."""


@pytest.mark.parametrize("case", range(_CASES))
def test_a_power_cut_loses_nothing_that_was_synced(tmp_path: Path, case: int) -> None:
    chance = random.Random(f"{SEED} {case}")
    with (
        several(1) as cluster,
        machine(tmp_path, "ext4", flags=cluster.flags("cut")) as made,
    ):
        one, (other,) = made.node.up(), cluster.nodes
        change(other, "create", "blocks", "--kind", "cache", "--coherence", "peer")
        wait_until((one.mount / "blocks").is_dir, "the other node knows it")
        kept, gone, loose = _fill(made, other)
        change(other, "set", "blocks", "--coherence", "cache")
        time.sleep(chance.uniform(0, _LONGEST_S))
        made.lose_power([chance.choice([EVERYTHING, LOG_FLUSHED, NO_LOG_FLUSH])])
        one.up()
        wait_until(lambda: "waits" not in waits_for(other, "blocks"), "it is settled", 60)
        if "peer" in waits_for(other, "blocks"):
            _check(one, other, kept, gone, loose)
            change(other, "set", "blocks", "--coherence", "cache")
            wait_until(lambda: "waits" not in waits_for(other, "blocks"), "it is done", 60)
        assert "cache" in waits_for(other, "blocks")
        _check(one, other, kept, gone, loose)
        wait_until(lambda: _names(one) == _names(other), "both list the same", 60)


def _fill(made: Machine, other: Node) -> tuple[list[str], list[str], list[str]]:
    """Writes files on both nodes, some of which the other one has, too, and removes some; returns
    the names that have to be there, those that have not, and those that may."""
    ours, theirs = ([f"{whose}{number}" for number in range(60)] for whose in ("ours", "theirs"))
    here, there = made.node.mount / "blocks", other.mount / "blocks"
    for name in ours:
        write(here / name, content(name))
    for name in theirs:
        write(there / name, content(name))
    for name in ours[:20]:
        wait_until(lambda: is_there(there / name, name), f"{name} is there")  # noqa: B023
    for name in theirs[:20]:
        wait_until(lambda: is_there(here / name, name), f"{name} is there")  # noqa: B023
    gone = ours[10:30] + theirs[10:30]
    for name in gone:
        ((here if name in ours else there) / name).unlink()
    for node in (made.node, other):
        wait_until(lambda: not _names(node) & set(gone), "it has heard of what went")  # noqa: B023
    made.write_back()
    loose = [f"loose{number}" for number in range(60)]
    for name in loose:
        (here / name).write_bytes(content(name))
    return [name for name in ours + theirs if name not in gone], gone, loose


def _check(one: Node, other: Node, kept: list[str], gone: list[str], loose: list[str]) -> None:
    for node in (one, other):
        top = node.mount / "blocks"
        for name in kept:
            wait_until(lambda: is_there(top / name, name), f"{name} is there", 60)  # noqa: B023
        assert not _names(node) & set(gone)
        for name in loose:
            with contextlib.suppress(FileNotFoundError):
                assert (top / name).read_bytes() == content(name)


def _names(node: Node) -> set[str]:
    return {each.name for each in (node.mount / "blocks").iterdir()}
