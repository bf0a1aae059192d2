"""What all nodes together have of a namespace that each keeps for itself: known to each, each copy
counted once, and asked before the namespace is removed."""

import pytest

from kvfs.base.errors import NotEmpty
from kvfs.cluster.change_feed import audible
from kvfs.cluster.node_records import NodeRecord, members, put_node
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.records import NodeUsage, namespace_root
from kvfs.node.names.usage_reporter import UsageReporter
from kvfs.tree import namespaces, tree
from kvfs.tree.copies import node_usage, placements
from tests.contract.hosts import NOW, Host
from tests.contract.mirrors import in_redis

Hosts = tuple[Host, Host, str]
FILE = 8 * 512


class Reports:
    """The reporter of a host, with a clock of its own."""

    def __init__(self, host: Host) -> None:
        self.now_s = 100.0
        self.host = host
        self._reporter = UsageReporter(host.mirror.engine, lambda: self.now_s)
        self._heard = 0

    def tell(self) -> int:
        """Tells what is due; returns how many requests that took."""
        self.host.mirror.catch_up()
        told = self.host.mirror.told
        self._reporter.heard(audible(told[self._heard :]))
        self._heard = len(told)
        before = self.host.trips
        self.host.mirror.call(self._reporter.look)
        return self.host.trips - before


def make(hosts: Hosts, capacity: int = 0) -> int:
    one, other, _ = hosts
    for number in (1, 2):
        record = NodeRecord(number=number, name=f"n{number}", store="", incarnation=1)
        one.write(lambda t, record=record: put_node(t, record))
    made: int = one.write(
        lambda t: namespaces.create(
            *(t, b"own"),
            kind="cache",
            coherence="peer",
            capacity=capacity,
            uid=0,
            gid=0,
            now=NOW,
        )
    )
    other.mirror.catch_up()
    one.number(made)
    other.number(made)
    return made


def put(host: Host, number: int, name: bytes) -> int:
    ino = host.create(namespace_root(number), name)
    host.close_file(ino, behind=True)
    return ino


def total(host: Host, number: int) -> tuple[int, int]:
    listed = host.mirror.read_now(lambda t: namespaces.listed(t, number))
    return (
        listed.usage.bytes + listed.elsewhere.bytes,
        listed.usage.inodes + listed.elsewhere.inodes,
    )


def test_each_node_knows_the_sum(hosts: Hosts) -> None:
    one, other, _ = hosts
    number = make(hosts)
    reports = [Reports(host) for host in (one, other)]
    assert [each.tell() for each in reports] == [0, 0]  # nobody has anything
    put(one, number, b"a")
    put(other, number, b"b")
    put(other, number, b"c")
    for each in reports:
        assert each.tell() == 1
    for host in (one, other):
        host.mirror.catch_up()
        assert total(host, number) == (3 * FILE, 3)
    put(other, number, b"d")
    assert reports[1].tell() == 0  # a moment ago it told what is almost so
    reports[1].now_s += 10
    assert reports[1].tell() == 1
    assert reports[1].tell() == 0
    one.mirror.catch_up()
    assert total(one, number) == (4 * FILE, 4)


def test_a_namespace_of_which_another_node_has_files_stays(hosts: Hosts) -> None:
    one, other, url = hosts
    number = make(hosts)
    reports = Reports(other)
    ino = put(other, number, b"b")
    assert reports.tell() == 1
    one.mirror.catch_up()
    with pytest.raises(NotEmpty, match="node 2"):
        one.write(lambda t: namespaces.remove(t, b"own", NOW))
    with pytest.raises(NotEmpty, match="node 2"):
        one.rmdir(1, b"own")
    other.unlink(namespace_root(number), b"b")
    other.write(lambda t: placements.let_go(t, ino, t.node))
    assert reports.tell() == 1  # at once
    one.mirror.catch_up()
    one.write(lambda t: namespaces.remove(t, b"own", NOW))
    assert not [key for key, _ in in_redis(url) if key[:1] == b"q"]


def test_what_a_removed_node_told_is_not_counted(hosts: Hosts) -> None:
    one, other, _ = hosts
    number = make(hosts)
    put(other, number, b"b")
    assert Reports(other).tell() == 1
    one.write(
        lambda t: put_node(
            t, NodeRecord(number=2, name="n2", store="", incarnation=1, state="removed")
        )
    )
    put(one, number, b"a")
    assert Reports(one).tell() == 1
    assert total(one, number) == (FILE, 1)
    told = one.mirror.read_now(lambda t: list(t.scan_keys(b"q", b"r")))
    assert told == [keys.node_usage(number, keys.pack_node(1))]


def limit(host: Host, number: int) -> int:
    host.mirror.catch_up()
    return host.mirror.read_now(lambda t: namespaces.listed(t, number)).limit


def test_a_capacity_is_that_of_all_nodes_together(hosts: Hosts) -> None:
    one, other, _ = hosts
    capacity = 40 * FILE
    number = make(hosts, capacity)
    assert limit(one, number) == capacity  # nobody was granted anything yet
    first, second = Reports(one), Reports(other)
    first.tell()
    assert limit(one, number) == capacity // 4  # a portion
    for name in range(25):
        put(one, number, b"%d" % name)
    assert first.tell() == 1
    assert limit(one, number) == 35 * FILE  # what it uses and a portion more, in one request
    for name in range(25, 40):
        put(one, number, b"%d" % name)
    first.tell()
    assert limit(one, number) == capacity
    second.tell()
    assert limit(other, number) == 0
    first.tell()
    assert limit(one, number) == capacity // 2  # which it has to empty first
    second.tell()
    assert limit(other, number) == 0
    for name in range(25):
        ino = one.find(namespace_root(number), b"%d" % name)
        one.unlink(namespace_root(number), b"%d" % name)
        one.write(lambda t, ino=ino: tree.reap(t, ino or 0))
    first.tell()
    second.tell()
    assert limit(other, number) == capacity // 4
    assert limit(one, number) <= capacity // 2 + capacity // 4


def test_a_look_before_figures_are_due_reads_no_records_of_nodes(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, _ = hosts
    number = make(hosts)
    reports, reads = Reports(one), 0

    def counted(t: Transaction) -> list[int]:
        nonlocal reads
        reads += 1
        return members(t)

    monkeypatch.setattr("kvfs.node.names.usage_reporter.members", counted)
    put(one, number, b"a")
    assert reports.tell() == 1
    reads = 0
    put(one, number, b"b")
    assert [reports.tell() for _ in range(3)] == [0, 0, 0]
    assert not reads
    reports.now_s += 10
    assert reports.tell() == 1
    assert reads


def test_a_look_reads_what_others_told_only_when_a_grant_changed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes tell what they use all the time, and each looks four times a second."""
    one, other, _ = hosts
    number = make(hosts, 1000 * FILE)
    first, second = Reports(one), Reports(other)
    for name in (b"a", b"b"):
        put(other, number, name)
        for each in (first, second, first):
            each.tell()
    reads: list[int] = []

    def told(t: Transaction, namespace_id: int) -> dict[int, NodeUsage]:
        reads.append(namespace_id)
        return read_all(t, namespace_id)

    read_all = node_usage.told
    monkeypatch.setattr(node_usage, "told", told)
    assert [first.tell() for _ in range(3)] == [0, 0, 0]
    put(other, number, b"c")
    second.now_s += 10
    assert second.tell() == 1
    reads.clear()
    assert first.tell() == 0
    assert not reads, "it used some more of its own part"
    for more in range(300):
        put(other, number, b"%d" % more)
    assert second.tell() == 1
    reads.clear()
    assert first.tell() == 0
    assert reads == [number]
