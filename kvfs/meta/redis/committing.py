"""Commits many transactions at once: run one after the other against what is known, those of the
same shards together, checked and written in one round trip. No I/O of its own."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from kvfs.meta.engine import Transaction
from kvfs.meta.redis.known import Known, Missing
from kvfs.meta.redis.scripts import Changes
from kvfs.meta.redis.view import View

Function = Callable[[Transaction], Any]
LIMIT: Final = 128
"""Transactions in one commit: beyond it the server would keep others waiting for milliseconds."""


class Outcome(NamedTuple):
    """What one function returned, or raised."""

    value: object = None
    error: Exception | None = None

    def get(self) -> Any:
        """The value, or its error is raised."""
        if self.error is not None:
            raise self.error
        return self.value


class Group:
    """Functions that touch the same shards, to be committed together."""

    def __init__(self, shards: frozenset[int]) -> None:
        self.shards = shards
        self.members: list[int] = []
        """Places of the functions in what was prepared."""
        self.outcomes: list[Outcome] = []
        """Theirs, valid if the group commits."""
        self.views: list[View] = []

    def changes(self, known: Known) -> dict[int, Changes]:
        """What has to be unchanged, and what is written, in each shard."""
        of = known.layout.shard_of
        reads = {key for view in self.views for key in view.reads}
        scans = {each for view in self.views for each in view.scanned if each[0] < each[1]}
        written = {key: value for view in self.views for key, value in view.writes.items()}
        found = {shard: Changes([], [], [], []) for shard in self.shards}
        for key in reads:
            _append(found[of(key)].reads, (key, known.get(key)))
        for each in scans:
            _append(found[of(each[0])].scans, (*each, known.between(*each)))
        for key, value in written.items():
            if value is None:
                _append(found[of(key)].deletes, key)
            else:
                _append(found[of(key)].puts, (key, value))
        return found


class Prepared(NamedTuple):
    """What became of functions that were run."""

    groups: list[Group]
    """No shard is in two of them: they can be committed side by side."""
    missing: list[tuple[View, Missing]]
    """What some have to know first, with what they read up to there."""


def prepare(functions: Sequence[Function], known: Known) -> Prepared:
    """Run them in turn, each seeing what those of its group before it wrote. In no group are those
    that miss something, and those whose shards only overlap with another group's: they are to be
    run again, first of all."""
    prepared = Prepared([], [])
    below: dict[bytes, bytes | None] = {}
    for place, function in enumerate(functions):
        view = View(known, writable=True, below=below)
        try:
            outcome = run(function, view)
        except Missing as missing:
            prepared.missing.append((view, missing))
            continue
        group = _group_of(prepared.groups, frozenset(view.shards()))
        if group is not None:
            group.members.append(place)
            group.outcomes.append(outcome)
            group.views.append(view)
            if outcome.error is None:
                below.update(view.writes)
    return prepared


def run(function: Function, view: View) -> Outcome:
    """What it returns or raises, both of which hold only for what it read. Raises Missing."""
    try:
        return Outcome(function(view))
    except Exception as error:
        view.writes.clear()
        return Outcome(error=error)


def _group_of(groups: list[Group], shards: frozenset[int]) -> Group | None:
    """The group of exactly these shards, a new one where no group has any of them; else None."""
    for group in groups:
        if group.shards == shards:
            return group
        if group.shards & shards:
            return None
    groups.append(Group(shards))
    return groups[-1]


def _append(items: Sequence[Any], item: object) -> None:
    assert isinstance(items, list), "made as one above"
    items.append(item)
