"""What names without a centre cost a large cluster, by the simulation of `_simulated_names`; first
what it says of clusters that were measured."""

import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from benchmarks import _processes
from benchmarks import _simulated_names as names
from kvfs.holdings import delta_codec
from kvfs.holdings.fingerprints import BITS, RANGES, U64, ranges_of
from kvfs.holdings.holder_table import MOST_AT_ONCE, HolderTable
from kvfs.holdings.home_map import HOMES
from kvfs.holdings.messages import RangeContents

T = TypeVar("T")
Figures = dict[str, float]
WITHIN: Final = 0.2
"""The share by which a prediction may miss what was measured."""
_MOST_FILLED: Final = 1 << 23
_MOST_JOINED: Final = 1_000_000
MICRO: Final = 1e6
_TOTAL: Final = "block, peer: CPU of all nodes and the server"
_OTHER: Final = "block, peer: CPU of each other node"
_SPEED: Final = "block, peer: files"
_SIZE: Final = re.compile(r"\d+ nodes")
_PREDICTED_S: Final = 20.0
"""Of simulated time, of a small cluster at rest and busy."""
_SECONDS: Final = 1.5
"""Of a large one."""
_FEW: Final = 300
"""The most nodes of which some die, and that are homes: a simulated second of a thousand takes half
a minute, and the trees of these have as many steps."""


class Extent(NamedTuple):
    """The size of a cluster."""

    nodes: int
    blocks: int
    changes_per_s: float
    """Of all nodes together."""
    lost: int
    """Nodes that die together."""
    cut_s: float


# --- clusters that were measured ---------------------------------------------------------------


class Prediction(NamedTuple):
    what: str
    measured: float
    """Microseconds a block."""
    predicted: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def is_near(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.predicted:,.4g} µs predicted, {self.measured:,.4g} measured:"
            f" {self.ratio:.2f}, within {WITHIN:g}: {'met' if self.is_near else 'MISSED'}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ratio": self.ratio, "met": self.is_near}


class _Measured(NamedTuple):
    """What a block cost in a cluster of some size: medians of the rounds."""

    total: float
    """Microseconds of all processes."""
    other: float
    """Of each node that does not write; 0 where there is none."""
    speed: float
    """Blocks a second."""


def predictions(measured: Path) -> tuple[list[Prediction], float]:
    """What the simulation says of the clusters of `bench scale --json FILE`, in which one node
    writes. A lone node gives what a block costs without others; the other node of two gives the
    processor time of a request at either end, with all that carries it, which is returned too, in
    seconds. All beyond what nodes do at rest, as it was measured. Raises ValueError: the file lacks
    some of that."""
    clusters = _measured(measured)
    seen = {size: _told(size, each.speed) for size, each in clusters.items()}
    two, others = clusters[2], seen[2].others
    request_s = max(0.0, two.other / MICRO * two.speed - others.cpu_s) / others.requests

    def cost(windows: names.Windows, size: int) -> float:
        used_s = windows.cpu_s + windows.requests * request_s
        return used_s / clusters[size].speed * MICRO

    lone = clusters[1].total - cost(seen[1].tellers, 1)
    found = []
    for size in sorted(set(clusters) - {1}):
        receiver = cost(seen[size].others, size)
        whole = lone + cost(seen[size].tellers, size) + (size - 1) * receiver
        found.append(Prediction(f"{size} nodes, each other node", clusters[size].other, receiver))
        found.append(Prediction(f"{size} nodes, all of them", clusters[size].total, whole))
    return found, request_s


def _measured(file: Path) -> dict[int, _Measured]:
    """By the size of the cluster."""
    rows = {each["row"]: each["systems"] for each in json.loads(file.read_text())["rows"]}
    found = {}
    try:
        for name in filter(_SIZE.fullmatch, rows[_TOTAL]):
            samples = [rows[row].get(name, {"samples": [0.0]}) for row in (_TOTAL, _OTHER, _SPEED)]
            values = [[v for v in each["samples"] if v is not None] for each in samples]
            if all(values):
                found[int(name.split()[0])] = _Measured(*map(statistics.median, values))
    except KeyError as error:
        raise _lacking(file, f"the row {error}") from None
    for size in (1, 2):
        if size not in found:
            raise _lacking(file, f"a cluster of {size}")
    return found


def _lacking(measured: Path, what: str) -> ValueError:
    command = f"./dev bench scale --nodes 1,2,4,8 --rows '^block, peer' --json {measured}"
    return ValueError(f"{measured} lacks {what}; this measures it: {command}")


def _told(size: int, speed: float) -> names.Seconds:
    return _in_scratch(lambda at: names.run(at, size, speed, _PREDICTED_S, writers=1))


# --- a large one -------------------------------------------------------------------------------


def large(
    extent: Extent, request_s: float, say: Callable[[str], None]
) -> tuple[Figures, dict[str, list[float]]]:
    """Figures, and the ages of names when nodes came to know them, by what had happened. `say` is
    told what begins."""
    rate, few = extent.changes_per_s / extent.nodes, min(extent.nodes, _FEW)
    lost = max(1, extent.lost * few // extent.nodes)
    say(f"{extent.nodes} nodes in peace; {few} homes; of {few}, {lost} die, and a cut")
    tasks: Sequence[_processes.Task] = [
        lambda: partial(_peace, extent.nodes, rate, False, say),
        lambda: partial(_peace, few, rate, True, say),
        lambda: partial(_trouble, few, rate, lost, extent.cut_s, say),
    ]
    together = _processes.together(tasks)
    peace, homes = (names.Windows(*(names.Window(*w) for w in each)) for each in together[:2])
    troubles = names.Troubles(*together[2])
    say(f"a join, and the table of {extent.blocks:,} blocks")
    share = extent._replace(blocks=max(1, HOMES * extent.blocks // extent.nodes))
    window = peace.busy
    figures = {
        **_second("", peace, request_s),
        "bytes a change": window.bytes / window.changes,
        "CPU beyond rest, us a change": peace.cpu_s / window.changes * MICRO,
        **_staleness("staleness", window.ages),
        **_staleness(f"{lost} of {few} die, until that is known: staleness", troubles.ages),
        **_staleness(f"{lost} of {few} are known to be dead: staleness", troubles.ages_after),
        f"{few} nodes, after a cut of {extent.cut_s:g} s, until all know all, s": troubles.healed_s,
        **_memory(extent),
        **_join(extent),
        **_second(f"{few} homes: ", homes, request_s),
        **_staleness(f"{few} homes: staleness", homes.busy.ages),
        "homes: table of holders, GB": _memory(share)["table of holders, GB"],
    }
    ages = {
        "in peace": window.ages,
        f"{lost} of {few} nodes die": troubles.ages,
        "once that is known": troubles.ages_after,
    }
    return figures, ages


def _peace(nodes: int, rate: float, homes: bool, say: Callable[[str], None]) -> names.Windows:
    found = _in_scratch(lambda at: names.run(at, nodes, rate, _SECONDS, homes=homes)).others
    busy = found.busy
    say(
        f"{'homes' if homes else 'peace'}: {busy.requests:.4g} requests, {busy.cpu_s:.4g} s of CPU,"
        f" {busy.bytes:,.6g} B a second; {_staleness('staleness', busy.ages)}"
    )
    return found


def _trouble(
    nodes: int, rate: float, lost: int, cut_s: float, say: Callable[[str], None]
) -> names.Troubles:
    found = _in_scratch(lambda at: names.trouble(at, nodes, rate, lost, cut_s))
    say(f"after the cut all know all in {found.healed_s:.3g} s")
    return found


def _second(what: str, windows: names.Windows, request_s: float) -> Figures:
    """What names cost a node in a second."""
    return {
        f"{what}{name}{when}": value
        for window, when in ((windows.busy, ""), (windows.at_rest, ", at rest"))
        for name, value in (
            ("changes a second", window.changes),
            ("requests to a node a second", window.received),
            ("requests of a node a second", window.sent),
            ("bytes to a node a second", window.bytes),
            ("changes that a node applies a second", window.applied),
            ("CPU of a node for names, of a core", window.cpu_s),
            ("CPU with its requests, of a core", window.cpu_s + window.requests * request_s),
        )
    }


def _staleness(what: str, ages: Sequence[float]) -> Figures:
    cuts = statistics.quantiles(ages, n=100)
    return {f"{what} p50, s": cuts[49], f"{what} p99, s": cuts[98]}


def _memory(extent: Extent) -> Figures:
    """Of the table: one of fewer claims is filled, which stands at the same place between two
    doublings."""
    claims, times = extent.blocks, 1
    while claims > _MOST_FILLED:
        claims, times = -(-claims // 2), times * 2
    table, random = HolderTable(), np.random.default_rng(1)
    spent = 0.0
    for start in range(0, claims, MOST_AT_ONCE):
        some = _random(random, min(MOST_AT_ONCE, claims - start))
        began = time.thread_time()
        table.apply(1 + start % 97, some, some[:0])
        spent += time.thread_time() - began
    return {
        "table of holders, GB": table.size_bytes * times / 1e9,
        "CPU to apply a claim, ns": spent / claims * 1e9,
    }


def _join(extent: Extent) -> Figures:
    """A node that knows nothing asks each other one for the contents of its ranges."""
    count = min(extent.blocks // extent.nodes, _MOST_JOINED)
    held = np.unique(_random(np.random.default_rng(2), count))
    places = ranges_of(held)
    sent, spent, told = 0, 0.0, 0
    table = HolderTable()
    for range_ in range(RANGES):
        part = held[places == range_]
        encoded = delta_codec.encode(RangeContents(1, 1, 1, range_, part))
        began = time.thread_time()
        message = delta_codec.decode(encoded)
        assert isinstance(message, RangeContents)
        table.replace_range(1, range_, message.fingerprints)
        spent += time.thread_time() - began
        sent, told = sent + len(encoded), told + len(part)
    return {
        "join: bytes a name": sent / told,
        "join: GB": sent / told * extent.blocks / 1e9,
        "join: CPU of the node, us a name": spent / told * MICRO,
        "join: CPU of the node, s": spent / told * extent.blocks,
    }


def _random(random: np.random.Generator, count: int) -> U64:
    return random.integers(0, 1 << BITS, count, np.uint64)


def _in_scratch(step: Callable[[Path], T]) -> T:
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-") as made:
        return step(Path(made))


# --- for people --------------------------------------------------------------------------------

_WIDTH: Final = 640
_HEIGHT: Final = 360
_EDGE: Final = 40
_COLOURS: Final = ("#1b6ca8", "#c0392b", "#27ae60")


def picture(title: str, ages: dict[str, list[float]]) -> str:
    """The share of names that nodes knew after so many seconds, as SVG; on a logarithmic scale."""
    low, high = 0.01, max(10.0, *(max(each) for each in ages.values()))
    span = np.log10(high / low)

    def x(seconds: float) -> float:
        return float(_EDGE + _WIDTH * np.log10(max(seconds, low) / low) / span)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _EDGE}" '
        f'height="{_HEIGHT + 3 * _EDGE}" font-family="sans-serif" font-size="12">',
        f'<text x="{_EDGE}" y="20">{title}</text>',
    ]
    parts += [
        f'<line x1="{x(seconds):.0f}" x2="{x(seconds):.0f}" y1="{_EDGE}" y2="{_EDGE + _HEIGHT}" '
        f'stroke="#ddd"/><text x="{x(seconds):.0f}" y="{_EDGE + _HEIGHT + 16}">{seconds:g} s</text>'
        for seconds in (0.01, 0.1, 1, 10)
    ]
    for number, (name, each) in enumerate(ages.items()):
        ordered, colour = np.sort(each), _COLOURS[number % len(_COLOURS)]
        points = " ".join(
            f"{x(ordered[int(share * (len(ordered) - 1))]):.1f},{_EDGE + _HEIGHT * (1 - share):.1f}"
            for share in np.linspace(0, 1, 201)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(
            f'<text x="{_EDGE + 8}" y="{_EDGE + 16 * (number + 1)}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
