"""The judge of histories lets pass what may have been, and nothing else."""

import math
import random
from collections.abc import Sequence

import pytest

from tests.cluster.histories.events import ABSENT, EMPTY, TORN, Action, Disturbance, Event
from tests.cluster.histories.models import Violation, check_appended, check_cache, check_strict
from tests.cluster.histories.peer_model import check_peer
from tests.cluster.histories.values import content, value_of

UNKNOWN = math.inf


def did(
    action: Action,
    began: float,
    ended: float,
    value: int = 0,
    *,
    name: str = "d/a",
    host: int = 1,
    refused: bool = False,
    other: str = "",
    front: str = "",
) -> Event:
    return Event(host, action, name, value, began, ended, refused, other, front)


GOOD: dict[str, Sequence[Event]] = {
    "nothing": [],
    "read after a put": [did("put", 0, 1, 7), did("read", 2, 3, 7, host=2)],
    "read during a put, old": [did("put", 0, 2, 7), did("read", 1, 3, ABSENT, host=2)],
    "read during a put, new": [did("put", 0, 2, 7), did("read", 1, 3, 7, host=2)],
    "two puts at once, either last": [
        did("put", 0, 5, 7),
        did("put", 0, 5, 8, host=2),
        did("read", 6, 7, 7),
    ],
    "an unknown put that was never done": [
        did("put", 0, 1, 7),
        did("put", 2, UNKNOWN, 8),
        did("read", 9, 10, 7),
    ],
    "an unknown put that was done late": [
        did("put", 0, 1, 7),
        did("put", 2, UNKNOWN, 8),
        did("read", 9, 10, 7),
        did("read", 11, 12, 8),
    ],
    "one of two exclusive creates": [
        did("put_new", 0, 2, 7),
        did("put_new", 1, 3, 8, host=2, refused=True),
        did("read", 4, 5, 7),
    ],
    "reserved, and not shown yet": [
        did("reserve", 0, 1, 7),
        did("publish", 1, 5, 7),
        did("put_new", 2, 3, 8, host=2, refused=True),
        did("read", 2, 3, ABSENT, host=2),
        did("read", 6, 7, 7, host=2),
    ],
    "who reserved it died": [
        did("reserve", 0, 1, 7),
        did("publish", 1, UNKNOWN, 7),
        did("put_new", 5, 6, 8, host=2),
        did("read", 7, 8, 8, host=2),
    ],
    "renamed": [
        did("put", 0, 1, 7),
        did("rename", 2, 3, other="d/b"),
        did("read", 4, 5, ABSENT),
        did("read", 4, 5, 7, name="d/b"),
    ],
    "renamed what had been renamed": [
        did("put", 0, 1, 7),
        did("rename", 2, 5, other="d/b"),
        did("rename", 2, 5, other="d/c", host=2, refused=True),
    ],
    "its own host sees a write in place": [
        did("put", 0, 1, 7),
        did("write", 2, 5, 8),
        did("read", 3, 4, TORN),
        did("read", 3, 4, 7, host=2),
        did("read", 6, 7, 8, host=2),
    ],
    "parts of a write in place that failed": [
        did("write", 0, UNKNOWN, 7),
        did("read", 2, 3, EMPTY, host=2),
    ],
    "a directory that comes and goes": [
        did("mkdir", 0, 1, name="d/"),
        did("mkdir", 2, 3, name="d/", host=2, refused=True),
        did("rmdir", 4, 5, name="d/"),
        did("rmdir", 6, 7, name="d/", refused=True),
        did("write", 6, 7, 7, refused=True),
    ],
    "a directory goes before a file is made, or after it went": [
        did("mkdir", 0, 1, name="d/"),
        did("write", 2, 5, 7),
        did("rmdir", 3, 4, name="d/", host=2, refused=True),
        did("remove", 6, 7),
        did("rmdir", 8, 9, name="d/", host=2),
    ],
    "a directory that is made again under a file": [
        did("mkdir", 0, 1, name="d/"),
        did("rmdir", 2, 6, name="d/", host=2),
        did("mkdir", 3, 6, name="d/", host=3),
        did("write", 2, 7, 7),
        did("read", 8, 9, 7, host=2),
    ],
    "a directory that nobody made": [
        did("read", 0, 1, ABSENT),
        did("remove", 0, 1, refused=True),
        did("write", 2, 3, 7, refused=True),
    ],
    "a removal that comes later than one might think": [
        did("read", 0, 1, ABSENT),
        did("put", 0, 5, 7),
        did("drop", 0, 4, host=2),
        did("read", 6, 7, ABSENT),
    ],
    "many of which nobody knows": [
        *(did("put", 0, UNKNOWN, 10 + n) for n in range(40)),
        *(did("remove", 0, UNKNOWN) for n in range(40)),
        did("put", 0, 1, 7),
        *(did("read", 2 * n, 2 * n + 1, (7, ABSENT, 11, ABSENT)[n - 1]) for n in range(1, 5)),
    ],
    "dropped twice": [did("put", 0, 1, 7), did("drop", 2, 3), did("drop", 4, 5)],
}

BAD: dict[str, Sequence[Event]] = {
    "one read too many beside many of which nobody knows": [
        *(did("put", 0, UNKNOWN, 10 + n) for n in range(40)),
        did("put", 0, 1, 7),
        did("read", 2, 3, 10),
        did("read", 4, 5, 7),
    ],
    "written in a directory that was not made": [
        did("write", 0, 1, 7, refused=True),
        did("write", 2, 3, 8),
    ],
    "stale": [did("put", 0, 1, 7), did("put", 2, 3, 8), did("read", 4, 5, 7, host=2)],
    "lost": [did("put", 0, 1, 7), did("read", 2, 3, ABSENT, host=2)],
    "came back": [
        did("put", 0, 1, 7),
        did("put", 2, UNKNOWN, 8),
        did("read", 3, 4, 8),
        did("read", 5, 6, 7),
    ],
    "two who made one name": [did("put_new", 0, 2, 7), did("put_new", 1, 3, 8, host=2)],
    "refused by nobody": [did("put_new", 0, 1, 7, refused=True)],
    "reserved twice": [
        did("reserve", 0, 1, 7),
        did("publish", 1, 5, 7),
        did("put_new", 2, 3, 8, host=2),
    ],
    "in two places": [
        did("put", 0, 1, 7),
        did("rename", 2, 3, other="d/b"),
        did("read", 4, 5, 7),
        did("read", 4, 5, 7, name="d/b"),
    ],
    "renamed by two": [
        did("put", 0, 1, 7),
        did("rename", 2, 5, other="d/b"),
        did("rename", 2, 5, other="d/c", host=2),
    ],
    "renamed by two, of whom one's kernel did nothing": [
        did("put", 0, 1, 7),
        did("rename", 2, 5, other="d/b", front="mount"),
        did("rename", 2, 5, other="d/b", front="mount", host=2),
        did("read", 6, 7, 7, name="d/b"),
    ],
    "torn": [did("put", 0, 1, 7), did("read", 2, 3, TORN)],
    "another host sees a write in place": [
        did("put", 0, 1, 7),
        did("write", 2, 5, 8),
        did("read", 3, 4, EMPTY, host=2),
    ],
    "a directory that went with a file": [
        did("mkdir", 0, 1, name="d/"),
        did("write", 2, 5, 7),
        did("rmdir", 3, 4, name="d/", host=2),
    ],
    "a file in a directory that is not there": [
        did("mkdir", 0, 1, name="d/"),
        did("rmdir", 2, 3, name="d/", host=2),
        did("write", 4, 5, 7),
    ],
    "a directory made twice": [
        did("mkdir", 0, 1, name="d/"),
        did("mkdir", 2, 3, name="d/", host=2),
    ],
    "from nowhere": [did("read", 0, 1, 7)],
    "before it was written": [did("read", 0, 1, 7, host=2), did("put", 2, 3, 7)],
}


@pytest.mark.parametrize("name", GOOD)
def test_what_may_have_been_passes(name: str) -> None:
    check_strict(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_have_been_is_found(name: str) -> None:
    with pytest.raises(Violation):
        check_strict(BAD[name])


def test_the_shortest_part_that_tells_is_shown() -> None:
    tail = [did("put", 10 + n, 10.5 + n, 100 + n) for n in range(20)]
    with pytest.raises(Violation) as caught:
        check_strict([*BAD["stale"], *tail])
    assert len(str(caught.value).splitlines()) == 4


# ---- the cache's bound

CACHE_GOOD: dict[str, Sequence[Event]] = {
    "a miss": [did("put", 0, 1, 7), did("read", 2, 3, ABSENT, host=2)],
    "old within the bound": [
        did("put", 0, 1, 7),
        did("put", 5, 6, 8),
        did("read", 7.5, 7.6, 7, host=2),
    ],
    "old, and perhaps never replaced": [
        did("put", 0, 1, 7),
        did("put", 5, UNKNOWN, 8),
        did("read", 20, 21, 7, host=2),
    ],
    "new and old by turns within the bound": [
        did("put", 0, 1, 7),
        did("put", 5, 6, 8),
        did("read", 6, 6.1, 8, host=2),
        did("read", 6.2, 6.3, 7, host=3),
    ],
}
CACHE_BAD: dict[str, Sequence[Event]] = {
    "old beyond the bound": [
        did("put", 0, 1, 7),
        did("put", 5, 6, 8),
        did("read", 8.5, 8.6, 7, host=2),
    ],
    "removed beyond the bound": [
        did("put", 0, 1, 7),
        did("remove", 5, 6),
        did("read", 8.5, 8.6, 7, host=2),
    ],
    "torn": [did("put", 0, 1, 7), did("read", 2, 3, TORN, host=2)],
    "from nowhere": [did("read", 0, 1, 7)],
}


@pytest.mark.parametrize("name", CACHE_GOOD)
def test_a_cache_may_be_late(name: str) -> None:
    check_cache(CACHE_GOOD[name], 2.0)


@pytest.mark.parametrize("name", CACHE_BAD)
def test_a_cache_may_not_be_late_without_bound(name: str) -> None:
    with pytest.raises(Violation):
        check_cache(CACHE_BAD[name], 2.0)


# ---- many at once


def _made_up(draw: random.Random, count: int, tasks: int) -> list[Event]:
    """A history of a real register: each operation done at a moment of its own."""
    moments = sorted(draw.uniform(0, count) for _ in range(count))
    value, events, busy = ABSENT, [], [0.0] * tasks
    for number, moment in enumerate(moments, 1):
        task = draw.randrange(tasks)
        began = max(busy[task], moment - draw.random() * 2)
        if began > moment:
            continue
        busy[task] = ended = moment + draw.random() * 2
        if draw.random() < 0.4:
            is_known = draw.random() < 0.9
            value = number
            events.append(did("put", began, ended if is_known else UNKNOWN, number, host=task))
        else:
            events.append(did("read", began, ended, value, host=task))
    return events


def test_registers_pass_and_one_wrong_read_is_found(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        events = _made_up(draw, 60, 5)
        check_strict(events)
        reads = [n for n, event in enumerate(events) if event.action == "read" and n > 20]
        if not reads:
            continue
        number = draw.choice(reads)
        wrong = did("read", events[number].began, events[number].ended, 10_000)
        with pytest.raises(Violation):
            check_strict([*events[:number], wrong, *events[number + 1 :]])


def test_contents_tell_what_they_are() -> None:
    for value in (1, 2, 16, 123_456):
        data = content(value)
        assert value_of(data) == value
        assert value_of(data[:-16]) == TORN
        assert value_of(data[:-16] + content(value + 1)[:16]) == TORN
    assert value_of(b"") == EMPTY
    assert value_of(bytes(4096)) == TORN


def appended(value: int, began: float, ended: float) -> Event:
    return Event(1, "append", "d/log", value, began, ended)


APPENDED = [
    appended(1, 0, 1),
    appended(2, 2, 5),
    appended(3, 3, 4),
    appended(4, 6, math.inf),
]


@pytest.mark.parametrize("lines", [[1, 2, 3], [1, 3, 2, 4]])
def test_lines_that_were_appended_stand_in_an_order_that_may_be(lines: list[int]) -> None:
    check_appended(APPENDED, "d/log", lines)


@pytest.mark.parametrize("lines", [[1, 2], [2, 1, 3], [1, 2, 3, 3], [1, 2, 3, 9], [4, 1, 2, 3]])
def test_lines_that_are_lost_twice_strange_or_late_are_found(lines: list[int]) -> None:
    with pytest.raises(Violation):
        check_appended(APPENDED, "d/log", lines)


# ---- names that nodes keep themselves; what others did is heard within 2

CUT = Disturbance(2, 6, frozenset([2]))
DRAINED = Disturbance(2, 3, frozenset([1]), empties=True)
PEER_GOOD: dict[str, tuple[Sequence[Event], Sequence[Disturbance]]] = {
    "not heard yet": ([did("put", 0, 1, 7), did("read", 2, 3, ABSENT, host=2)], []),
    "heard at once": ([did("put", 0, 2, 7), did("read", 1, 3, 7, host=2)], []),
    "cut off, and a moment after": (
        [did("put", 0, 1, 7), did("read", 7, 7.5, ABSENT, host=2)],
        [CUT],
    ),
    "each its own": (
        [
            did("put", 0, 1, 7),
            did("put", 0, 1, 8, host=2),
            did("read", 5, 6, 7),
            did("read", 5, 6, 8, host=2),
            did("read", 5, 6, 8, host=3),
        ],
        [],
    ),
    "a copy of what its writer has replaced": (
        [did("put", 0, 1, 7), did("put", 2, 3, 8), did("read", 9, 10, 7, host=2)],
        [],
    ),
    "removed elsewhere a moment ago": (
        [did("put", 0, 1, 7), did("remove", 4, 5, host=2), did("read", 6, 7, 7)],
        [],
    ),
    "written anew by another while it was removed": (
        [
            did("put", 0, 1, 7),
            did("remove", 4, 6),
            did("put", 5, 6, 8, host=2),
            did("read", 9, 10, 8),
        ],
        [],
    ),
    "a writer that gave up what it held": (
        [did("put", 0, 1, 7), did("read", 9, 10, ABSENT)],
        [DRAINED],
    ),
    "moved": (
        [
            did("put", 0, 1, 7),
            did("rename", 2, 3, other="d/b"),
            did("read", 6, 7, ABSENT, host=2),
            did("read", 6, 7, 7, name="d/b", host=2),
        ],
        [],
    ),
    "moved away where nobody knew of another's": (
        [
            did("put", 0, 1, 7),
            did("put", 0, 2, 8, host=2),
            did("rename", 2, 3, other="d/b"),
            did("read", 9, 10, 8, host=2),
        ],
        [],
    ),
    "perhaps removed": (
        [did("put", 0, 1, 7), did("remove", 2, UNKNOWN, host=2), did("read", 9, 10, ABSENT)],
        [],
    ),
}
PEER_BAD: dict[str, tuple[Sequence[Event], Sequence[Disturbance]]] = {
    "never written": ([did("put", 0, 1, 7), did("read", 2, 3, 8, host=2)], []),
    "of another name": ([did("put", 0, 1, 7, name="e/a"), did("read", 2, 3, 7)], []),
    "torn": ([did("put", 0, 1, 7), did("read", 2, 3, TORN, host=2)], []),
    "empty": ([did("put", 0, 1, 7), did("read", 2, 3, EMPTY, host=2)], []),
    "not found": ([did("put", 0, 1, 7), did("read", 3.5, 4, ABSENT, host=2)], []),
    "not found here": ([did("put", 0, 1, 7), did("read", 1.5, 2, ABSENT)], []),
    "not found here, cut off": (
        [did("put", 0, 1, 7, host=2), did("read", 3, 4, ABSENT, host=2)],
        [CUT],
    ),
    "not found long after it was cut off": (
        [did("put", 0, 1, 7), did("read", 9, 10, ABSENT, host=2)],
        [CUT],
    ),
    "another's instead of its own": (
        [did("put", 0, 1, 7), did("put", 0, 1, 8, host=2), did("read", 5, 6, 8)],
        [],
    ),
    "its own of before": ([did("put", 0, 1, 7), did("put", 2, 3, 8), did("read", 5, 6, 7)], []),
    "removed here": ([did("put", 0, 1, 7), did("remove", 2, 3), did("read", 4, 5, 7)], []),
    "removed elsewhere long ago": (
        [did("put", 0, 1, 7), did("remove", 2, 3, host=2), did("read", 6, 7, 7)],
        [],
    ),
    "moved away": (
        [did("put", 0, 1, 7), did("rename", 2, 3, other="d/b"), did("read", 4, 5, 7)],
        [],
    ),
    "lost when it moved": (
        [
            did("put", 0, 1, 7),
            did("rename", 2, 3, other="d/b"),
            did("read", 6, 7, ABSENT, name="d/b", host=2),
        ],
        [],
    ),
}


@pytest.mark.parametrize("case", PEER_GOOD)
def test_names_of_nodes_may_be_so(case: str) -> None:
    check_peer(*PEER_GOOD[case], lag_s=2)


@pytest.mark.parametrize("case", PEER_BAD)
def test_names_of_nodes_are_never_so(case: str) -> None:
    with pytest.raises(Violation):
        check_peer(*PEER_BAD[case], lag_s=2)
