"""Interleaved measuring: every system in every round, the order rotated, so that a slow minute hits
all of them.

A *system* is a directory to be measured (native, one mode of KVFS, a peer). A *group* measures one
or more *rows* at once (create, rename and unlink are three rows of one pass). A row's result is the
median over the rounds; its ratio to another system is the median of the ratios within each round,
because on a shared machine the rounds differ by more than the systems.

A failure of one system is that system's result in that row: the others go on.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal

from benchmarks._systems import System

NATIVE: Final = "native"
JUICEFS: Final = "juicefs"
NGINX: Final = "nginx"
SEAWEEDFS: Final = "seaweedfs"
RCLONE: Final = "rclone"
SAFETENSORS: Final = "safetensors"
FASTSAFETENSORS: Final = "fastsafetensors"
RUNAI: Final = "runai"
BEFORE: Final = "before"
"""Another version of this program."""
BEST_PEER: Final = "the best peer"
"""The fastest in a round of those that do the same work."""

_PEERS: Final = (SEAWEEDFS, JUICEFS, RCLONE, SAFETENSORS, FASTSAFETENSORS, RUNAI)
_MEASUREMENT_S: Final = 300.0
_SILENT_S: Final = 10.0
"""After which a run says again how far it is."""


@dataclass(frozen=True)
class Target:
    """What a row is to reach: a multiple of another system's speed, or a bound in the row's own
    unit.
    """

    kind: Literal[
        "of_native",
        "of_juicefs",
        "of_nginx",
        "of_safetensors",
        "of_best_peer",
        "at_most_of_nginx",
        "at_least",
        "at_most",
    ]
    bound: float

    def __str__(self) -> str:
        match self.kind:
            case "of_native":
                return f"≥ {self.bound:g}"
            case "of_juicefs":
                return f"≥ {self.bound:g} × JuiceFS"
            case "of_nginx":
                return f"≥ {self.bound:g} × nginx"
            case "of_safetensors":
                return f"≥ {self.bound:g} × safetensors"
            case "of_best_peer":
                return f"≥ {self.bound:g} × {BEST_PEER}"
            case "at_most_of_nginx":
                return f"≤ {self.bound:g} × nginx"
            case "at_least":
                return f"≥ {self.bound:,g}"
            case "at_most":
                return f"≤ {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One line of the table. `targets` by system name; a system without an entry is only shown.
    Speeds are shown relative to `base`'s.
    """

    name: str
    unit: str
    higher_is_better: bool
    targets: Mapping[str, Sequence[Target]] = field(default_factory=dict)
    base: str = NATIVE


@dataclass(frozen=True)
class Group:
    """Rows measured together. `measure` returns a value per row name, in the row's unit; None where
    the row says nothing about that system.

    `prepare` runs once for each system before any measuring (data sets); `applies` leaves out
    systems that cannot be asked. `rounds` overrides the run's number of rounds where more would say
    nothing (a start, a memory size).
    """

    rows: Sequence[Row]
    measure: Callable[[System], Mapping[str, float | None]]
    prepare: Callable[[System], None] = lambda _system: None
    applies: Callable[[System], bool] = lambda _system: True
    rounds: int | None = None
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What all its rows' names have before a colon; where they differ in that, all names."""
        names = [row.name for row in self.rows]
        heads = {name.rpartition(": ")[0] for name in names}
        return min(heads) if len(heads) == 1 and "" not in heads else ", ".join(names)


@dataclass
class Results:
    """Samples by row and system, a list with one entry per round (None where that system failed),
    and the failures.
    """

    samples: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, row: str, system: str, value: float | None) -> None:
        self.samples.setdefault(row, {}).setdefault(system, []).append(value)

    def fail(self, row: str, system: str, error: str) -> None:
        self.add(row, system, None)
        self.failures.setdefault(row, {}).setdefault(system, error)

    def median(self, row: str, system: str) -> float | None:
        values = [v for v in self.samples.get(row, {}).get(system, []) if v is not None]
        return statistics.median(values) if values else None

    def ratio(self, row: Row, system: str, base: str) -> float | None:
        """Speed relative to `base`: above 1 is faster. None where they have no round in common."""
        rounds = self.samples.get(row.name, {})
        bases = self._best_of_peers(row) if base == BEST_PEER else rounds.get(base, [])
        pairs = zip(rounds.get(system, []), bases, strict=False)
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        if not ratios:
            return None
        if not row.higher_is_better:
            ratios = [1 / ratio for ratio in ratios]
        return statistics.median(ratios)

    def _best_of_peers(self, row: Row) -> list[float | None]:
        """Of each round."""
        rounds = self.samples.get(row.name, {})
        best = max if row.higher_is_better else min
        turns = zip_longest(*(rounds[peer] for peer in _PEERS if peer in rounds))
        return [best(filter(None, turn), default=None) for turn in turns]

    def is_beyond(self, row: Row, target: Target) -> bool:
        """Whether the machine itself does not give so much: a multiple of a loader's speed is asked
        where plain reads have it."""
        if target.kind != "of_safetensors":
            return False
        most = self.ratio(row, NATIVE, SAFETENSORS)
        return most is not None and most < target.bound

    def meets(self, row: Row, system: str, target: Target) -> bool | None:
        """None when it could not be judged: not in this run, failed, or `is_beyond`."""
        if self.is_beyond(row, target):
            return None
        value: float | None
        match target.kind:
            case "of_native":
                value = self.ratio(row, system, NATIVE)
            case "of_juicefs":
                value = self.ratio(row, system, JUICEFS)
            case "of_nginx":
                value = self.ratio(row, system, NGINX)
            case "of_safetensors":
                value = self.ratio(row, system, SAFETENSORS)
            case "of_best_peer":
                value = self.ratio(row, system, BEST_PEER)
            case "at_most_of_nginx":
                speed = self.ratio(row, system, NGINX)
                value = None if speed is None else 1 / speed
            case "at_least" | "at_most":
                value = self.median(row.name, system)
        if value is None:
            return None
        bounded_above = target.kind in ("at_most", "at_most_of_nginx")
        return value <= target.bound if bounded_above else value >= target.bound


def run(
    groups: Sequence[Group],
    systems: Sequence[System],
    results: Results,
    *,
    rounds: int,
    deadline: float,
    watch: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    """Adds to `results`. Prepares nothing: data sets must be there. Ends soon after `deadline` (of
    time.monotonic), each group with at least one round. `watch(seconds)` is called before each
    measurement: whoever guards the run ends one that takes longer.
    """
    for position, group in enumerate(groups):
        say(f"{position + 1} of {len(groups)}: {group.name}")
        left = sum(later.weight for later in groups[position:])
        until = time.monotonic() + max(0.0, deadline - time.monotonic()) * group.weight / left
        _run_group(group, systems, group.rounds or rounds, until, results, watch, say)


def _run_group(
    group: Group,
    systems: Sequence[System],
    rounds: int,
    until: float,
    results: Results,
    watch: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    asked = [system for system in systems if group.applies(system)]
    said = began = time.monotonic()
    for turn in range(rounds):
        if turn and time.monotonic() + (time.monotonic() - began) / turn > until:
            say(f"the time is over after {turn} of {rounds} rounds")
            return
        first = turn % max(1, len(asked))
        for system in asked[first:] + asked[:first]:
            if time.monotonic() - said > _SILENT_S:
                said = time.monotonic()
                say(f"round {turn + 1} of {rounds}: {system.name}")
            watch(_MEASUREMENT_S)
            _measure_once(group, system, results, say)


def _measure_once(
    group: Group, system: System, results: Results, say: Callable[[str], None]
) -> None:
    try:
        values = group.measure(system)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        say(f"{system.name} failed: {told}")
        for row in group.rows:
            results.fail(row.name, system.name, told)
        return
    said = [f"{name.rpartition(': ')[2]} {v:,.4g}" for name, v in values.items() if v is not None]
    say(f"{system.name}: {', '.join(said)}")
    for row in group.rows:
        if row.name in values:
            value = values[row.name]
            if value is not None:
                results.add(row.name, system.name, value)
        else:
            results.fail(row.name, system.name, "not measured")
