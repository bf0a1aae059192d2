"""What a history may look like: a model for each thing that is promised. Pure.

*Strict*: a name is a register that is linearizable: whoever opens it after a close (or an answer of
the S3 API) gets that value or a later one. *Cache*: a read gives what was there at some moment of
the last `bound_s` seconds, or a miss.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from tests.cluster.histories.events import ABSENT, EMPTY, TORN, Event
from tests.cluster.histories.linear import explain

Names = frozenset[tuple[str, int]]
"""The names that are there, with their values."""
_RECENT_S: Final = 10.0
_MADE: Final = 1
"""Of a directory."""
_RESERVED: Final = -3
_UNREAD: Final = -5
_WRITES: Final = ("put", "write", "put_new")
_LOOSE: Final = -4
"""Reserved by somebody who may be gone: the name may be free again."""


class Violation(Exception):
    """The history cannot have been; the text shows the part that tells."""


# ---- strict


def check_strict(events: Iterable[Event]) -> None:
    """Names below one directory are judged together: renames are between them. Raises Violation."""
    groups: dict[str, list[Event]] = defaultdict(list)
    for event in _judged([each for each in events if each.action != "append"]):
        groups[event.name.rpartition("/")[0]].append(event)
    for name, group in groups.items():
        step = _Steps(group)
        if not _is_possible(group, step):
            raise Violation(_shown(f"not linearizable: {name}", group, step))


def _is_possible(events: Sequence[Event], step: "_Steps") -> bool:
    """Values that nobody read are one for the search: it matters only that they were there."""
    read = {event.value for event in events if event.action == "read"}
    alike = [
        dataclasses.replace(event, value=_UNREAD)
        if event.action in _WRITES and event.value not in read
        else event
        for event in events
    ]
    return explain(alike, Names(), step) is not None


class _Steps:
    """What an operation leaves, of names in one directory."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._published = {
            event.value for event in events if event.action == "publish" and event.is_known
        }
        self._comes_and_goes = any(
            event.action in ("mkdir", "rmdir") or (event.action == "write" and event.is_refused)
            for event in events
        )
        """The directory itself, also one that nobody has made: else it is there all the time."""

    def __call__(self, names: Names, event: Event) -> Collection[Names]:
        there = dict(names)
        value = there.get(event.name, ABSENT)
        is_free = value in (ABSENT, _LOOSE)
        home = event.name.rpartition("/")[0] + "/"
        has_home = home in there or not self._comes_and_goes
        match event.action:
            case "mkdir" if event.is_refused:
                return [names] if has_home else []
            case "mkdir":
                return [] if has_home else [_with(there, home, _MADE)]
            case "rmdir" if event.is_refused:
                return [names]  # what is being made there is seen by nobody else
            case "rmdir":
                return [Names()] if list(there) == [home] else []
            case "write" if event.is_refused:
                return [] if has_home else [names]
            case "write" if not has_home:
                return []
            case "read" if value in (_RESERVED, _LOOSE):
                # It has no content yet, and need not be shown to others.
                return [names] if event.value in (ABSENT, EMPTY) else []
            case "read":
                return [names] if event.value == value else []
            case "put_new" | "reserve" if event.is_refused:
                return [names] if value != ABSENT else []
            case "put_new":
                return [_with(there, event.name, event.value)] if is_free else []
            case "reserve":
                is_kept = event.value in self._published
                after = _RESERVED if is_kept else _LOOSE
                return [_with(there, event.name, after)] if is_free else []
            case "publish":
                is_held = value in (_RESERVED, _LOOSE)
                return [_with(there, event.name, event.value)] if is_held else []
            case "put" | "write":
                return [_with(there, event.name, event.value)]
            case "drop":
                return [_with(there, event.name, ABSENT)]
            case "remove" | "rename" if event.is_refused:
                return [names] if value == ABSENT else []
            case "remove":
                return [_with(there, event.name, ABSENT)] if value != ABSENT else []
            case "append":  # judged by itself
                return [names]
            case "rename" if value == ABSENT:
                return []
            case "rename":
                moved = dict(_with(there, event.name, ABSENT))
                return [_with(moved, event.other, value)]


def _with(there: dict[str, int], name: str, value: int) -> Names:
    there = {**there, name: value}
    if value == ABSENT:
        del there[name]
    return frozenset(there.items())


def _judged(events: Sequence[Event]) -> list[Event]:
    """Without the reads of a file while its own host writes it in place, which may show parts; nor
    those of parts that a write in place left which failed. Raises Violation: other parts."""
    in_place = [event for event in events if event.action in ("write", "publish")]
    kept = []
    for event in events:
        if event.action == "read" and _may_show_parts(event, in_place):
            continue
        if event.action == "read" and event.value == TORN:
            raise Violation(f"torn: {event}{_before(event, events)}")
        kept.append(event)
    return kept


def _may_show_parts(read: Event, in_place: Iterable[Event]) -> bool:
    of_it = [each for each in in_place if each.name == read.name and each.overlaps(read)]
    if any(each.host == read.host for each in of_it):
        return True
    return read.value in (TORN, EMPTY) and not all(each.is_known for each in of_it)


def check_appended(events: Iterable[Event], name: str, lines: Sequence[int]) -> None:
    """The lines of a file in the end: each that was acknowledged once, no other but of those of
    which nobody knows, and in the order in which they were appended. Raises Violation."""
    appended = {each.value: each for each in events if each.name == name}
    for value in lines:
        if value not in appended or lines.count(value) != 1:
            raise Violation(f"{name}: a line that was not appended, or twice: {value}")
    for value, event in appended.items():
        if event.is_known and value not in lines:
            raise Violation(f"{name}: a line was lost: {event}")
    latest = -math.inf
    for value in lines:
        if appended[value].ended < latest:
            raise Violation(f"{name}: a line stands behind a later one: {appended[value]}")
        latest = max(latest, appended[value].began)


# ---- cache


def check_cache(events: Iterable[Event], bound_s: float) -> None:
    """Raises Violation. A miss is always allowed."""
    by_name: dict[str, list[Event]] = defaultdict(list)
    for event in _judged(list(events)):
        by_name[event.name].append(event)
    for name, group in by_name.items():
        writes = [event for event in group if event.action in ("put", "write", "remove", "drop")]
        for read in group:
            if read.action == "read" and read.value != ABSENT:
                _check_fresh(read, writes, bound_s, name)


def _check_fresh(read: Event, writes: Sequence[Event], bound_s: float, name: str) -> None:
    source = next((each for each in writes if each.value == read.value), None)
    if source is None or source.began > read.ended:
        raise Violation(f"{name}: of no write before it: {read}{_before(read, writes)}")
    for later in writes:
        is_over = later.ended < read.began - bound_s and later.began > source.ended
        if is_over and not later.is_refused:
            raise Violation(f"{name}: older than {bound_s:g} s:\n{source}\n{later}\n{read}")


# ---- for people


def _before(read: Event, events: Iterable[Event]) -> str:
    """What was done to the name of late."""
    since = read.began - _RECENT_S
    of_it = (each for each in events if each.name == read.name and since < each.began < read.ended)
    return "".join(f"\n{event}" for event in of_it)


def _shown(title: str, events: Sequence[Event], step: _Steps) -> str:
    """The shortest beginning of the history that cannot have been: what was known by the end of
    its last operation."""
    ends = sorted(event.ended for event in events if event.is_known)
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if not _is_possible(_until(events, ends[middle]), step):
            high = middle
        else:
            low = middle + 1
    part = sorted(_until(events, ends[low]), key=lambda event: event.began)
    return "\n".join([title, *map(str, part)])


def _until(events: Sequence[Event], moment: float) -> list[Event]:
    """As it looked then: what had not ended was not known."""
    return [
        event if event.ended <= moment else _open(event)
        for event in events
        if event.began <= moment and (event.ended <= moment or event.action != "read")
    ]


def _open(event: Event) -> Event:
    return dataclasses.replace(event, ended=math.inf, is_refused=False)
