"""What several hosts do whose links have a speed: nodes in network namespaces of this machine.

How fast one host reads what three others have, how long the last of eight takes that want the same
file at once, and how long a read stops when a node dies or falls silent that it comes from.
Prints a table of medians with each target, then one JSON object.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks import _load as load
from benchmarks import _program
from benchmarks._interleave import Results, Row, Target
from benchmarks._load import MIB
from benchmarks._systems import processor_s
from tests.cluster.cluster import Cluster
from tests.cluster.network import Lacking
from tests.cluster.waiting import wait_until

_SYSTEM: Final = "kvfs"
_STEP: Final = MIB
_QUIET_S: Final = 1.0
_READ_S: Final = 300.0
_PATIENCE_S: Final = 120.0

Measure = Callable[[Cluster, bool], float]
_say: Final = _program.teller("cluster")


def holders(cluster: Cluster, quick: bool) -> float:
    """The speed of a read, as a part of what the three links carry together."""
    size, elapsed, _ = _read_of_three(cluster, quick)
    return size * 8 / elapsed / 3e9


def holders_cost(cluster: Cluster, quick: bool) -> float:
    """CPU seconds of all nodes for each GiB of such a read."""
    size, _, used_s = _read_of_three(cluster, quick)
    return used_s / (size / (1024 * MIB))


def _read_of_three(cluster: Cluster, quick: bool) -> tuple[int, float, float]:
    """Bytes, seconds, and CPU seconds of the daemons."""
    size = (256 if quick else 1024) * MIB
    name = _written(cluster, 1, size)
    for number in (2, 3):
        _read(cluster, number, name)
    _calm(cluster)
    limits = {1: 1000.0, 2: 1000.0, 3: 1000.0, 4: 3000.0}
    daemons = [pid for host in cluster if (pid := host.find()) is not None]
    before_s = processor_s(daemons)
    with _limited(cluster, limits):
        elapsed = _read(cluster, 4, name)
        used_s = processor_s(daemons) - before_s
    _remove(cluster, name)
    return size, elapsed, used_s


def tree(cluster: Cluster, quick: bool) -> float:
    """How much longer the last of eight takes than one alone."""
    size = (64 if quick else 256) * MIB
    readers = range(2, 10)
    with _limited(cluster, dict.fromkeys(range(1, 10), 200.0)):
        name = _written(cluster, 1, size)
        _calm(cluster)
        alone = _read(cluster, 2, name)
        _remove(cluster, name)
        name = _written(cluster, 1, size)
        _calm(cluster)
        times = _at_once([lambda n=n: _read(cluster, n, name) for n in readers])
    _remove(cluster, name)
    return max(times) / alone


def killed(cluster: Cluster, quick: bool) -> float:
    """The longest pause, in seconds, of a read on node 3 while node 1 is killed, which has the file
    as node 2 does."""
    return _recovery(cluster, quick, cluster[1].kill, cluster[1].up)


def cut_off(cluster: Cluster, quick: bool) -> float:
    """The same while nothing comes from node 1, or to it, and nobody is told."""
    return _recovery(cluster, quick, lambda: cluster.partition(1), lambda: cluster.heal(1))


def _recovery(
    cluster: Cluster, quick: bool, stop: Callable[[], object], start: Callable[[], object]
) -> float:
    # More than is brought whole before it is opened: that would be no read under way.
    size = (128 if quick else 256) * MIB
    name = _written(cluster, 1, size)
    _read(cluster, 2, name)
    _calm(cluster)
    with _limited(cluster, {1: 200.0, 2: 200.0}):
        at: list[float] = []
        reader = threading.Thread(target=lambda: at.extend(_steps(cluster, 3, name)))
        began = time.monotonic()
        reader.start()
        # Its links are busy for some seconds: a part of the first one.
        time.sleep(size * 8 / 400e6 / 3)
        stop()
        reader.join(_READ_S)
    if len(at) != size // _STEP:
        raise load.ShortTransfer(f"{len(at)} of {size // _STEP} MiB were read")
    start()
    _remove(cluster, name)
    return max(later - earlier for earlier, later in zip([began, *at], at, strict=False))


ROWS: Final[Sequence[tuple[Row, int, Measure]]] = (
    (
        Row(
            "read of 1 GiB from 3 holders at 1 Gbit/s each: part of their sum",
            "",
            True,
            {_SYSTEM: (Target("at_least", 0.9),)},
        ),
        4,
        holders,
    ),
    (
        Row("read of 1 GiB from 3 holders: CPU of all nodes, s/GiB", "s", False, {}),
        4,
        holders_cost,
    ),
    (
        Row(
            "8 hosts read 256 MiB from one, links of 200 Mbit/s: last, of a single one's time",
            "x",
            False,
            {_SYSTEM: (Target("at_most", 2.5),)},
        ),
        9,
        tree,
    ),
    (
        Row(
            "longest pause of a read whose holder is killed, another one there",
            "s",
            False,
            {_SYSTEM: (Target("at_most", 1.0),)},
        ),
        3,
        killed,
    ),
    (
        Row(
            "longest pause of a read whose holder is cut off, another one there",
            "s",
            False,
            {_SYSTEM: (Target("at_most", 1.0),)},
        ),
        3,
        cut_off,
    ),
)
"""Each with the number of its nodes."""


# --- steps ------------------------------------------------------------------------------------


def _written(cluster: Cluster, number: int, size: int) -> str:
    """A new file of the cache, seen by all."""
    path = Path(load.new_names(cluster[number].mount / "cache", 1)[0])
    load.write_file(path, size)
    for host in cluster:
        other = host.mount / "cache" / path.name
        wait_until(lambda other=other: other.exists(), "all hosts see the file")
    return path.name


def _read(cluster: Cluster, number: int, name: str) -> float:
    """Seconds."""
    began = time.perf_counter()
    load.read_file(cluster[number].mount / "cache" / name, _READ_S)
    return time.perf_counter() - began


def _steps(cluster: Cluster, number: int, name: str) -> Iterator[float]:
    """When each part of the file was there."""
    into = [bytearray(_STEP)]
    descriptor = os.open(cluster[number].mount / "cache" / name, os.O_RDONLY)
    try:
        while os.readv(descriptor, into):
            yield time.monotonic()
    finally:
        os.close(descriptor)


def _remove(cluster: Cluster, name: str) -> None:
    (cluster[2].mount / "cache" / name).unlink()


def _at_once(works: Sequence[Callable[[], float]]) -> list[float]:
    times: list[float] = []
    threads = [threading.Thread(target=lambda w=work: times.append(w())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(times) != len(works):
        raise load.ShortTransfer("a host did not read all")
    return times


@contextmanager
def _limited(cluster: Cluster, mbit_s: Mapping[int, float]) -> Iterator[None]:
    try:
        for number, speed in mbit_s.items():
            cluster.network.limit(str(number), speed)
        yield
    finally:
        for number in mbit_s:
            cluster.network.limit(str(number), 0)


def _calm(cluster: Cluster) -> None:
    """Until the daemons have done what follows a write (checksums)."""
    daemons = [pid for host in cluster if (pid := host.find()) is not None]
    end = time.monotonic() + _PATIENCE_S
    used = processor_s(daemons)
    while time.monotonic() < end:
        time.sleep(_QUIET_S)
        now = processor_s(daemons)
        if now - used < 0.02 * _QUIET_S * len(daemons):
            return
        used = now


# --- the program ------------------------------------------------------------------------------


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wanted = [each for each in ROWS if _program.matches(each[0], options.rows)]
    rows = [row for row, _, _ in wanted]
    results, left_out = Results(), {}
    try:
        for row, size, measure in wanted:
            _say(row.name)
            _measure(row, size, measure, options, results)
    except Lacking as error:
        left_out[_SYSTEM] = str(error)
    except KeyboardInterrupt:
        _say("interrupted; all is taken away")
        return 130
    _program.conclude("cluster", options, rows, [_SYSTEM], results, left_out)
    return 0


def _measure(
    row: Row, size: int, measure: Measure, options: argparse.Namespace, results: Results
) -> None:
    """On a cluster of its own."""
    root = Path(tempfile.mkdtemp(prefix="kvfs-bench-", dir=options.dir))
    with Cluster(root, size) as cluster:
        for _ in range(options.rounds or (1 if options.quick else 3)):
            try:
                results.add(row.name, _SYSTEM, measure(cluster, options.quick))
            except (OSError, load.ShortTransfer) as error:
                results.fail(row.name, _SYSTEM, f"{type(error).__name__}: {error}")


def _options() -> argparse.Namespace:
    return _program.parser(
        "cluster", __doc__, quick="smaller files, one round", rounds="default 3, quick 1"
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
