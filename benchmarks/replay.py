"""What names without a centre cost one node among many: all other members are played.

One real node, with its mount and its metadata server, beside so many members in one process that
hold so many blocks each, tell the node of them as nodes that join do, and then of so many changes a
second in all, by the code and along the trees that nodes use. Meanwhile a program asks the mount
for names that nobody has. Prints a table, then one JSON object.
"""

import argparse
import math
import os
import resource
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from benchmarks import _processes, _program, _report, _several
from benchmarks._replayed_peers import PlayedMember, Scene, Senders, Traffic
from benchmarks._request_rows import processor_s
from benchmarks._systems import Kvfs, Unavailable
from kvfs.base import control
from kvfs.cluster.node_identity import read_secrets
from kvfs.cluster.node_records import NodeRecord, list_nodes, put_node
from kvfs.cluster.peer_protocol import PeerAddress
from kvfs.meta.engine import Transaction
from kvfs.session import session

_NAMESPACE: Final = "replayed"
_JOIN_S: Final = 900.0
_SETTLE_S: Final = 3.0
_QUIET_S: Final = 60.0
"""The most for which the node is watched while nothing changes."""
_LOOK_S: Final = 0.5
_SAY_S: Final = 15.0
_OTHERS: Final = "others"
"""What a status calls the names of other nodes."""
_CLAIM_BYTES: Final = 17
"""The most that a table takes for a claim, just after it has grown."""
_PROBE_S: Final = 0.005
_MICRO: Final = 1e6
_MILLI: Final = 1e3
_say: Final = _program.teller("replay")


class Extent(NamedTuple):
    """The size of a run."""

    peers: int
    blocks: int
    """Blocks that each of them holds."""
    deltas_per_s: float
    """Changes of all of them together."""
    seconds: float


QUICK: Final = Extent(99, 10_000, 5_000, 10)
FULL: Final = Extent(999, 1_000_000, 30_000, 600)


class Stage:
    """The real node, and what its processes used."""

    def __init__(self, node: Kvfs, url: str) -> None:
        self.node = node
        self.url = url
        self.mounted = node.mountpoint / _NAMESPACE
        self._socket = node.store / "run" / "control.sock"
        self.over = node.store.parent / "over"
        """A file that ends the questions for absent names."""

    async def status(self) -> dict[str, Any]:
        told: dict[str, Any] = await trio.to_thread.run_sync(
            control.call, self._socket, "status", {}
        )
        return told

    def cpu_s(self) -> float:
        return processor_s(self.node.processes())

    def rss(self) -> int:
        pages = (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.node.processes()
        )
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(stage: Stage, extent: Extent) -> dict[str, Any]:
    """What the members cost the node."""
    tasks: Sequence[_processes.Task] = [
        lambda: partial(trio.run, _play, stage, extent),
        lambda: partial(_probe, stage),
    ]
    played, probed = _processes.together(tasks)
    windows = played.pop("windows")
    for name, (begin, end) in windows.items():
        taken = [each for at, each in probed if begin <= at < end]
        played |= _latencies(name, taken)
    return {**extent._asdict(), **played}


def _latencies(name: str, taken: Sequence[float]) -> dict[str, float]:
    if len(taken) < 2:
        return {}
    return {
        f"absent name, {name}, p50, us": statistics.median(taken) * _MICRO,
        f"absent name, {name}, p99, us": statistics.quantiles(taken, n=100)[98] * _MICRO,
    }


def _probe(stage: Stage) -> list[tuple[float, float]]:
    """When a name that nobody has was asked for, and how long that took; until the end."""
    found = []
    while not stage.over.exists():
        name = stage.mounted / secrets.token_hex(32)
        began = time.perf_counter()
        is_there = os.path.exists(name)
        found.append((time.monotonic(), time.perf_counter() - began))
        assert not is_there
        time.sleep(_PROBE_S)
    return found


async def _play(stage: Stage, extent: Extent) -> dict[str, Any]:
    try:
        return await _played(stage, extent)
    finally:
        stage.over.touch()


async def _played(stage: Stage, extent: Extent) -> dict[str, Any]:
    engine = session.acquire(stage.node.store)
    (real,) = engine.read(list_nodes)
    host, _, port = real.peer.rpartition(":")
    known = read_secrets(stage.node.store.parent.parent / "cluster.key")
    assert known is not None
    address = PeerAddress(real.number, host, int(port))
    scene = Scene(stage.url, known, address, Traffic())
    _say(f"{extent.peers} members make {extent.blocks:,} names each")
    members = [PlayedMember(scene, each, extent.blocks) for each in range(1, extent.peers + 1)]
    for each in members:
        await each.join()
    _say(f"{extent.peers} members hold leases")
    engine.write(partial(_enter, [each.record() for each in members]))
    by_number = {each.me.node: each for each in members}
    senders = Senders(by_number, real.number)
    async with trio.open_nursery() as nursery:
        for each in members:
            nursery.start_soon(each.run)
        nursery.start_soon(senders.run)
        await _until(stage, "members", extent.peers + 1)
        before = _Used(stage, scene.traffic)
        _say(f"the node knows them; {senders.count} of them send to it")
        rates = _Rate(nursery, senders)
        rates.set(0)
        whole = extent.peers * extent.blocks
        await _until(stage, _OTHERS, whole)
        joined = before.until_now()
        _say(f"joined in {joined['seconds']:.1f} s")
        await trio.sleep(_SETTLE_S)
        quiet = await _during(stage, scene, min(_QUIET_S, extent.seconds / 4))
        rates.set(extent.deltas_per_s / extent.peers)
        await trio.sleep(_SETTLE_S)
        busy = await _during(stage, scene, extent.seconds)
        told = await stage.status()
        nursery.cancel_scope.cancel()
    return _figures(extent, senders.count, joined, quiet, busy, told)


async def _during(stage: Stage, scene: Scene, seconds: float) -> dict[str, Any]:
    before = _Used(stage, scene.traffic)
    await trio.sleep(seconds)
    return before.until_now()


class _Used:
    """What was used up to a moment."""

    def __init__(self, stage: Stage, traffic: Traffic) -> None:
        self._stage = stage
        self._traffic = traffic
        self._before = traffic.copy()
        self._began = time.monotonic()
        self._cpu_s = stage.cpu_s()

    def until_now(self) -> dict[str, Any]:
        end = time.monotonic()
        return {
            "seconds": end - self._began,
            "cpu_s": self._stage.cpu_s() - self._cpu_s,
            "rss": self._stage.rss(),
            "window": (self._began, end),
            **(self._traffic - self._before),
        }


class _Rate:
    """The members' telling, at a rate that changes."""

    def __init__(self, nursery: trio.Nursery, senders: Senders) -> None:
        self._nursery, self._senders = nursery, senders
        self._scope = trio.CancelScope()

    def set(self, changes_per_s: float) -> None:
        """Tells of so many changes of each member a second from now on."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        self._nursery.start_soon(self._stream, self._scope, changes_per_s)

    async def _stream(self, scope: trio.CancelScope, changes_per_s: float) -> None:
        with scope:
            await self._senders.stream(changes_per_s)


async def _until(stage: Stage, what: str, count: int) -> None:
    """Until the node's status tells of so many, and it lacks nothing of any. Raises Unavailable."""
    said = began = time.monotonic()
    while True:
        names = (await stage.status())["cluster"]["names"]
        known, lagging = (names[what], names["lagging"]) if names is not None else (0, 0)
        if known >= count and (what != _OTHERS or not lagging):
            return
        now = time.monotonic()
        told = f"the node knows {known:,} of {count:,} {what}, and lacks names of {lagging} members"
        if now - began > _JOIN_S:
            raise Unavailable(f"{told} after {_JOIN_S:g} s")
        if now - said > _SAY_S:
            said = now
            _say(told)
        await trio.sleep(_LOOK_S)


def _enter(records: Sequence[NodeRecord], t: Transaction) -> None:
    for each in records:
        put_node(t, each)


def _figures(
    extent: Extent,
    senders: int,
    joined: dict[str, Any],
    quiet: dict[str, Any],
    busy: dict[str, Any],
    told: dict[str, Any],
) -> dict[str, Any]:
    seconds, deltas = busy["seconds"], max(1, busy["deltas"])
    beyond_s = busy["cpu_s"] - quiet["cpu_s"] * seconds / quiet["seconds"]
    counters = told["counters"]
    return {
        "members that send": senders,
        "join, s": joined["seconds"],
        "join, CPU of the node, s": joined["cpu_s"],
        "join, ns of CPU a name": joined["cpu_s"] / (extent.peers * extent.blocks) * 1e9,
        "RSS after the join, MB": joined["rss"] / 1e6,
        "quiet, CPU, of a core": quiet["cpu_s"] / quiet["seconds"],
        "quiet, requests a second": quiet["requests"] / quiet["seconds"],
        "deltas a second": deltas / seconds,
        "requests a second": busy["requests"] / seconds,
        "deltas a row": deltas / max(1, busy["rows"]),
        "deltas a request": deltas / max(1, busy["requests"]),
        "CPU, of a core": busy["cpu_s"] / seconds,
        "us of CPU a delta": busy["cpu_s"] / deltas * _MICRO,
        "us of CPU a delta, beyond quiet": beyond_s / deltas * _MICRO,
        "bytes a delta": busy["bytes"] / deltas,
        "rows passed on a second": busy["passed"] / seconds,
        "requests of the node a second": busy["made"] / seconds,
        "requests that were not taken": busy["late"],
        "questions to members": busy["asked"],
        "RSS, MB": busy["rss"] / 1e6,
        "false claims": counters["false_claims"],
        "lagging at the end": told["cluster"]["names"]["lagging"],
        "windows": {"quiet": quiet["window"], "under load": busy["window"]},
    }


def table(figures: dict[str, Any]) -> str:
    return "\n".join(f"{name:40} {value:,.4g}" for name, value in figures.items())


def main() -> int:
    options = _options()
    given = {name: getattr(options, name) for name in Extent._fields}
    extent = (QUICK if options.quick else FULL)._replace(
        **{name: value for name, value in given.items() if value is not None}
    )
    if lacking := lacking_memory(extent, _report.available_bytes()):
        sys.exit(f"bench replay: {lacking}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with _program.place(options.dir, _say) as place:
        server = place.stack.enter_context(_several.running(place.base, place.guard))
        node = _several.member(place.base, "real", server.url(0))
        place.stack.callback(node.stop)
        node.start(place.guard)
        node.command("namespace", "create", _NAMESPACE, "--kind", "cache", "--coherence", "peer")
        stage = Stage(node, server.url(0))
        _several.wait_for(stage.mounted.exists, "the namespace")
        place.guard.watch(math.ceil(_JOIN_S + 3 * extent.seconds + 60))
        figures = measure(stage, extent)
    report = {
        "benchmark": "replay",
        "quick": options.quick,
        "conditions": _report.conditions(Path(options.dir)),
        "figures": figures,
    }
    print(table(figures))
    _program.print_json(report, options.json)
    return 0


def lacking_memory(extent: Extent, available: int) -> str | None:
    """Why this machine's memory does not do for it, with what does."""
    needed = extent.peers * extent.blocks * _CLAIM_BYTES
    if needed <= available:
        return None
    fitting = available // _CLAIM_BYTES // extent.peers
    return (
        f"the node's table of {extent.peers} x {extent.blocks:,} names may take"
        f" {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are available: --blocks {fitting}"
        " or fewer would do"
    )


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="dev bench replay", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="99 members for 10 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--peers", type=int, metavar="N", help="members; default 999")
    parser.add_argument("--blocks", type=int, metavar="N", help="of each; default a million")
    parser.add_argument(
        "--deltas-per-s", type=float, metavar="N", help="changes of all; default 30,000"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="default 600")
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
