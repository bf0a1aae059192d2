"""Placement, repair, evening out and the spreading of reads in a large cluster, on paper; and the
names of peer namespaces there, by the code that nodes run, in simulated time:

    ./dev bench simulate [--nodes 1000] [--files 20000] [--quick] [--json FILE]
                         [--trace FILE]
                         [--names [--measured FILE] [--picture FILE]]

Nothing is moved: the same pure modules that nodes use decide (`kvfs.policy`), and this counts what
follows from it. Rows:

- balance: how full the fullest node is, of the mean, after files were written everywhere;
- zones: files whose copies all lie in one zone (a zone may fail);
- rebuild: a node is lost: bytes that the busiest of the others reads or writes to restore its
  copies, of what it would be were all alike; and the time at a rate for each node;
- evening out: bytes moved after nodes are added, of the least that makes all equally full;
- spares (with --trace, of Mooncake's form): shares of a trace's blocks that any of 8 nodes has
  still, by the blocks that a node has room for, where each evicts by age alone, and where copies
  that others have go first;
- names (alone, with --names): processor time, memory, network and staleness of a node that is told
  what all others hold, a join, nodes that die, a cut in halves. With --measured, what `bench scale
  --nodes 1,2,4,8 --json FILE` measured is predicted first; where that is not within a fifth,
  nothing is said of the large cluster;
- incast: all nodes read one file at once: the time until the last has it, in times of a single
  transfer; a plain server would need as many as there are readers.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _program, _simulated_cluster, _spare_rows
from kvfs.policy import placement, rebalance_plan, replica_repair
from kvfs.policy.cluster_snapshot import ClusterSnapshot, Host
from kvfs.policy.rebalance_plan import Copy

_CAPACITY: Final = 1 << 40
_ZONES: Final = 5
_RACKS: Final = 10
_RATE: Final = 256 << 20
"""Bytes a second that a node gives to repair."""
_CUT_S: Final = 15.0
"""Longer than a lease."""
_say: Final = _program.teller("simulate")
_FANOUT: Final = 2
"""Readers that a holder serves at once before it sends others on."""


class Cluster:
    """Nodes, and which files lie on them."""

    def __init__(self, nodes: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.used = dict.fromkeys(range(1, nodes + 1), 0)
        self.holders: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        self.away: set[int] = set()

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            Host(
                number,
                _CAPACITY,
                _CAPACITY - used,
                zone=f"z{number % _ZONES}",
                rack=f"r{number // _ZONES % _RACKS}",
                alive=number not in self.away,
            )
            for number, used in self.used.items()
        )

    def write(self, files: int, share: float, copies: int) -> None:
        """As many files as said, which together fill that share of the cluster."""
        mean = share * _CAPACITY * len(self.used) / files / copies
        numbers = list(self.used)
        for ino in range(1, files + 1):
            if ino % 256 == 1:  # nodes tell what is free every few seconds
                snapshot = self.snapshot()
            size = int(mean * self.random.uniform(0.5, 1.5))
            writer = self.random.choice(numbers)
            places = [writer]
            if copies > 1:
                places += placement.choose(snapshot, ino, size, copies - 1, holders=places)
            self.holders[ino], self.sizes[ino] = places, size
            for number in places:
                self.used[number] += size


def balance(cluster: Cluster) -> dict[str, Any]:
    mean = sum(cluster.used.values()) / len(cluster.used)
    snapshot = cluster.snapshot()
    together = sum(
        len({host.zone for host in snapshot.alive(numbers)}) == 1
        for numbers in cluster.holders.values()
    )
    return {
        "fullest_of_mean": max(cluster.used.values()) / mean,
        "emptiest_of_mean": min(cluster.used.values()) / mean,
        "files_in_one_zone": together,
    }


def rebuild(cluster: Cluster, copies: int) -> dict[str, Any]:
    """A node goes; the others restore what it had."""
    lost = cluster.random.choice(list(cluster.used))
    cluster.away.add(lost)
    snapshot = cluster.snapshot()
    work: Counter[int] = Counter()
    restored = unrestored = 0
    for ino, numbers in cluster.holders.items():
        if lost not in numbers:
            continue
        verdict = replica_repair.judge(snapshot, ino, numbers, copies)
        size = cluster.sizes[ino]
        chosen = placement.choose(snapshot, ino, size, verdict.missing, holders=numbers)
        if verdict.actor is None or len(chosen) < verdict.missing:
            unrestored += 1
            continue
        for target in chosen:
            work[verdict.actor] += size
            work[target] += size
            restored += size
    busiest = max(work.values(), default=0)
    return {
        "bytes": restored,
        "files_not_restored": unrestored,
        "busiest_of_even": busiest * (len(cluster.used) - 1) / (2 * restored) if restored else 0.0,
        "seconds": busiest / _RATE,
        "seconds_if_one_node_did_it": restored / _RATE,
    }


def even_out(cluster: Cluster, added: int) -> dict[str, Any]:
    """Empty nodes come; what moves, in rounds that each decide from one snapshot."""
    new = range(max(cluster.used) + 1, max(cluster.used) + 1 + added)
    cluster.used.update(dict.fromkeys(new, 0))
    mean = rebalance_plan.fill(cluster.snapshot()) * _CAPACITY
    ideal = sum(mean - used for used in cluster.used.values() if used < mean)
    moved = rounds = 0
    while (count := _round(cluster)) and rounds < 20:
        moved, rounds = moved + count, rounds + 1
    return {
        "moved_of_ideal": moved / ideal,
        "new_nodes_of_mean": sum(cluster.used[number] for number in new) / mean / added,
        "rounds": rounds,
    }


def _round(cluster: Cluster) -> int:
    snapshot, moved = cluster.snapshot(), 0
    held: dict[int, list[Copy]] = {}
    for ino, numbers in cluster.holders.items():
        held.setdefault(numbers[0], []).append(Copy(ino, cluster.sizes[ino], tuple(numbers)))
    for number, copies in held.items():
        for move in rebalance_plan.shed(snapshot, number, copies):
            cluster.holders[move.ino].remove(number)
            cluster.holders[move.ino].append(move.target)
            cluster.used[number] -= move.size
            cluster.used[move.target] += move.size
            moved += move.size
    return moved


def incast(readers: int) -> dict[str, Any]:
    """All read one file at once from one holder. A holder that serves as many as it may sends the
    next to a node that is getting the file; chunks are passed on as they come, so a node's own
    transfer is as fast as its source's, and a chunk's time late."""
    chunks = 64
    serving = [(0.0, 0, 0)]  # (when the first chunk is there, readers served, number)
    last = 0.0
    for number in range(1, readers + 1):
        ready, served, source = heapq.heappop(serving)
        begun = ready + 1 / chunks
        last = max(last, begun + float(_FANOUT))
        if served + 1 < _FANOUT:
            heapq.heappush(serving, (ready, served + 1, source))
        heapq.heappush(serving, (begun, 0, number))
    return {"times_of_a_single": last, "plain_server": readers, "log2": math.log2(readers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="requests with the blocks of each, gzipped")
    parser.add_argument("--quick", action="store_true", help="100 nodes, 2,000 files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", action="store_true", help="only the names of peer namespaces")
    parser.add_argument("--blocks", type=int, default=10**9, help="with --names: in all")
    parser.add_argument(
        "--changes-per-s", type=float, default=30_000, help="with --names: of all nodes together"
    )
    parser.add_argument("--measured", type=Path, metavar="FILE", help="of `bench scale --json`")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the staleness, as SVG")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.files = 100, 2000
        options.blocks, options.changes_per_s = 10**7, 3_000
    if options.names:
        _tell_of_names(options)
        return
    report = simulate(options.nodes, options.files, options.copies, options.seed)
    if options.trace:
        report["rows"]["spares"] = _spare_rows.rows(options.trace, options.seed)
    for row, figures in report["rows"].items():
        print(row)
        for name, value in figures.items():
            print(f"  {name.replace('_', ' '):28} {value:,.3g}")
    print(json.dumps(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _tell_of_names(options: argparse.Namespace) -> None:
    extent = _simulated_cluster.Extent(
        options.nodes, options.blocks, options.changes_per_s, options.nodes // 20, _CUT_S
    )
    try:
        found, request_s = (
            _simulated_cluster.predictions(options.measured) if options.measured else ([], 0.0)
        )
    except (OSError, ValueError) as error:
        sys.exit(f"bench simulate: {error}")
    for each in found:
        print(each)
    report = {
        "benchmark": "simulate names",
        **extent._asdict(),
        "predicted": [each.as_json() for each in found],
        "CPU of a request, us": request_s * _simulated_cluster.MICRO,
    }
    if all(each.is_near for each in found):
        figures, ages = _simulated_cluster.large(extent, request_s, _say)
        report["large"] = figures
        for name, value in figures.items():
            print(f"{name:60} {value:,.4g}")
        if options.picture:
            title = f"names known after, {extent.nodes} nodes, {extent.changes_per_s:,.0f} a second"
            options.picture.write_text(_simulated_cluster.picture(title, ages))
    else:
        print("the large cluster is left out: a measured one is not predicted")
    _program.print_json(report, options.json)


def simulate(nodes: int, files: int, copies: int, seed: int) -> dict[str, Any]:
    cluster = Cluster(nodes, seed)
    cluster.write(files, 0.5, copies)
    single = Cluster(nodes, seed)
    single.write(files * 10, 0.5, 1)
    return {
        "nodes": nodes,
        "files": files,
        "copies": copies,
        "seed": seed,
        "rows": {
            "balance": balance(cluster),
            "rebuild": rebuild(cluster, copies),
            "evening out": even_out(single, max(nodes // 100, 1)),
            "incast": incast(nodes),
        },
    }


if __name__ == "__main__":
    main()
