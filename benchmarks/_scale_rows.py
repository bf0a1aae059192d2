"""The rows of `scale`: files that writers make and rename, and what each costs every process."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import _load as load
from benchmarks import _several
from benchmarks._guard import Guard
from benchmarks._interleave import BEFORE, JUICEFS, Group, Row, Target
from benchmarks._processes import Task, together
from benchmarks._systems import JuiceFs, System, processor_s, settle
from tests.cluster.engine import HOST
from tests.cluster.network import Network

_WRITERS: Final = 8
_BLOCK: Final = bytes(4096)
_NAME_BYTES: Final = 64
"""The length of a block's name: a digest in hexadecimal, as engines name them."""
_MICRO: Final = 1e6
_SETTLE_S: Final = 10.0
_REST_S: Final = 5.0
_PAUSE_S: Final = 1.0
_PACE_S: Final = 0.002
_WARM_FILES: Final = 50
_PAUSED_P99_MS: Final = 1.0
_SENT_AT: Final = 8
"""The place of the bytes sent in a line of /proc/net/dev."""
_COUNTS: Final = 3
"""Figures of `_used` that are no processor time."""
_READ_S: Final = 10.0
_TRY_S: Final = 0.002
_LOOK_S: Final = 0.05
"""Time between two looks for a file on another node: each is a request to the measured node."""
TOTAL: Final = "CPU of all nodes and the server"
EACH_OTHER: Final = "CPU of each other node"
"""Rows of each load."""
Write = Callable[[str], None]


def called(size: int) -> str:
    """The name of a cluster of so many nodes."""
    return f"{size} nodes"


class Extent(NamedTuple):
    files: int
    """Files that all writers make together in one measurement."""


QUICK: Final = Extent(4_000)
FULL: Final = Extent(8_000)


class Hosts(NamedTuple):
    """Those of one network, beside that of its metadata server."""

    network: Network
    numbers: Sequence[str]

    def sent(self) -> int:
        """Bytes that they and the metadata server's host have sent each other, with all heads."""
        return sum(_sent(self.network.inside(host)) for host in (HOST, *self.numbers))


def _sent(inside: Sequence[str]) -> int:
    told = subprocess.run(
        [*inside, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
    )
    line = next(each for each in told.stdout.splitlines() if each.lstrip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[_SENT_AT])


class Cluster(System):
    """Some nodes of one cluster on this host; `root` is the first one's."""

    def __init__(
        self, base: Path, hosts: Hosts, server: _several.Server, checkout: Path | None = None
    ) -> None:
        """`checkout`: another one of the project, by which the nodes run."""
        self.server = server
        self.hosts = hosts
        self.nodes = [
            _several.member(
                *(base, f"n{number}", server.url(0), _several.site(hosts.network, number)),
                checkout=checkout,
            )
            for number in hosts.numbers
        ]
        self.at_rest = 0.0
        """Seconds of processor time that all of it used a second, when that was last measured."""
        name = called(len(self.nodes)) + ("" if checkout is None else f", {BEFORE}")
        super().__init__(name, self.nodes[0].root)

    def start(self, guard: Guard) -> None:
        for node in self.nodes:
            node.start(guard)
        self.nodes[0].command("namespace", "create", STRICT)
        flags = ("--kind", "cache", "--coherence", PEER)
        self.nodes[0].command("namespace", "create", PEER, *flags)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()

    def processes(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.processes()]

    def folders(self, namespace: str) -> list[Path]:
        """A new directory of this namespace, as each node's mount has it."""
        name = load.new_names(self.nodes[0].mountpoint / namespace, 1)[0]
        os.mkdir(name)
        inside = Path(name).relative_to(self.nodes[0].mountpoint)
        found = [node.mountpoint / inside for node in self.nodes]
        for each in found:
            if namespace == PEER:  # where each node has directories of its own
                _several.wait_for(each.parent.exists, "the namespace on each node")
                each.mkdir(exist_ok=True)
            _several.wait_for(each.exists, "the directory on each node")
        return found


class Peer(System):
    """JuiceFS with a mount on each host, its metadata on a server of its own and its objects in one
    directory, which no network lies before."""

    def __init__(self, base: Path, hosts: Hosts, server: _several.Server) -> None:
        self.server = server
        self.hosts = hosts
        self.nodes = [
            JuiceFs(base / number, server.url(0), hosts.network.inside(number), base)
            for number in hosts.numbers
        ]
        self.at_rest = 0.0
        size = len(self.nodes)
        name = JUICEFS if size == 1 else f"{JUICEFS}, {called(size)}"
        super().__init__(name, self.nodes[0].root)

    def start(self, guard: Guard) -> None:
        for node in self.nodes:
            node.start(guard)

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.stop()

    def processes(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.processes()]

    def folders(self, _namespace: str) -> list[Path]:
        """A new directory, as each mount has it."""
        made = Path(load.new_names(self.root, 1)[0])
        made.mkdir()
        found = [node.root / made.name for node in self.nodes]
        for each in found:
            _several.wait_for(each.exists, "the directory on each node")
        return found


STRICT: Final = "strict"
PEER: Final = "peer"
"""Namespaces of these coherences."""


class _Load(NamedTuple):
    name: str
    namespace: str
    write: Write
    is_everywhere: bool
    """Whether each node has writers."""
    targets: Mapping[str, float]
    """The most that a file may cost, by what is measured."""
    is_read: bool = False
    """Whether a reader on each node reads what the node before it writes, as it comes."""


def groups(extent: Extent) -> list[Group]:
    """In the order of the table."""
    return [*(_group(each, extent) for each in _LOADS), _paused()]


def create(name: str, flags: int = os.O_TRUNC) -> None:
    descriptor = os.open(name, os.O_CREAT | os.O_WRONLY | flags, 0o644)
    os.write(descriptor, _BLOCK)
    os.close(descriptor)


def create_and_rename(name: str, flags: int = os.O_TRUNC) -> None:
    temporary = f"{name}.tmp"
    create(temporary, flags)
    os.rename(temporary, name)


def create_anew_and_rename(name: str) -> None:
    create_and_rename(name, os.O_EXCL)


def _group(of: _Load, extent: Extent) -> Group:
    speed = Row(f"{of.name}: files", "/s", True, {}, JUICEFS)
    costs = {
        what: Row(f"{of.name}: {what}", unit, False, _at_most(of.targets.get(what)), JUICEFS)
        for what, unit in (
            ("CPU of the writing node", "µs"),
            ("CPU of the server", "µs"),
            (EACH_OTHER, "µs"),
            (TOTAL, "µs"),
            ("sent on the wire", "B"),
            ("commands of the server", ""),
            ("the server's traffic", "B"),
            ("memory of the server", "B"),
        )
    }

    def measure(system: System) -> Mapping[str, float | None]:
        assert isinstance(system, Cluster | Peer)
        found = _measure(system, of, system.folders(of.namespace), extent.files)
        return {speed.name: found.pop("files")} | {costs[w].name: v for w, v in found.items()}

    def applies(system: System) -> bool:
        return isinstance(system, Cluster) or of.namespace == "cache"

    return Group((speed, *costs.values()), measure, applies=applies)


def _paused() -> Group:
    """Blocks of one writer while the metadata server answers nobody."""
    rows = {
        part: Row(f"close + rename, cache, server paused for 1 s: {part}", "ms", False, targets)
        for part, targets in (("p50", {}), ("p99", _at_most(_PAUSED_P99_MS)))
    }

    def measure(system: System) -> Mapping[str, float | None]:
        assert isinstance(system, Cluster)
        folders = system.folders("cache")
        names = load.new_names(folders[0], _WARM_FILES + round(_PAUSE_S / _PACE_S))
        for name in names[:_WARM_FILES]:
            create_and_rename(name)
        settle([system], _SETTLE_S)
        with system.server.paused():
            took = _closes_and_renames(names[_WARM_FILES:], time.monotonic() + _PAUSE_S)
        last = Path(names[_WARM_FILES + len(took) - 1]).name
        for folder in folders:
            _several.wait_for((folder / last).exists, "the files on each node", _LOOK_S)
        cuts = statistics.quantiles(took, n=100)
        return {rows["p50"].name: 1e3 * cuts[49], rows["p99"].name: 1e3 * cuts[98]}

    return Group(tuple(rows.values()), measure, applies=lambda each: isinstance(each, Cluster))


def _closes_and_renames(names: Sequence[str], end: float) -> list[float]:
    """Seconds that the close and the rename of each took, one file every _PACE_S until `end`."""
    took = []
    for name in names:
        descriptor = os.open(f"{name}.tmp", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.write(descriptor, _BLOCK)
        began = time.monotonic()
        os.close(descriptor)
        os.rename(f"{name}.tmp", name)
        ended = time.monotonic()
        took.append(ended - began)
        if ended >= end:
            break
        time.sleep(max(0.0, began + _PACE_S - ended))
    return took


def _at_most(most: float | None) -> Mapping[str, Sequence[Target]]:
    if most is None:
        return {}
    return {called(size): (Target("at_most", most),) for size in (1, 2, 4, 8)}


def _measure(
    system: Cluster | Peer, of: _Load, folders: Sequence[Path], files: int
) -> dict[str, float | None]:
    """Costs a file, from before the first until every node knows all of them and has settled,
    without what each process uses in that time at rest. The rest is measured before and after:
    eight nodes use as much in those seconds as their being told of the files costs."""
    writing = folders if of.is_everywhere else folders[:1]
    share = files // _WRITERS // len(writing)
    names = [[_names(folder, share) for _ in range(_WRITERS)] for folder in writing]
    tasks = [_writer(each, of.write) for node in names for each in node]
    if of.is_read:
        tasks += [
            _reader(folder, [name for each in names[at - 1] for name in each])
            for at, folder in enumerate(folders)
        ]
    settle([system], _SETTLE_S, system.at_rest)
    rest_before = _rates_at_rest(system)
    system.at_rest = sum(rest_before[_COUNTS:])
    before, held = _used(system), system.server.memory()
    began = time.monotonic()
    elapsed = max(filter(None, together(tasks)))
    last = [each[-1] for node in names for each in node]
    _wait_until_known(writing if of.namespace == PEER else folders, last)
    settle([system], _SETTLE_S, system.at_rest)
    after, whole = _used(system), time.monotonic() - began
    memory = system.server.memory() - held
    rests = zip(rest_before, _rates_at_rest(system), strict=True)
    count = share * _WRITERS * len(writing)
    sent, traffic, commands, server, *nodes = [
        (late - early - whole * statistics.mean(rest)) / count
        for early, late, rest in zip(before, after, rests, strict=True)
    ]
    writers, others = nodes[: len(writing)], nodes[len(writing) :]
    return {
        "files": count / elapsed,
        "CPU of the writing node": _MICRO * sum(writers) / len(writers),
        "CPU of the server": _MICRO * server,
        EACH_OTHER: _MICRO * sum(others) / len(others) if others else None,
        TOTAL: _MICRO * (server + sum(nodes)),
        "sent on the wire": sent,
        "commands of the server": commands,
        "the server's traffic": traffic,
        "memory of the server": memory / count,
    }


def _wait_until_known(folders: Sequence[Path], names: Sequence[str]) -> None:
    """Until files of these names are in each of the directories. Raises Unavailable."""
    for folder in folders:
        for name in names:
            _several.wait_for((folder / Path(name).name).exists, "the files on each node", _LOOK_S)


def _names(folder: Path, files: int) -> list[str]:
    names = load.new_names(folder, files)
    padding = "0" * (_NAME_BYTES - len(Path(names[0]).name))
    return [name + padding for name in names]


def _writer(names: Sequence[str], write: Write) -> Task:
    """Writes files; how long that took."""

    def work() -> float:
        began = time.monotonic()
        for name in names:
            write(name)
        return time.monotonic() - began

    return lambda: work


def _reader(folder: Path, names: Sequence[str]) -> Task:
    """Reads files of these names in a node's directory as they come. Raises TimeoutError."""

    def work() -> None:
        for name in names:
            _read(str(folder / Path(name).name))

    return lambda: work


def _read(path: str) -> None:
    end = time.monotonic() + _READ_S
    while True:
        try:
            with open(path, "rb", buffering=0) as file:
                assert file.read() == _BLOCK
                return
        except FileNotFoundError:
            if time.monotonic() > end:
                raise TimeoutError(f"{path} is not found") from None
            time.sleep(_TRY_S)


def _rates_at_rest(system: Cluster | Peer) -> list[float]:
    """Like `_used`, of one second in which nothing is asked of them."""
    before, began = _used(system), time.monotonic()
    time.sleep(_REST_S)
    took = time.monotonic() - began
    return [(late - early) / took for early, late in zip(before, _used(system), strict=True)]


def _used(system: Cluster | Peer) -> list[float]:
    """Bytes on the wire, the server's traffic and commands; seconds of processor time of the
    server, then of each node."""
    server, nodes = system.server, system.nodes
    counts = [system.hosts.sent(), server.traffic(), server.commands()]
    return [*counts, processor_s([server.pid]), *(processor_s(node.processes()) for node in nodes)]


_BLOCK_COSTS: Final = {
    "CPU of the writing node": 500,
    "CPU of the server": 25,
    EACH_OTHER: 20,
    "memory of the server": 500,
}
_PEER_COSTS: Final = {"CPU of the writing node": 500}
_LOADS: Final = (
    _Load("create + close, cache", "cache", create, False, {}),
    _Load("block, cache", "cache", create_and_rename, False, _BLOCK_COSTS),
    _Load("block made with O_EXCL, cache", "cache", create_anew_and_rename, False, {}),
    _Load("block from each node, cache", "cache", create_and_rename, True, {}),
    _Load("block, peer", PEER, create_and_rename, False, _PEER_COSTS),
    _Load("block from each node, peer", PEER, create_and_rename, True, {}),
    _Load(
        "block from each node, read by another, cache", "cache", create_and_rename, True, {}, True
    ),
    _Load("block from each node, read by another, peer", PEER, create_and_rename, True, {}, True),
    _Load("block, strict", STRICT, create_and_rename, False, {"CPU of the server": 100}),
)
