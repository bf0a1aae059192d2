"""Millions of blocks of a peer namespace on three nodes: starts, a join, memory, look-ups, a list.

Some blocks are made as engines make them (a temporary name, then a rename), the others in the
stores of the nodes while these are stopped, by the same transactions. Then the nodes start and tell
each other of all names, start once more with what they know, and a fourth node joins. With
`--files`: what so many files of a durable namespace mean to the start of a lone node and of a
cluster's, and to a node that joins. Prints a table, then one JSON object.
"""

import argparse
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import kvfs
from benchmarks import _file_rows, _processes, _program, _report, _several
from benchmarks._bulk_blocks import Sample, fill, name_of
from benchmarks._scale_rows import create_and_rename
from benchmarks._systems import Kvfs, Unavailable, processor_s

_NODES: Final = 3
_NAMESPACE: Final = "blocks"
_WRITERS: Final = 8
_KNOWN_S: Final = 1_800.0
_LOOK_S: Final = 0.5
_LOOKS: Final = 2_000
_TOGETHER: Final = 512
_READ: Final = (4 << 10, 64 << 10)
_READS: Final = 400
_NAME_BYTES: Final = 64
_say: Final = _program.teller("blocks")
Figures = dict[str, float]


class Extent(NamedTuple):
    """The size of a run."""

    blocks: int
    """Of all nodes together."""
    real: int
    """Those of them that are written through the mounts."""


QUICK: Final = Extent(60_000, 6_000)
FULL: Final = Extent(10_000_000, 100_000)


def measure_reads(place: _program.Place) -> Figures:
    """What it takes to look at, and to read, a block that another node wrote."""
    server = place.stack.enter_context(_several.running(place.base, place.guard))
    nodes = [_several.member(place.base, f"n{n}", server.url(0)) for n in (1, 2)]
    for node in nodes:
        place.stack.callback(node.stop)
        node.start(place.guard)
    _make_namespace(nodes)
    figures: Figures = {}
    for size in _READ:
        for what, act in (("open and read", _opened_and_read), ("look-up", _looked_at)):
            names = [secrets.token_hex(32) for _ in range(_READS)]
            for name in names:
                (nodes[0].mountpoint / _NAMESPACE / name).write_bytes(bytes(size))
            _wait_until_told(nodes)
            folder = str(nodes[1].mountpoint / _NAMESPACE)
            before = [processor_s(node.processes()) for node in nodes]
            cuts = statistics.quantiles([act(f"{folder}/{name}", size) for name in names], n=20)
            after = [processor_s(node.processes()) for node in nodes]
            each = f"{size >> 10} KiB, {what}"
            figures[f"{each}: p5, us"], figures[f"{each}: p50, us"] = cuts[0] * 1e6, cuts[9] * 1e6
            for who, then, now in zip(("holder", "reader"), before, after, strict=True):
                figures[f"{each}: CPU of the {who}, us"] = (now - then) / _READS * 1e6
    return figures


def _wait_until_told(nodes: Sequence[Kvfs]) -> None:
    own = _several.status(nodes[0])["cluster"]["names"]["own"]
    _wait_until_known(nodes[1], own)


def _looked_at(path: str, _size: int) -> float:
    return _look(path, is_there=True)


def _opened_and_read(path: str, size: int) -> float:
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    found = len(os.read(fd, size))
    took = time.perf_counter() - began
    os.close(fd)
    if found != size:
        raise Unavailable(f"{path} has {found} bytes, not {size}")
    return took


def measure(place: _program.Place, extent: Extent) -> Figures:
    server = place.stack.enter_context(_several.running(place.base, place.guard))
    every = [_several.member(place.base, f"n{n}", server.url(0)) for n in range(1, _NODES + 2)]
    nodes, joining = every[:_NODES], every[_NODES]
    try:
        for node in every:
            place.stack.callback(node.stop)
        for node in nodes:
            node.start(place.guard)
        _make_namespace(nodes)
        figures = _said(_written(nodes, extent))
        samples = [_sampled(node) for node in nodes]
        for node in nodes:
            node.stop()
        more = (extent.blocks - extent.real) // _NODES
        figures |= _said(_filled(nodes, samples, more))
        held = _NODES * (more + 1 + _of_a_writer(extent) * _WRITERS)
        figures |= _said(_started(nodes, held, "first start, all names read"))
        figures |= _said(_memory(nodes, "after it"))
        for node in nodes:
            node.stop()
        figures |= _said(_started(nodes, held, "start"))
        figures |= _said(_memory(nodes, "after the start"))
        place.guard.mount(joining.mountpoint)
        joining.mountpoint.mkdir(parents=True)
        figures |= _said(_started([joining], held, "join"))
        figures |= _said(_memory([joining], "of the joined node"))
        figures |= _said(_looked_up(nodes, joining, samples, more))
        figures |= _said(_listed(joining, held))
    finally:
        for node in every:  # its millions of names take longer than the guard waits
            node.stop()
            shutil.rmtree(node.store, ignore_errors=True)
    return figures


def _make_namespace(nodes: Sequence[Kvfs]) -> None:
    flags = ("--kind", "cache", "--coherence", "peer")
    nodes[0].command("namespace", "create", _NAMESPACE, *flags)
    for node in nodes:
        _several.wait_for((node.mountpoint / _NAMESPACE).exists, "the namespace")


def _said(figures: Figures) -> Figures:
    """What is told at once: the rest may take long."""
    for name, value in figures.items():
        _say(f"{name} {value:,.4g}")
    return figures


def _written(nodes: Sequence[Kvfs], extent: Extent) -> Figures:
    each = _of_a_writer(extent)

    def writer(node: Kvfs) -> Callable[[], None]:
        def work() -> None:
            for _ in range(each):
                create_and_rename(str(node.mountpoint / _NAMESPACE / secrets.token_hex(32)))

        return work

    began = time.monotonic()
    _processes.together([partial(writer, node) for node in nodes for _ in range(_WRITERS)])
    return {"written through the mounts, /s": extent.real / (time.monotonic() - began)}


def _of_a_writer(extent: Extent) -> int:
    return extent.real // _NODES // _WRITERS


def _sampled(node: Kvfs) -> Sample:
    """A block of its own that it has sealed."""
    path = node.mountpoint / _NAMESPACE / secrets.token_hex(32)
    create_and_rename(str(path))
    with kvfs.Client(node.store) as client:
        inside = f"/{_NAMESPACE}/{path.name}"
        _several.wait_for(lambda: client.stat(inside).checksum, "the seal", _LOOK_S)
    return Sample(_number(node), path.stat().st_ino)


def _number(node: Kvfs) -> int:
    return int(_several.status(node)["cluster"]["node"])


def _filled(nodes: Sequence[Kvfs], samples: Sequence[Sample], count: int) -> Figures:
    _say(f"{count:,} more on each node")
    tasks = [
        lambda node=node, sample=sample: partial(fill, node.store, sample, 0, count)
        for node, sample in zip(nodes, samples, strict=True)
    ]
    began = time.monotonic()
    _processes.together(tasks)
    return {"made in stores, /s": len(nodes) * count / (time.monotonic() - began)}


def _started(nodes: Sequence[Kvfs], held: int, what: str) -> Figures:
    """Seconds of `kvfs up` of the last node, until each knows all names, and their CPU."""
    began = time.monotonic()
    for node in nodes:
        up = time.monotonic()
        node.up()
        took = time.monotonic() - up
    _say(f"{what}: up")
    for node in nodes:
        _wait_until_known(node, held)
    cpu_s = sum(processor_s(node.processes()) for node in nodes) / len(nodes)
    return {
        f"{what}: kvfs up, s": took,
        f"{what}: until all names are known, s": time.monotonic() - began,
        f"{what}: CPU of a node by then, s": cpu_s,
    }


def _wait_until_known(node: Kvfs, held: int) -> None:
    end = time.monotonic() + _KNOWN_S
    while True:
        names = _several.status(node)["cluster"]["names"] or {"own": 0, "others": 0, "lagging": 1}
        if names["own"] + names["others"] >= held and not names["lagging"]:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{node.name} knows {names} of {held:,} names")
        time.sleep(_LOOK_S)


def _memory(nodes: Sequence[Kvfs], when: str) -> Figures:
    """Of the daemon: what is its own, without the pages of mapped files that the kernel may take
    back; and the table of holders."""
    own = max(_anonymous(node.daemon() or 0) for node in nodes)
    tables = max(_several.status(node)["cluster"]["names"]["table_bytes"] for node in nodes)
    return {
        f"memory of a daemon {when}, MB": own / 1e6,
        f"its table of holders {when}, MB": tables / 1e6,
    }


def _anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(words[1]) for words in found) << 10


def _looked_up(
    nodes: Sequence[Kvfs], joined: Kvfs, samples: Sequence[Sample], count: int
) -> Figures:
    """Names that no kernel knows yet, one at a time at a mount, and together by a client."""
    first, second = nodes[:2]
    step = max(1, count // (2 * _LOOKS))
    numbers = range(0, count, step)

    def own() -> Iterator[str]:
        return (name_of(samples[0].node, number) for number in numbers[::2])

    def others() -> Iterator[str]:
        return (name_of(samples[1].node, number) for number in numbers[1::2])

    def absent() -> Iterator[str]:
        return (secrets.token_hex(32) for _ in range(_LOOKS))

    figures: Figures = {}
    for node, what, names in (
        (first, "absent", absent()),
        (first, "its own", own()),
        (first, "another node's", others()),
        (joined, "another node's, of the joined node", own()),
    ):
        folder = node.mountpoint / _NAMESPACE
        taken = [_look(str(folder / name), is_there=what != "absent") for name in names]
        cuts = statistics.quantiles(taken, n=100)
        figures[f"look-up, {what}: p50, us"] = cuts[49] * 1e6
        figures[f"look-up, {what}: p99, us"] = cuts[98] * 1e6
    with kvfs.Client(second.store) as client:
        taken = []
        for _ in range(200):
            wanted = [f"/{_NAMESPACE}/{secrets.token_hex(32)}" for _ in range(_TOGETHER)]
            began = time.perf_counter()
            assert not any(client.exists(wanted))
            taken.append(time.perf_counter() - began)
    cuts = statistics.quantiles(taken, n=100)
    figures[f"{_TOGETHER} absent names by a client: p50, us"] = cuts[49] * 1e6
    figures[f"{_TOGETHER} absent names by a client: p99, us"] = cuts[98] * 1e6
    return figures


def _listed(joined: Kvfs, held: int) -> Figures:
    """The whole namespace by readdir, on a node that holds none of it."""
    before, cpu_s = _anonymous(joined.daemon() or 0), processor_s(joined.processes())
    began = time.monotonic()
    with os.scandir(joined.mountpoint / _NAMESPACE) as entries:
        next(entries)
        first_s = time.monotonic() - began
        count = 1 + sum(1 for _ in entries)
    took = time.monotonic() - began
    if count != held:
        raise Unavailable(f"{count:,} of {held:,} names are listed")
    return {
        "list: first name, ms": first_s * 1e3,
        "list: names/s": count / took,
        "list: CPU of the node that lists, us a name": (processor_s(joined.processes()) - cpu_s)
        / count
        * 1e6,
        "list: memory that it takes, MB": (_anonymous(joined.daemon() or 0) - before) / 1e6,
    }


def _look(path: str, *, is_there: bool) -> float:
    began = time.perf_counter()
    found = os.path.exists(path)
    took = time.perf_counter() - began
    if found != is_there:
        raise Unavailable(f"{path} is {'there' if found else 'not found'}")
    return took


def main() -> int:
    options = _options()
    chosen = QUICK if options.quick else FULL
    extent = Extent(options.blocks or chosen.blocks, options.real or chosen.real)
    with _program.place(options.dir, _say) as place:
        if options.files:
            figures = _file_rows.measure(place.base, place.guard, extent.blocks, _say)
        else:
            figures = measure_reads(place) if options.reads else measure(place, extent)
    report: dict[str, Any] = {
        "benchmark": "blocks",
        "quick": options.quick,
        "conditions": _report.conditions(Path(options.dir)),
        **extent._asdict(),
        "figures": figures,
    }
    print("\n".join(f"{name:60} {value:,.4g}" for name, value in figures.items()))
    _program.print_json(report, options.json)
    return 0


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="dev bench blocks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="60,000 blocks")
    parser.add_argument("--reads", action="store_true", help="nothing but small reads, 20 s")
    parser.add_argument("--files", action="store_true", help="as many files of a durable namespace")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--blocks", type=int, metavar="N", help="in all; default 10 million")
    parser.add_argument("--real", type=int, metavar="N", help="by mounts; default 100,000")
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
