"""What a namespace of so many files means to the start of a lone node and of a cluster's node, and
to a node with an empty store that joins."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import kvfs
from benchmarks import _several
from benchmarks._bulk_files import fill_server, fill_store, path_of
from benchmarks._guard import Guard
from benchmarks._systems import Kvfs, Unavailable, processor_s
from kvfs.meta.redis.location import parse
from tests.contract.redis_servers import RedisServer, ask

_NAMESPACE: Final = "models"
_LIVES_ON: Final = ("--takeover-s", "60")
_JOIN_S: Final = 3_600.0
_ANSWER_S: Final = 600.0
"""Time in which the server takes one command."""
Figures = dict[str, float]
Say = Callable[[str], None]


def measure(base: Path, guard: Guard, files: int, say: Say) -> Figures:
    """Returns the figures by name. Raises Unavailable."""
    return {**_lone(base / "lone", guard, files, say), **_cluster(base, guard, files, say)}


def _lone(base: Path, guard: Guard, files: int, say: Say) -> Figures:
    node = Kvfs("lone node", base, "auto", "--no-s3")
    try:
        node.start(guard)
        sample = node.mountpoint / _NAMESPACE / "sample"
        sample.write_bytes(bytes(4096))
        with kvfs.Client(node.store) as client:
            inside = f"/{_NAMESPACE}/sample"
            _several.wait_for(lambda: client.stat(inside).checksum, "the seal", 0.5)
        number = sample.stat().st_ino
        node.stop()
        say(f"{files:,} files are made in a store")
        fill_store(node.store, _NAMESPACE, number, files)
        return measure_starts("lone", node, base, guard, files, say)
    finally:
        node.stop()


def _cluster(base: Path, guard: Guard, files: int, say: Say) -> Figures:
    server = RedisServer(base / "server", "--appendonly", "no")
    guard.process(server.pid)
    first, joined = (_several.member(base, name, server.url) for name in ("first", "joined"))
    try:
        first.start(guard)
        first.stop()
        say(f"{files:,} files are made at a server")
        began = int(server.info("used_memory"))
        with server.connected() as connection:
            connection.settimeout(_ANSWER_S)
            prefix = parse(server.url).prefix
            fill_server(lambda *words: ask(connection, *words), prefix, _NAMESPACE, files)
        figures = {"server: memory, B a file": (int(server.info("used_memory")) - began) / files}
        figures |= measure_join(joined, server, guard, files, say)
        return figures | measure_starts("cluster", joined, base / "joined", guard, files, say)
    finally:
        joined.stop()
        first.stop()
        server.kill()


def measure_join(joined: Kvfs, server: RedisServer, guard: Guard, files: int, say: Say) -> Figures:
    """What a node with an empty store takes until it has all metadata."""
    say("a node joins")
    sent, used = int(server.info("total_net_output_bytes")), processor_s([server.pid])
    began = time.monotonic()
    guard.mount(joined.mountpoint)
    joined.mountpoint.mkdir(parents=True, exist_ok=True)
    joined.up(_JOIN_S)
    _look(joined, files - 1)
    took = time.monotonic() - began
    node = _figures_of(joined)
    return {
        "join: until a file is found, s": took,
        "join: CPU of the node, s": processor_s(joined.processes()),
        "join: CPU of the server, s": processor_s([server.pid]) - used,
        "join: sent by the server, MB": (int(server.info("total_net_output_bytes")) - sent) / 1e6,
        "join: metadata in the store, MB": _stored(joined) / 1e6,
        **{f"join: {name}": value for name, value in node.items()},
    }


def measure_starts(
    whose: str, node: Kvfs, base: Path, guard: Guard, files: int, say: Say
) -> Figures:
    """Seconds from the beginning of `kvfs up` until the mount says what a file is, after several
    ends of the run before; and what the node takes then."""
    again = Kvfs(node.name, base, node.mode, *node.arguments, *_LIVES_ON)
    figures: Figures = {}

    def started(how: str, one: Kvfs, number: int) -> None:
        guard.mount(one.mountpoint)
        began = time.monotonic()
        one.up()
        _look(one, number)
        took = time.monotonic() - began
        say(f"{whose}, start {how}: {took:.2f} s")
        figures[f"{whose}, start {how}: s"] = took

    node.stop()
    started("after a stop", node, files // 2)
    figures |= {f"{whose}, then: {name}": value for name, value in _figures_of(node).items()}
    figures |= {f"{whose}, list: {name}": value for name, value in _listed(node).items()}
    began = time.monotonic()
    _several.status(node)
    figures[f"{whose}: kvfs status, s"] = time.monotonic() - began
    _kill(node)
    started("after kill -9", node, files // 3)
    node.stop()
    _drop_caches()
    started("after a stop, cold page cache", node, files // 4)
    _kill(node)
    _drop_caches()
    started("after kill -9, cold page cache", node, files // 5)
    node.stop()
    started("that a mount may outlive", again, files // 6)
    began = time.monotonic()
    _kill(again)
    _look(again, files // 7)  # the mount waits for the next daemon, which its holder starts
    figures[f"{whose}, kill -9, the mount lives on until the next start: s"] = (
        time.monotonic() - began
    )
    again.stop()
    return figures


def _kill(node: Kvfs) -> None:
    pid = node.daemon()
    if pid is None:
        raise Unavailable(f"{node.name} does not run")
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    _several.wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the node")


def _look(node: Kvfs, number: int) -> None:
    os.stat(node.mountpoint / _NAMESPACE / path_of(number))


def _listed(node: Kvfs) -> Figures:
    """What the first listings take: of the directories, and of the files in one of them."""
    top = node.mountpoint / _NAMESPACE
    began = time.monotonic()
    directories = [name for name in os.listdir(top) if (top / name).is_dir()]
    took = time.monotonic() - began
    began = time.monotonic()
    os.listdir(top / directories[-1])
    return {
        f"{len(directories):,} directories, each looked at, s": took,
        "the files of one, ms": (time.monotonic() - began) * 1e3,
    }


def _drop_caches() -> None:
    os.sync()
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def _figures_of(node: Kvfs) -> Figures:
    """The memory of its daemon: its own, the most that it ever had, and with the pages of mapped
    files, which the kernel may take back."""
    lines = Path(f"/proc/{node.daemon()}/status").read_text().splitlines()
    told = {words[0]: int(words[1]) / 1e3 for words in map(str.split, lines) if words[-1] == "kB"}
    own = told["RssAnon:"] + told["RssShmem:"]
    return {"own memory, MB": own, "resident with mapped files, MB": told["VmRSS:"]}


def _stored(node: Kvfs) -> int:
    return sum(each.stat().st_blocks * 512 for each in (node.store / "meta").rglob("*"))
