"""Which opens belong to their thread's look-up, and need not ask the engine again."""

from typing import Any, cast

import pytest
import trio

from gateway.fuse.names import moved_names
from gateway.fuse.names.moved_names import MovedNames

THREAD, PARENT, INO = 7, 3, 9


def looked_up(monkeypatch: pytest.MonkeyPatch, since_s: float) -> MovedNames:
    """A thread looked the file up so long ago."""
    names = MovedNames(cast("Any", None))
    trio.run(names.found, THREAD, PARENT, b"name", INO, 1000.0)
    monkeypatch.setattr(moved_names, "now", lambda: 1000.0 + since_s)
    return names


def test_an_open_that_follows_its_look_up_belongs_to_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = looked_up(monkeypatch, 0.0002)
    assert names.has_just_found(THREAD, INO)
    assert not names.has_just_found(THREAD, INO), "by /proc/self/fd"


@pytest.mark.parametrize(
    ("since_s", "thread", "ino"),
    [(0.0003, THREAD, INO), (0.0001, THREAD + 1, INO), (0.0001, THREAD, INO + 1)],
)
def test_a_later_one_or_of_another_thread_or_file_does_not(
    monkeypatch: pytest.MonkeyPatch, since_s: float, thread: int, ino: int
) -> None:
    assert not looked_up(monkeypatch, since_s).has_just_found(thread, ino)
