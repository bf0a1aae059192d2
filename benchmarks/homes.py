"""What it costs to ask homes who holds a name, on three nodes of this machine: look-ups of many
names together by the Python client, where each node knows all names and where each knows a share.

    ./dev bench homes [--names 512] [--rounds 40] [--quick] [--json FILE]

Two clusters run at once and are measured in turn. A node writes the names; another one looks them
up, each once, and as many that nobody has. Homes are two of three nodes, so a third of the names is
asked of others. Prints a table, then one JSON object.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks import _program
from benchmarks._several import HERE, Server, member, status, wait_for
from kvfs.client import Client

_ALL, _HOMES = "each knows all", "homes"
_NODES: Final = 3


class Trio:
    """Three nodes of one cluster."""

    def __init__(self, place: _program.Place, name: str, server: Server, names: int) -> None:
        self._place = place
        base = place.base / name.replace(" ", "-")
        flags = ("--names-everywhere", str(names))
        self.nodes = [
            member(base, f"n{number}", server.url(0), HERE, *flags)
            for number in range(1, _NODES + 1)
        ]
        for node in self.nodes:
            place.stack.callback(node.stop)
            node.start(place.guard)
        self.writer, _, self.reader = self.nodes
        self.writer.command(
            *("namespace", "create", "blocks", "--kind", "cache", "--coherence", "peer")
        )
        for node in self.nodes:
            wait_for((node.mountpoint / "blocks").is_dir, "the namespace")
            (node.mountpoint / "blocks" / f"first-{node.name}").write_bytes(b"1")
        self.client = place.stack.enter_context(Client(self.reader.store))

    def write(self, name: str) -> None:
        (self.writer.mountpoint / "blocks" / name).write_bytes(b"block")

    def homes(self) -> Any:
        names = status(self.reader)["cluster"]["names"]
        return names and names["homes"]


def main() -> None:
    options = _arguments()
    say = _program.teller("homes")
    with _program.place(options.dir, say) as place:
        clusters = {
            kind: _started(place, kind, limit) for kind, limit in ((_ALL, 1 << 40), (_HOMES, 1))
        }
        homes = clusters[_HOMES]
        wait_for(lambda: _is_ready(homes.homes()), "homes", pause_s=0.5)
        assert clusters[_ALL].homes() is None
        say("writing names")
        for round_ in range(options.rounds):
            for number in range(options.names):
                for each in clusters.values():
                    each.write(f"{round_}-{number}")
        last = f"/blocks/{options.rounds - 1}-{options.names - 1}"
        for each in clusters.values():
            wait_for(lambda each=each: each.client.exists([last]) == [True], "all names")
        figures = _measured(clusters, options.names, options.rounds)
        requests = status(homes.reader)["counters"]["home_requests"]
    for what, found in figures.items():
        print(f"{what:48} {found['p50']:8.2f} {found['p99']:8.2f} ms (p50, p99)")
    _program.print_json(
        {
            "benchmark": "homes",
            "names": options.names,
            "rounds": options.rounds,
            "requests to homes": requests,
            "milliseconds": figures,
        },
        options.json,
    )


def _arguments() -> argparse.Namespace:
    made = _program.parser(
        "homes", __doc__, quick="5 rounds of 64 names", rounds="look-ups of each kind"
    )
    made.add_argument("--names", type=int, default=512, help="names of a look-up")
    options = made.parse_args()
    if options.quick:
        options.names, options.rounds = 64, options.rounds or 5
    options.rounds = options.rounds or 40
    return options


def _started(place: _program.Place, kind: str, limit: int) -> Trio:
    server = Server(place.base / f"engine-{limit}", place.guard)
    place.stack.callback(server.stop)
    return Trio(place, kind, server, limit)


def _is_ready(homes: Any) -> bool:
    return bool(homes and homes["nodes"] == _NODES and homes["ready"] == homes["ranges"])


def _measured(clusters: dict[str, Trio], names: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    for round_ in range(rounds):
        for what, prefix, is_there in (("held", "", True), ("absent", "none-", False)):
            paths = [f"/blocks/{prefix}{round_}-{number}" for number in range(names)]
            for kind, each in clusters.items():
                spent_ms = _timed(lambda: each.client.exists(paths), [is_there] * names)  # noqa: B023
                times.setdefault(f"{names} names, {what}, {kind}", []).append(spent_ms)
    return {what: _cuts(each) for what, each in sorted(times.items())}


def _timed(step: Callable[[], list[bool]], expected: list[bool]) -> float:
    began = time.perf_counter()
    found = step()
    spent = time.perf_counter() - began
    assert found == expected, f"{sum(found)} of {len(found)} names were found"
    return spent * 1e3


def _cuts(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


if __name__ == "__main__":
    main()
