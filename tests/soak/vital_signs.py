"""Memory and descriptors of the daemons while a soak lasts, and whether they stay flat."""

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

from tests.cluster.cluster import Cluster

_MOST_RSS: Final = 512 << 20
_MOST_DESCRIPTORS: Final = 4_096
_GROWN: Final = 1.15
_SPARE_BYTES: Final = 32 << 20
_SPARE_DESCRIPTORS: Final = 512 + 64
"""A mount keeps up to 512 data files open without a handle."""
_LEAST_SAMPLES: Final = 60
"""Samples of one process from which on growth means something: five minutes. One that has just been
started grows, and the more so the busier its machine is."""


class Sample(NamedTuple):
    """One daemon at one moment."""

    at: float
    host: int
    pid: int
    rss_bytes: int
    descriptors: int


class VitalSigns:
    """The samples of a run."""

    def __init__(self, cluster: Cluster) -> None:
        self.samples: list[Sample] = []
        self._cluster = cluster

    def take(self) -> None:
        """Of each daemon that runs."""
        for host in self._cluster:
            pid = host.find()
            if pid is None:
                continue
            try:
                count = len(os.listdir(f"/proc/{pid}/fd"))
                status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            except OSError:  # it has just been killed
                continue
            (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
            self.samples.append(Sample(time.monotonic(), host.number, pid, int(rss) << 10, count))

    def complaints(self) -> list[str]:
        """What is too much, or grows: the last third of a process's life against the second."""
        found = [
            f"too much: {each}"
            for each in self.samples
            if each.rss_bytes > _MOST_RSS or each.descriptors > _MOST_DESCRIPTORS
        ]
        for pid in sorted({each.pid for each in self.samples}):
            own = [each for each in self.samples if each.pid == pid]
            if len(own) < _LEAST_SAMPLES:
                continue
            third = len(own) // 3
            before, after = own[third : 2 * third], own[2 * third :]
            rss = max(each.rss_bytes for each in before), max(each.rss_bytes for each in after)
            if rss[1] > rss[0] * _GROWN + _SPARE_BYTES:
                found.append(f"memory of process {pid} grew from {rss[0]:,} to {rss[1]:,} bytes")
            opened = (
                min(each.descriptors for each in before),
                min(each.descriptors for each in after),
            )
            if opened[1] > opened[0] + _SPARE_DESCRIPTORS:
                found.append(f"descriptors of process {pid} grew from {opened[0]} to {opened[1]}")
        return found

    def summary(self) -> dict[str, int]:
        """The most that any daemon had."""
        return {
            "most_rss_bytes": max((each.rss_bytes for each in self.samples), default=0),
            "most_descriptors": max((each.descriptors for each in self.samples), default=0),
            "samples": len(self.samples),
        }
