"""What TLS between nodes costs: two clusters of two hosts in network namespaces of this machine,
one with and one without, in turn. As two hosts share no CPU, each has one of its own, where there
are two; what reads has that of its host.

How fast one host reads what the other has, what the CPUs do for it, and how long a small file
takes. Prints a table of medians with each target, then one JSON object.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks import _load as load
from benchmarks import _program
from benchmarks._interleave import Results, Row, Target
from benchmarks._load import MIB
from benchmarks._systems import processor_s
from tests.cluster.cluster import Cluster
from tests.cluster.network import Lacking
from tests.cluster.waiting import wait_until

_MODES: Final[Mapping[str, str]] = {"plain": "off", "tls": "require"}
_CPUS: Final = sorted(os.sched_getaffinity(0))
_READ_S: Final = 300.0
_QUIET_S: Final = 0.5
_PATIENCE_S: Final = 120.0
_SMALL: Final = 4096
_BLOCK: Final = 2 * MIB
_say: Final = _program.teller("peer_tls")

_SPEED: Final = Row("read of 1 GiB from another host", "MB/s", True, {})
_PART: Final = Row(
    "the same: part of the plain speed", "", True, {"tls": (Target("at_least", 0.5),)}
)
_SENDER: Final = Row("the same: CPU of the node that sends, s/GiB", "s", False, {})
_RECEIVER: Final = Row("the same: CPU of the node that receives, s/GiB", "s", False, {})
_FIRST: Final = Row("open and read of 4 KiB of another host", "ms", False, {})
_BLOCKS: Final = Row("open and read of 2 MiB of another host", "ms", False, {})


def _large(cluster: Cluster, quick: bool) -> dict[str, float]:
    size = (256 if quick else 1024) * MIB
    name = _written(cluster, size)
    _calm(cluster)
    before_s = _node_s(cluster)
    elapsed_s = _read(cluster, name)
    sender_s, receiver_s = (
        (now_s - then_s) * 1024 * MIB / size
        for now_s, then_s in zip(_node_s(cluster), before_s, strict=True)
    )
    _remove(cluster, name)
    return {
        _SPEED.name: size / elapsed_s / 1e6,
        _SENDER.name: sender_s,
        _RECEIVER.name: receiver_s,
    }


def _small(row: Row, size: int) -> Callable[[Cluster, bool], dict[str, float]]:
    def measure(cluster: Cluster, quick: bool) -> dict[str, float]:
        names = [_written(cluster, size) for _ in range(5 if quick else 20)]
        _calm(cluster)
        times = [_read(cluster, name) for name in names]
        for name in names:
            _remove(cluster, name)
        return {row.name: median(times) * 1e3}

    return measure


_MEASURES: Final[Sequence[tuple[tuple[Row, ...], Callable[[Cluster, bool], dict[str, float]]]]] = (
    ((_SPEED, _PART, _SENDER, _RECEIVER), _large),
    ((_FIRST,), _small(_FIRST, _SMALL)),
    ((_BLOCKS,), _small(_BLOCKS, _BLOCK)),
)


def _written(cluster: Cluster, size: int) -> str:
    """A new file of node 1, which node 2 sees."""
    path = Path(load.new_names(cluster[1].mount / "cache", 1)[0])
    load.write_file(path, size)
    other = cluster[2].mount / "cache" / path.name
    wait_until(lambda: other.exists(), "the other host sees the file")
    return path.name


def _read(cluster: Cluster, name: str) -> float:
    """Seconds."""
    began = time.perf_counter()
    load.read_file(cluster[2].mount / "cache" / name, _READ_S)
    return time.perf_counter() - began


def _remove(cluster: Cluster, name: str) -> None:
    (cluster[2].mount / "cache" / name).unlink()


def _node_s(cluster: Cluster) -> list[float]:
    """Seconds of CPU that the daemon of each host has used."""
    return [processor_s([pid]) for host in cluster if (pid := host.find()) is not None]


def _calm(cluster: Cluster) -> None:
    """Until the daemons have done what follows a write (checksums)."""
    end, used_s = time.monotonic() + _PATIENCE_S, sum(_node_s(cluster))
    while time.monotonic() < end:
        time.sleep(_QUIET_S)
        before_s, used_s = used_s, sum(_node_s(cluster))
        if used_s - before_s < 0.05 * _QUIET_S:
            return


def _divide(cluster: Cluster) -> None:
    for host in cluster:
        pid = host.find()
        assert pid is not None
        _give(pid, host.number)


def _give(pid: int, number: int) -> None:
    """Has a process run on the CPU of a host."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {_CPUS[(number - 1) % len(_CPUS)]})


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    every = [row for rows, _ in _MEASURES for row in rows]
    wanted = [row for row in every if _program.matches(row, options.rows)]
    results, left_out = Results(), {}
    try:
        _measure(options, wanted, results)
    except Lacking as error:
        left_out.update(dict.fromkeys(_MODES, str(error)))
    except KeyboardInterrupt:
        _say("interrupted; all is taken away")
        return 130
    _program.conclude("peer_tls", options, wanted, list(_MODES), results, left_out)
    return 0


def _measure(options: argparse.Namespace, wanted: Sequence[Row], results: Results) -> None:
    with ExitStack() as stack:
        clusters = {}
        for system, mode in _MODES.items():
            root = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=options.dir))
            made = stack.enter_context(Cluster(root, 2, "--peer-tls", mode))
            clusters[system] = made
            _divide(made)
        _give(os.getpid(), 2)
        for turn in range(options.rounds or (1 if options.quick else 5)):
            order = list(clusters.items())[:: 1 if turn % 2 else -1]
            for rows, measure in _MEASURES:
                if not any(row in wanted for row in rows):
                    continue
                _say(f"round {turn + 1}: {rows[0].name}")
                found = {system: measure(each, options.quick) for system, each in order}
                _note(found, results)


def _note(found: Mapping[str, Mapping[str, float]], results: Results) -> None:
    for system, values in found.items():
        for name, value in values.items():
            results.add(name, system, value)
    if (name := _SPEED.name) in found["tls"]:
        results.add(_PART.name, "tls", found["tls"][name] / found["plain"][name])


def _options() -> argparse.Namespace:
    return _program.parser(
        "peer_tls", __doc__, quick="smaller files, one round", rounds="default 5, quick 1"
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
