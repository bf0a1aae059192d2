"""The rows about a KVFS node itself: the Python client, resident memory, start."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks import _load as load
from benchmarks._interleave import Group, Row, Target
from benchmarks._mount_rows import PREPARE_S, Folder, Scale, same_target
from benchmarks._systems import Kvfs, System

_BATCH: Final = 1000
_BATCHES: Final = 20


def first_groups() -> list[Group]:
    """To be measured before anything else has used the nodes."""
    row = Row("resident memory, idle", "MB", False, same_target(Target("at_most", 80)))
    return [
        Group((row,), lambda system: {row.name: resident_mb(system)}, applies=_has_daemon, rounds=1)
    ]


def last_groups(scale: Scale) -> list[Group]:
    """These fill the nodes and start them anew."""
    many = Folder("many", scale.many_files, 0)
    return [_batched_exists(scale), _touched(scale, many), _start(scale, many)]


def resident_mb(system: System) -> float:
    """VmRSS of the daemon in MB, the resident part of its memory maps (the metadata engine)
    included.
    """
    status = Path(f"/proc/{system.daemon()}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024 / 1e6


def _has_daemon(system: System) -> bool:
    return system.daemon() is not None


def _is_kvfs(system: System) -> bool:
    return isinstance(system, Kvfs)


def _batched_exists(scale: Scale) -> Group:
    """Half of the keys exist; all are asked in batches, in a process without the mount."""
    row = Row(
        f"Client.exists, {_BATCH:,} keys a batch",
        "keys/s",
        True,
        same_target(Target("at_least", 500_000)),
    )
    folder = Folder("names", scale.names, 0)

    def measure(system: System) -> Mapping[str, float]:
        from kvfs.client import Client  # not needed by the other rows

        assert isinstance(system, Kvfs)
        known = [system.inside(name) for name in folder.names(system)[: _BATCH // 2]]
        new = load.new_names(Path(system.inside(system.root)), _BATCHES * _BATCH // 2)
        half = _BATCH // 2
        batches = [known + new[first : first + half] for first in range(0, len(new), half)]
        with Client(system.store) as client:
            began = time.perf_counter()
            answers = [client.exists(batch) for batch in batches]
            elapsed = time.perf_counter() - began
        if any(sum(map(bool, answer)) != half for answer in answers):
            raise FileNotFoundError("exists() misses names that are there")
        return {row.name: _BATCHES * _BATCH / elapsed}

    return Group((row,), measure, folder.make, applies=_is_kvfs)


def _touched(scale: Scale, many: Folder) -> Group:
    """Made, looked up and opened through the mount."""
    row = Row(
        f"resident memory, {scale.many_files:,} files touched",
        "MB",
        False,
        same_target(Target("at_most", 150)),
    )

    def measure(system: System) -> Mapping[str, float]:
        many.make(system)
        load.per_name(many.names(system), PREPARE_S, _touch)
        return {row.name: resident_mb(system)}

    return Group((row,), measure, applies=_is_kvfs, rounds=1, weight=6)


def _touch(name: str) -> None:
    os.stat(name)
    os.close(os.open(name, os.O_RDONLY))


def _start(scale: Scale, many: Folder) -> Group:
    """From the command to a file of the namespace that is seen and one that is made."""
    row = Row(
        f"start to a usable mount, {scale.many_files:,} files",
        "s",
        False,
        same_target(Target("at_most", 1.0)),
    )

    def measure(system: System) -> Mapping[str, float]:
        assert isinstance(system, Kvfs)
        many.make(system)
        system.stop()
        began = time.perf_counter()
        system.up()
        os.stat(many.names(system)[-1])
        made = f"{system.root}/made-after-start"
        load.create(made)
        elapsed = time.perf_counter() - began
        os.unlink(made)
        return {row.name: elapsed}

    return Group((row,), measure, applies=_is_kvfs, rounds=3, weight=3)
