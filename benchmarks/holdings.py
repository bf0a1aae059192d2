"""Who holds what, on one node: the table of holders, the own set, fingerprints and messages:

    ./dev bench holdings [--claims 1e6 1e7 1e8] [--quick] [--json FILE]

A table is filled with as many claims as said, of random fingerprints of 100 nodes; then each figure
is the median of repeated calls with fingerprints that are new each time, in processor time, which
says what a call takes from the node whatever else the machine does. Beside it stands a plain dict
from fingerprint to node. Nothing but the file of the own set touches a disk.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _report
from kvfs.holdings.delta_codec import decode, encode
from kvfs.holdings.fingerprints import BITS, NONE, U64, Fingerprinter
from kvfs.holdings.holder_table import MOST_AT_ONCE, HolderTable
from kvfs.holdings.messages import Deltas
from kvfs.holdings.own_set import OwnSet

_NODES: Final = 100
_PROBED: Final = 512
_REPEATS: Final = 200
_KEPT: Final = 100_000
"""Claims that are remembered, to ask for what is there."""
_DICT_MOST: Final = 10_000_000
_NANO: Final = 1e9
_MICRO: Final = 1e6
_MILLI: Final = 1e3
Figures = dict[str, float]


class Source:
    """Random fingerprints, from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def some(self, count: int) -> U64:
        return self._rng.integers(0, 1 << BITS, count, dtype=np.uint64)

    def among(self, fingerprints: U64, count: int) -> U64:
        return self._rng.choice(fingerprints, count)


def seconds(act: Callable[[U64], object], inputs: Iterator[U64]) -> list[float]:
    """The processor time with each of the inputs, which are made in between."""
    taken = []
    for each in inputs:
        begin = time.thread_time()
        act(each)
        taken.append(time.thread_time() - begin)
    return taken


def median(act: Callable[[U64], object], make: Callable[[], U64], repeats: int = _REPEATS) -> float:
    return statistics.median(seconds(act, (make() for _ in range(repeats))))


def p99(taken: list[float]) -> float:
    return statistics.quantiles(taken, n=100)[98]


def fill(table: HolderTable, source: Source, claims: int) -> tuple[Figures, U64]:
    """Fills it in batches of the size that a node uses; returns some of what is there."""
    kept, taken = [], []
    for number in range(-(-claims // MOST_AT_ONCE)):
        batch = source.some(min(MOST_AT_ONCE, claims - number * MOST_AT_ONCE))
        begin = time.thread_time()
        table.apply(number % _NODES + 1, batch, NONE)
        taken.append(time.thread_time() - begin)
        if number < _KEPT // MOST_AT_ONCE:
            kept.append(batch)
    figures = {
        "filling, ns a claim": sum(taken) / claims * _NANO,
        f"batch of {MOST_AT_ONCE}, p99, ms": p99(taken) * _MILLI,
    }
    return figures, np.concatenate(kept)


def of_table(claims: int, source: Source) -> Figures:
    table = HolderTable()
    figures, present = fill(table, source, claims)
    figures["bytes a claim"] = table.size_bytes / table.counters.claims
    absent = seconds(table.probe, (source.some(_PROBED) for _ in range(_REPEATS)))
    figures[f"probe of {_PROBED} absent, us"] = statistics.median(absent) * _MICRO
    figures[f"probe of {_PROBED} absent, p99, us"] = p99(absent) * _MICRO
    taken = median(table.probe, lambda: source.among(present, _PROBED))
    figures[f"probe of {_PROBED} present, us"] = taken * _MICRO
    taken = median(lambda one: table.holders_of(int(one[0])), lambda: source.some(1))
    figures["one absent name, us"] = taken * _MICRO
    figures["absent names claimed, of 10 million"] = sum(
        len(table.probe(source.some(1_000_000))) for _ in range(10)
    )
    return figures | of_changes(table, source) | of_nodes(table)


def of_changes(table: HolderTable, source: Source) -> Figures:
    figures: Figures = {}
    for size in (30, 1000, MOST_AT_ONCE):
        batches = [source.some(size) for _ in range(_REPEATS)]
        added = seconds(lambda batch: table.apply(1, batch, NONE), iter(batches))
        removed = seconds(lambda batch: table.apply(1, NONE, batch), iter(batches))
        for name, each in (("add", added), ("remove", removed)):
            figures[f"{name}, batches of {size}, ns"] = statistics.median(each) / size * _NANO

    def apply_together(batch: U64) -> None:
        table.apply_many(range(1, _NODES + 1), batch, [30] * _NODES, NONE, [0] * _NODES)

    taken = median(apply_together, lambda: source.some(30 * _NODES), 50)
    figures["add, 100 batches of 30 together, ns"] = taken / (30 * _NODES) * _NANO
    return figures


def of_nodes(table: HolderTable) -> Figures:
    begin = time.thread_time()
    for range_ in range(100):
        table.fingerprints_of(2, range_)
    read = (time.thread_time() - begin) / 100
    table.drop_node(2)
    taken = []
    more = True
    while more:
        begin = time.thread_time()
        more = table.step()
        taken.append(time.thread_time() - begin)
    return {
        "contents of a range of a node, ms": read * _MILLI,
        "a node dropped, all steps, ms": sum(taken) * _MILLI,
        "a node dropped, longest step, ms": max(taken) * _MILLI,
    }


def of_dict(claims: int, source: Source) -> Figures:
    held = dict.fromkeys(source.some(claims).tolist(), 1)

    def probe(some: list[int]) -> None:
        [each for each in some if each in held]

    taken = statistics.median(
        seconds(lambda some: probe(some.tolist()), (source.some(_PROBED) for _ in range(_REPEATS)))
    )
    size = sys.getsizeof(held) + sum(map(sys.getsizeof, list(held)[:1000])) / 1000 * len(held)
    return {f"probe of {_PROBED} absent, us": taken * _MICRO, "bytes a claim": size / len(held)}


def of_own_set(names: int, source: Source, directory: Path) -> Figures:
    path = directory / f"own-{names}"
    own = OwnSet.open(path, 1, 1)
    batches = (source.some(MOST_AT_ONCE) for _ in range(names // MOST_AT_ONCE))
    filled = sum(seconds(own.add, batches))
    own.mark_filled()
    figures = {"filling, ns a name": filled / names * _NANO}
    for size in (1, 30, 1000):
        taken = median(own.add, lambda size=size: source.some(size))
        figures[f"add, batches of {size}, us"] = taken / size * _MICRO
    figures["bytes a name"] = path.stat().st_size / len(own)
    begin = time.thread_time()
    assert OwnSet.open(path, 1, 1).is_filled
    figures["open after a kill, s"] = time.thread_time() - begin
    path.unlink()
    return figures


def of_messages(source: Source) -> Figures:
    paths = [b"model/%064x" % number for number in range(10_000)]
    fingerprinter = Fingerprinter(1, b"kv")
    taken = median(lambda _: fingerprinter.of_all(paths), lambda: NONE, 20)
    figures = {"fingerprint, ns a name": taken / len(paths) * _NANO}
    for size in (1, 30, 1000):
        figures |= of_deltas(size, source)
    return figures


def of_deltas(size: int, source: Source) -> Figures:
    message = Deltas(1, 1, 1, size, np.sort(source.some(size)), NONE, 1)
    packed = encode(message)
    return {
        f"deltas of {size}, bytes a change": len(packed) / size,
        f"encode deltas of {size}, us": median(lambda _: encode(message), lambda: NONE) * _MICRO,
        f"decode deltas of {size}, us": median(lambda _: decode(packed), lambda: NONE) * _MICRO,
    }


def measure(claims: list[int], seed: int) -> dict[str, Any]:
    source = Source(seed)
    rows: dict[str, Figures] = {"messages": of_messages(source)}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        for each in claims:
            rows[f"table, {each:,} claims"] = of_table(each, source)
            if each <= _DICT_MOST:
                rows[f"dict, {each:,} claims"] = of_dict(each, source)
                rows[f"own set, {each:,} names"] = of_own_set(each, source, Path(directory))
    return {"conditions": _report.conditions(Path("/var/tmp")), "seed": seed, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(prog="dev bench holdings", description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a million claims")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    claims = [1_000_000] if options.quick else [int(each) for each in options.claims]
    report = measure(claims, options.seed)
    for row, figures in report["rows"].items():
        print(row)
        for name, value in figures.items():
            print(f"  {name:40} {value:,.4g}")
    print(json.dumps(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
