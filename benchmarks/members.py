"""What membership costs: the metadata server to which all nodes renew their leases, and a node that
hears of the others.

All members are in one process, each with a connection of its own, and do what nodes do: they renew
as soon as they have joined, then as often as nodes do, and report other figures whenever they may.
One more is a process by itself, and keeps its roster. What is measured begins when all have heard
of all. Prints a table, then one JSON object.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio

from benchmarks import _processes, _program, _report
from benchmarks._guard import Guard
from benchmarks._several import Server
from kvfs.base.clock import now
from kvfs.base.errors import Unavailable
from kvfs.base.version import PROTOCOL, VERSION
from kvfs.cluster.failure_detector import RENEWAL_S
from kvfs.cluster.node_records import CHANGES_PER_S, NodeRecord, Reports, Words
from kvfs.cluster.roster import Roster
from kvfs.meta.node_leases import HeardLeases, Joined
from kvfs.meta.records import pack
from kvfs.meta.redis.about import read_info
from kvfs.meta.redis.calling import RetryingClient, locate
from kvfs.meta.redis.leasing import LeaseTable

_DEADLINE_S: Final = 10.0
_WARM_RENEWALS: Final = 3
"""Renewals of each member after the last one joined: the first brings those who joined, the third
knows who is dead."""
_WARM_S: Final = 120.0
"""Time within which all have joined and renewed that often."""
_LOOK_S: Final = RENEWAL_S / 10
_DIGEST: Final = bytes(32)
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Case(NamedTuple):
    """A cluster: how many members it has, and how many of them were killed."""

    members: int
    killed: int
    seconds: float
    url: str
    server: int


class Member:
    """A node, as far as its membership goes."""

    def __init__(self, case: Case, number: int) -> None:
        self._case = case
        self._name = f"node-{number:05d}.cluster.local"
        self._table = LeaseTable(locate(case.url), _DEADLINE_S)
        self._me = Joined(0, 0)
        spread = random.random()
        self._reports = Reports(spread)
        # As if it had been there for long.
        told_s = now() - random.random() * case.members / CHANGES_PER_S * (0.5 + spread)
        self._joins_with = self._reports.tell(self._words(), case.members, told_s)
        self._heard = HeardLeases()
        self.renewals = 0
        self.unanswered = 0
        self.heard = 0
        """Leases that it was told of."""

    async def join(self, roster: Roster | None = None) -> None:
        """Joins, and renews at once, as a node does that starts."""
        words = pack(self._joins_with)
        self._me = await self._table.join(self._name, self._name, words, [_DIGEST], None)
        await self.renew(roster)

    async def renew(self, roster: Roster | None = None) -> None:
        words = self._reports.tell(self._words(), self._case.members, now())
        renewed = await self._table.renew(self._me, pack(words), self._heard)
        if roster is not None:
            roster.hear(renewed.news, now())
        self.renewals += 1
        self.heard += len(renewed.news.leases)

    async def run(self) -> None:
        """Renews until cancelled."""
        await trio.sleep(random.random() * RENEWAL_S)
        while True:
            try:
                await self.renew()
            except Unavailable:
                self.unanswered += 1
            await trio.sleep(RENEWAL_S)

    def _words(self) -> Words:
        return Words(
            name=self._name,
            protocol=PROTOCOL,
            version=VERSION,
            boot=1 << 61,
            free_bytes=random.getrandbits(42),
            capacity_bytes=1 << 42,
            load=random.random(),
            place="2049:12345678",
        )


def measure(case: Case) -> dict[str, Any]:
    """What so many members cost the server, and each node."""
    trio.run(_found, case.url)
    tasks = [lambda: partial(trio.run, _many, case), lambda: partial(trio.run, _one, case)]
    server, node = _processes.together(tasks)
    return {"members": case.members, "killed": case.killed, **server, **node}


async def _found(url: str) -> None:
    table = LeaseTable(locate(url), _DEADLINE_S)
    await table.found(None)
    table.close()


async def _many(case: Case) -> dict[str, float]:
    """All members but one, and what they cost the server."""
    members = [Member(case, number) for number in range(1, case.members)]
    living = members[case.killed :]
    async with trio.open_nursery() as nursery:
        for each in members:
            await each.join()
            if each in living:
                nursery.start_soon(each.run)
        await _warmed(living)
        before, began = await _so_far(case, members), time.perf_counter()
        await trio.sleep(case.seconds)
        after, passed_s = await _so_far(case, members), time.perf_counter() - began
        nursery.cancel_scope.cancel()
    cpu_s, sent, renewals, heard = (now - then for now, then in zip(after, before, strict=True))
    return {
        "server_share": cpu_s / passed_s,
        "server_us": cpu_s / renewals * 1e6,
        "answer_bytes": sent / renewals,
        "leases": heard / renewals,
        "renewals": renewals,
        "unanswered": sum(each.unanswered for each in members),
    }


async def _warmed(members: Sequence[Member]) -> None:
    """Returns when all have heard of all. Raises TimeoutError."""
    until = [each.renewals + _WARM_RENEWALS for each in members]
    with trio.move_on_after(_WARM_S):
        while any(each.renewals < least for each, least in zip(members, until, strict=True)):
            await trio.sleep(_LOOK_S)
        return
    raise TimeoutError(f"{len(members):,} members need more CPU than this host has to spare")


async def _so_far(case: Case, members: Sequence[Member]) -> tuple[float, int, int, int]:
    """The server's CPU, seconds; the bytes that it sent; the renewals, and the leases heard of."""
    client = RetryingClient(locate(case.url), _DEADLINE_S)
    told = read_info(await client.call(b"INFO", b"stats"))
    client.close()
    fields = Path(f"/proc/{case.server}/stat").read_text().rpartition(")")[2].split()
    return (
        (int(fields[11]) + int(fields[12])) / _TICKS,
        int(told["total_net_output_bytes"]),
        sum(each.renewals for each in members),
        sum(each.heard for each in members),
    )


async def _one(case: Case) -> dict[str, float]:
    """One member with its roster, and the CPU that it takes."""
    member, roster = Member(case, case.members), Roster(case.members)
    roster.read(
        NodeRecord(number=number, name=f"node-{number:05d}", store=f"{number:032x}", incarnation=1)
        for number in range(1, case.members + 1)
    )
    await member.join(roster)
    while len(roster) < case.members:
        await member.renew(roster)
        await trio.sleep(_LOOK_S)
    for _ in range(_WARM_RENEWALS):
        await trio.sleep(RENEWAL_S)
        await member.renew(roster)
    taken_s, renewals = 0.0, round(case.seconds / RENEWAL_S)
    for _ in range(renewals):
        await trio.sleep(RENEWAL_S)
        began = time.process_time()
        await member.renew(roster)
        taken_s += time.process_time() - began
    return {"node_us": taken_s / renewals * 1e6}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'members':28} {'server, of a core':>17} {'us a renewal':>13} {'bytes':>8} {'leases':>7}"
        f" {'node, us':>9}"
    ]
    for row in rows:
        name = f"{row['members']:,}"
        if row["killed"]:
            name += f", {row['killed']:,} of them killed"
        lines.append(
            f"{name:28} {row['server_share']:17.2%} {row['server_us']:13.0f}"
            f" {row['answer_bytes']:8,.0f} {row['leases']:7.1f} {row['node_us']:9.0f}"
        )
    return "\n".join(lines)


def main() -> int:
    options = _options()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    seconds = options.seconds or (10.0 if options.quick else 30.0)
    sizes = [(size, 0) for size in options.members]
    sizes += [(max(options.members), max(options.members) * 3 // 10)]
    with Guard() as guard, tempfile.TemporaryDirectory(dir=options.dir) as base:
        server = Server(Path(base) / "server", guard)
        cases = (
            Case(size, killed, seconds, f"{server.url(0)}?prefix=m{size}-{killed}", server.pid)
            for size, killed in sizes
        )
        rows = [measure(each) for each in cases]
        server.stop()
    report = {
        "benchmark": "members",
        "quick": options.quick,
        "seconds": seconds,
        "conditions": _report.conditions(Path(options.dir)),
        "rows": rows,
    }
    print(table(rows))
    _program.print_json(report, options.json)
    return 0


def _options() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="dev bench members", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 s for each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    parser.add_argument("--seconds", type=float, help="for each size; default 30")
    parser.add_argument(
        "--members",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[10, 100, 1000],
        metavar="N,...",
        help="sizes of the clusters; default 10,100,1000",
    )
    parser.add_argument("--dir", default="/var/tmp", help="where all is stored; default /var/tmp")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
