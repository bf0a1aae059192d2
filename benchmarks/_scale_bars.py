"""What the rows of `scale` say together: whether a cluster costs no more than its nodes do, and how
two programs compare."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from benchmarks._interleave import BEFORE, Results, Row
from benchmarks._scale_rows import EACH_OTHER, TOTAL, called

_OF_LONE: Final = 1.1
_COMPARED: Final = ("files", "CPU of the writing node", EACH_OTHER, TOTAL)


class Bar(NamedTuple):
    """The most that a block of one node may cost all processes of a cluster, in microseconds."""

    flow: str
    nodes: int
    measured: float
    lone: float
    """What it costs a cluster of one node."""
    receiver: float
    """What it costs each node that only receives it."""

    @property
    def most(self) -> float:
        return _OF_LONE * self.lone + (self.nodes - 1) * self.receiver

    @property
    def is_met(self) -> bool:
        return self.measured <= self.most

    def __str__(self) -> str:
        return (
            f"{self.flow}, CPU of all {self.nodes} nodes: {self.measured:,.0f} µs, "
            f"≤ {self.most:,.0f} ({_OF_LONE:g} × {self.lone:,.0f} of a lone one"
            f" + {self.nodes - 1} × {self.receiver:,.0f} of a receiver):"
            f" {'met' if self.is_met else 'MISSED'}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "most": self.most, "met": self.is_met}


def bars(rows: Sequence[Row], sizes: Sequence[int], results: Results) -> list[Bar]:
    """Those of which all parts were measured."""
    return list(_bars(rows, sizes, results))


def _bars(rows: Sequence[Row], sizes: Sequence[int], results: Results) -> Iterator[Bar]:
    for flow in _flows(rows):
        lone = results.median(f"{flow}: {TOTAL}", called(1))
        for size in sorted(set(sizes) - {1}):
            measured = results.median(f"{flow}: {TOTAL}", called(size))
            receiver = results.median(f"{flow}: {EACH_OTHER}", called(size))
            if lone is not None and measured is not None and receiver is not None:
                yield Bar(flow, size, measured, lone, receiver)


def compared(rows: Sequence[Row], sizes: Sequence[int], results: Results) -> list[str]:
    """What this program takes of what the one before it takes; above 1 is faster or cheaper."""
    lines = []
    for flow in _flows(rows):
        for size in sizes:
            now, before = called(size), f"{called(size)}, {BEFORE}"
            ratios = {
                row.name.removeprefix(f"{flow}: "): results.ratio(row, now, before)
                for row in rows
                if row.name in {f"{flow}: {what}" for what in _COMPARED}
            }
            told = [f"{what} {ratio:.2f}" for what, ratio in ratios.items() if ratio is not None]
            if told:
                lines.append(f"{flow}, {now}, times as good as before: {', '.join(told)}")
    return lines


def _flows(rows: Sequence[Row]) -> list[str]:
    """In the order of the table."""
    return list(dict.fromkeys(row.name.rpartition(": ")[0] for row in rows))
