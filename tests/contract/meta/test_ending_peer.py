"""A namespace with files whose names were each node's own and become everybody's again
(`--coherence peer` ends): no file is lost, none comes back, and of one name there is one file,
whatever each node was doing, whichever tells first, and wherever a kill comes."""

import random
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.base.errors import Busy, Conflict, NoSpace, NotSupported, Paused
from kvfs.cluster.node_records import NodeRecord
from kvfs.meta import keys
from kvfs.meta.engine import Transaction
from kvfs.meta.local_keys import is_local_key
from kvfs.meta.records import (
    Inode,
    Namespace,
    Tag,
    pack,
    unpack_inode,
    unpack_namespace,
    unpack_usage,
)
from kvfs.node.coherence import peer_ender
from kvfs.node.coherence.peer_ender import PeerEnder, settle
from kvfs.node.coherence.peer_teller import PeerTeller
from kvfs.node.names.tombstones import Tombstone, Tombstones
from kvfs.node.siblings.differing_names import DifferingNames
from kvfs.tree import coherence_change, inodes, lifecycle, namespaces, tree
from kvfs.tree.copies import held_names, node_usage, own_part, peer_end, placements
from tests.contract.hosts import NOW, TOP, Host
from tests.contract.mirrors import in_redis
from tests.contract.redis_servers import RedisServer

NS = 1
SPACE = keys.pack_u16(NS)
Hosts = tuple[Host, Host, str]


class Jobs:
    """One node's claims, of which each stands."""

    async def take(self, _name: str) -> bool:
        return True

    def check(self, _t: Transaction, _name: str) -> None:
        pass

    async def drop(self, _name: str) -> None:
        pass


@dataclass
class Part:
    """The part of a node in the change."""

    host: Host
    dead: set[int]

    def __post_init__(self) -> None:
        node = self.host.mirror.engine.node
        record = NodeRecord(number=node, name=f"node{node}", store="", incarnation=1)
        self.host.write(lambda t: t.put(keys.node(node), pack(record)))
        self.start()

    def start(self) -> None:
        engine = self.host.mirror.engine
        self.stones = Tombstones(self.host.mirror.local)
        self.differing = DifferingNames()
        self.dropped: list[tuple[int, int]] = []
        jobs: Any = Jobs()
        self.ender = PeerEnder(
            *(engine, jobs, lambda node: node not in self.dead),
            PeerTeller(engine, self.stones, self.differing),
            *(self.dropped.extend, lambda _namespace_id: None),
        )

    def step(self) -> None:
        self.host.mirror.catch_up()
        self.host.mirror.call(self.ender._step)
        self.host.mirror.catch_up()

    def restart(self) -> None:
        self.host.mirror.close()
        self.come_back()

    def come_back(self) -> None:
        self.host.start()
        self.start()
        engine = self.host.mirror.engine
        self.host.mirror.call(lambda: settle(engine, self.dropped.extend))


@pytest.fixture
def parts(hosts: Hosts) -> tuple[Part, Part]:
    one, other, _ = hosts
    one.write(lambda t: namespaces.set_policy(t, NS, now=NOW, kind="cache", coherence="peer"))
    other.mirror.catch_up()
    one.mirror.call(lambda: one.mirror.engine.drop_shared(NS))
    one.write(lambda t: coherence_change.finish(t, NS))
    other.mirror.catch_up()
    dead = set[int]()
    found = Part(one, dead), Part(other, dead)
    one.mirror.catch_up()
    return found


def put(host: Host, name: bytes, directory: int = TOP) -> int:
    ino = host.create(directory, name)
    host.close_file(ino)
    return ino


def end_peer(host: Host, coherence: str = "cache") -> None:
    host.write(lambda t: namespaces.set_policy(t, NS, now=NOW, coherence=coherence))


def run(*parts: Part) -> None:
    """Has all nodes do all their parts."""
    for _ in range(8):
        for each in parts:
            each.step()


def record_of(part: Part) -> Namespace:
    return unpack_namespace(part.host.mirror.read_now(lambda t: t.get(keys.namespace(NS))) or b"")


def finish(*parts: Part) -> None:
    run(*parts)
    record = record_of(parts[0])
    assert not record.switches_to
    assert not record.is_peer


def impatient(*parts: Part) -> None:
    """Whoever waits for the namespace to be open is told at once that it is not."""
    for part in parts:
        part.host.mirror.engine.ending._deadline_s = 0.01


def names_of(host: Host) -> list[bytes]:
    children = host.mirror.read_now(lambda t: tree.list_children(t, TOP, b"", 1000))
    return [each.name for each in children]


def everything_of(host: Host) -> dict[bytes, bytes]:
    found = host.mirror.read_now(lambda t: list(t.scan(b"", b"\xff")))
    return {key: value for key, value in found if is_local_key(key, (SPACE,))}


def of_server(url: str) -> dict[bytes, bytes]:
    return {key: value for key, value in in_redis(url) if is_local_key(key, (SPACE,))}


def check_alike(url: str, *hosts: Host) -> None:
    """Every node has what the server has, and the usage is that of the records."""
    there = of_server(url)
    for host in hosts:
        assert not host.mirror.is_local(NS)
        assert everything_of(host) == there
        inodes = [
            unpack_inode(v)
            for k, v in there.items()
            if k[:1] == keys.INODE and k[3:] != b"\0\0\0\0\0\1"
        ]
        usage = host.mirror.read_now(lambda t: namespaces.usage(t, NS))
        assert (usage.bytes, usage.inodes) == (sum(e.blocks for e in inodes) * 512, len(inodes))


def holders(host: Host, ino: int) -> list[int]:
    found = host.mirror.read_now(lambda t: placements.holders(t, ino))
    return [keys.unpack_node(each.node) for each in found]


def test_a_file_of_which_no_other_node_has_heard_stays(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    """To the node that changes it the namespace is empty."""
    one, other, url = hosts
    ino = put(other, b"first")
    one.write(lambda t: t.put(keys.setting(NS, b"policy"), b"p"))
    one.write(lambda t: inodes.set_xattr(t, TOP, b"user.a", b"1", 0, NOW))
    assert one.mirror.read_now(lambda t: node_usage.told(t, NS)) == {}
    end_peer(one)
    finish(*parts)
    check_alike(url, one, other)
    for host in (one, other):
        assert host.find(TOP, b"first") == ino
        assert host.mirror.read_now(lambda t: namespaces.settings(t, NS)) == {b"policy": b"p"}
        assert host.mirror.read_now(lambda t: inodes.get_xattr(t, TOP, b"user.a")) == b"1"


def test_all_nodes_see_the_files_of_all(hosts: Hosts, parts: tuple[Part, Part]) -> None:
    one, other, url = hosts
    mine = [put(one, b"mine%d" % each) for each in range(10)]
    theirs = [put(other, b"theirs%d" % each) for each in range(10)]
    assert len(names_of(one)) == 10
    end_peer(one)
    with pytest.raises(Busy, match="still becoming cache"):
        one.write(lambda t: namespaces.set_policy(t, NS, now=NOW, capacity=1 << 30))
    finish(*parts)
    for host in (one, other):
        assert [host.find(TOP, b"mine%d" % each) for each in range(10)] == mine
        assert [host.find(TOP, b"theirs%d" % each) for each in range(10)] == theirs
    assert holders(one, theirs[0]) == [other.mirror.engine.node]
    check_alike(url, one, other)
    later = put(one, b"later")
    one.mirror.call(one.mirror.engine.sync)
    other.mirror.catch_up()
    assert other.find(TOP, b"later") == later
    one.restart()
    assert names_of(one) == names_of(other)


def test_it_can_become_peer_and_end_it_again(hosts: Hosts, parts: tuple[Part, Part]) -> None:
    one, other, url = hosts
    put(one, b"mine")
    put(other, b"theirs")
    end_peer(one)
    finish(*parts)
    one.write(lambda t: namespaces.set_policy(t, NS, now=NOW, coherence="peer"))
    other.mirror.catch_up()
    one.mirror.call(lambda: one.mirror.engine.drop_shared(NS))
    one.write(lambda t: coherence_change.finish(t, NS))
    other.mirror.catch_up()
    for host in (one, other):
        host.write(lambda t: own_part.drop_foreign(t, own_part.files_after(t, NS, 0, 100)))
    put(one, b"more")
    end_peer(other)
    finish(*parts)
    assert names_of(one) == names_of(other) == [b"mine", b"more", b"theirs"]
    check_alike(url, one, other)


# ---- while it is closed


def test_nothing_is_changed_while_nodes_tell_and_all_is_read(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    one, other, url = hosts
    kept, open_ = one.create(TOP, b"kept"), one.create(TOP, b"open")
    publish(one, kept, NOW, b"a")
    one.mkdir(TOP, b"directory")
    numbers = [host.number(NS) for host in (one, other)]  # taken before
    end_peer(one)
    other.mirror.catch_up()
    impatient(*parts)
    for _ in range(3):  # up to the last step before the entry
        for part in parts:
            part.step()
        changes: list[Callable[[], object]] = [
            lambda: put(one, b"new"),
            lambda: put(other, b"new"),
            lambda: one.close_file(open_),
            lambda: one.unlink(TOP, b"kept"),
            lambda: one.rename(TOP, b"kept", TOP, b"moved"),
            lambda: one.rmdir(TOP, b"directory"),
            lambda: one.mkdir(TOP, b"another"),
            lambda: one.write(lambda t: inodes.set_xattr(t, kept, b"user.a", b"", 0, NOW)),
            lambda: one.write(lambda t: lifecycle.reopen(t, kept)),
            lambda: one.write(_in_two_namespaces),
        ]
        for change in changes:
            with pytest.raises(Paused, match="until all nodes have told"):
                change()
        assert one.find(TOP, b"kept") == kept
    assert numbers[0] != numbers[1]
    finish(*parts)
    one.close_file(open_)
    other.mirror.catch_up()
    assert (other.find(TOP, b"kept"), other.find(TOP, b"open")) == (kept, open_)
    check_alike(url, one, other)


def _in_two_namespaces(t: Transaction) -> None:
    """What S3 does in one transaction, and the mount never."""
    t.put(keys.setting(NS, b"shared"), b"")
    tree.unlink(t, TOP, b"kept", NOW, lambda _: False)


def test_whoever_waits_goes_on_when_it_is_open_again(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    one, other, url = hosts
    put(one, b"kept")
    end_peer(one)
    other.mirror.catch_up()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(put, one, b"late")
        finish(*parts)
        late = waiting.result(20)
    one.mirror.call(one.mirror.engine.sync)
    other.mirror.catch_up()
    assert other.find(TOP, b"late") == late
    check_alike(url, one, other)


@pytest.mark.parametrize("steps", range(4))
def test_asked_back_all_is_as_it_was(hosts: Hosts, parts: tuple[Part, Part], steps: int) -> None:
    one, other, url = hosts
    for host, name in ((one, b"mine"), (other, b"theirs")):
        put(host, name, host.mkdir(TOP, b"above"))
        put(host, b"both")
    before = [everything_of(host) for host in (one, other)]
    end_peer(one)
    for _ in range(steps):
        for part in parts:
            part.step()
    assert record_of(parts[0]).is_peer
    end_peer(other, "peer")
    for host in (one, other):
        host.mirror.catch_up()
    assert [everything_of(host) for host in (one, other)] == before
    later = put(one, b"later")
    run(*parts)
    assert not record_of(parts[0]).switches_to
    assert [everything_of(other)] == before[1:]
    assert [key for key in of_server(url) if key[:1] != keys.USAGE] == []
    assert namespaces_usage(url) == (0, 0)
    for host in (one, other):
        assert not host.mirror.read_now(lambda t: list(t.scan(b"\xff~e", b"\xff~f")))
        assert host.inode(TOP).nlink == 2
    end_peer(one)
    finish(*parts)
    assert other.find(TOP, b"later") == later
    check_alike(url, one, other)


def namespaces_usage(url: str) -> tuple[int, int]:
    usage = unpack_usage(of_server(url)[keys.usage(NS)])
    return usage.bytes, usage.inodes


@pytest.mark.parametrize("why", ["away", "removed", "full", "restart"])
def test_without_a_node_or_room_it_is_asked_back(
    hosts: Hosts, parts: tuple[Part, Part], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_ender, "AWAY_S", 0.0)
    one, other, url = hosts
    put(one, b"mine")
    put(other, b"theirs")
    end_peer(one)
    for part in parts:
        part.step()
    node = other.mirror.engine.node
    if why == "away":
        parts[0].dead.add(node)
    elif why == "removed":
        gone = NodeRecord(number=node, name="gone", store="", incarnation=1, state="removed")
        one.write(lambda t: t.put(keys.node(node), pack(gone)))
    elif why == "restart":
        parts[1].restart()
    else:

        async def full(_fn: object) -> None:
            raise NoSpace("the engine is full")

        one.mirror.engine.ending.tell = full  # type: ignore[method-assign, assignment]
    parts[0].step()
    assert record_of(parts[0]).is_asked_back
    assert put(one, b"more")
    other.mirror.catch_up()
    assert put(other, b"more-theirs")
    parts[0].dead.clear()
    run(*parts)
    if why != "removed":
        run(parts[1])
    assert not record_of(parts[0]).switches_to
    assert names_of(one) == [b"mine", b"more"]
    assert names_of(other) == [b"more-theirs", b"theirs"]
    assert [key for key in of_server(url) if key[:1] != keys.USAGE] == []


def tell_records(hosts: Hosts, parts: tuple[Part, Part]) -> None:
    """Both nodes have a file, and tell of all but its name."""
    one, other, _ = hosts
    put(one, b"mine")
    put(other, b"theirs")
    end_peer(one)
    for _ in range(2):
        for part in parts:
            part.step()


def test_a_node_that_is_removed_at_the_last_moment_ends_nothing(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    """Who ends it may have looked before: the files of the node would have no holder."""
    one, other, _ = hosts
    tell_records(hosts, parts)
    parts[0].step()
    parts[1].step()
    one.mirror.catch_up()
    steps = one.mirror.read_now(lambda t: coherence_change.steps(t, NS))
    began = (record_of(parts[0]).tags or {})[Tag.ENDS_PEER]
    told = one.mirror.engine.node, other.mirror.engine.node
    assert steps == dict.fromkeys(told, coherence_change.TOLD)
    with pytest.raises(Conflict, match="was removed"):
        one.write(lambda t: peer_end.end(t, NS, began, [one.mirror.engine.node]))
    assert record_of(parts[0]).is_peer


@pytest.mark.usefixtures("parts")
def test_what_is_told_and_what_is_the_nodes_own_are_not_mixed_in_one_request(hosts: Hosts) -> None:
    """Those that wait while a request is under way go with the next one together."""
    one, other, _ = hosts
    mine = put(one, b"mine")
    end_peer(one)
    engine, found = one.mirror.engine, list[bytes | None]()
    key, other_ns = keys.inode(mine), keys.setting(2, b"any")
    own = one.mirror.read_now(lambda t: t.get(key))
    assert own is not None

    async def together() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(16):
                nursery.start_soon(engine.ending.tell, lambda t: t.put(key, b"told"))
                nursery.start_soon(engine.transact, look)

    def look(t: Transaction) -> None:
        found.append(t.get(key))
        t.put(other_ns, b"2")

    one.mirror.call(together)
    assert set(found) == {own}
    for each in (one, other):
        each.mirror.catch_up()
    assert one.mirror.read_now(lambda t: t.get(key)) == own


def test_a_node_that_joins_meanwhile_has_all(
    hosts: Hosts, parts: tuple[Part, Part], tmp_path: Path
) -> None:
    one, other, url = hosts
    put(one, b"mine")
    put(other, b"theirs")
    end_peer(one)
    parts[0].step()
    third = Host(tmp_path / "third", url, 3)
    try:
        assert third.mirror.is_local(NS)
        assert names_of(third) == []
        joined = Part(third, set())
        for part in parts:
            part.host.mirror.catch_up()
        finish(*parts, joined)
        assert names_of(third) == [b"mine", b"theirs"]
        check_alike(url, one, other, third)
    finally:
        third.mirror.close()


@pytest.mark.parametrize("when", ["closed", "ended"])
def test_a_replica_that_is_read_anew_meanwhile_has_all(
    hosts: Hosts, parts: tuple[Part, Part], server: RedisServer, when: str
) -> None:
    one, other, url = hosts
    tell_records(hosts, parts)
    if when == "ended":
        for part in parts:
            part.step()
        parts[0].step()
        assert not record_of(parts[0]).is_peer
    other.mirror.close()
    one.write(lambda t: t.put(keys.setting(NS, b"any"), b""))
    prefix = url.partition("prefix=")[2]
    server.call("XTRIM", f"{{{prefix}:0}}x", "MAXLEN", 1)
    parts[1].come_back()
    run(*parts)
    if when == "closed":
        assert record_of(parts[0]).is_peer
        assert names_of(other) == [b"theirs"]
        assert put(other, b"more")
        end_peer(one)
        finish(*parts)
    assert {b"mine", b"theirs"} <= set(names_of(one))
    assert names_of(one) == names_of(other)
    check_alike(url, one, other)


# ---- what becomes of the files


def publish(host: Host, ino: int, mtime_ns: int, checksum: bytes) -> None:
    """Closes and seals a file."""

    def fn(t: Transaction) -> None:
        times = {"mtime_ns": mtime_ns, "ctime_ns": mtime_ns}
        inode = lifecycle.publish(t, ino, size=10, blocks=8, boot=0, **times)
        lifecycle.seal(
            t, ino, inode, version=inode.version, size=10, blocks=8, checksum=checksum, **times
        )

    host.write(fn)


def test_of_two_files_of_one_name_the_later_one_stays(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    one, other, url = hosts
    numbers: dict[bytes, list[int]] = {}
    for name, (first, second), seals in (
        (b"mine", (NOW + 2, NOW + 1), (b"a", b"b")),
        (b"theirs", (NOW + 1, NOW + 2), (b"a", b"b")),
        (b"same", (NOW + 1, NOW + 1), (b"a", b"a")),
    ):
        inos = [host.create(TOP, name) for host in (one, other)]
        for host, ino, mtime, seal in zip((one, other), inos, (first, second), seals, strict=True):
            publish(host, ino, mtime, seal)
        numbers[name] = inos
    end_peer(one)
    finish(*parts)
    assert one.find(TOP, b"mine") == numbers[b"mine"][0]
    assert one.find(TOP, b"theirs") == numbers[b"theirs"][1]
    assert one.find(TOP, b"same") in numbers[b"same"]
    assert sum(part.differing.count for part in parts) == 2
    check_alike(url, one, other)
    orphans = one.mirror.read_now(lambda t: lifecycle.orphans(t, 0, 10))
    losers = {numbers[b"mine"][1], numbers[b"theirs"][0], *numbers[b"same"]}
    assert set(orphans) == losers - {one.find(TOP, b"same")}
    for host in (one, other):  # each node drops the data of those that it held
        mine = [ino for ino in orphans if host.mirror.engine.node in holders(one, ino)]
        assert mine


def test_directories_that_both_nodes_made_are_one(hosts: Hosts, parts: tuple[Part, Part]) -> None:
    one, other, url = hosts
    inos: dict[bytes, int] = {}
    for host, name in ((one, b"mine"), (other, b"theirs")):
        above = host.mkdir(TOP, b"above")
        below = host.mkdir(above, b"below")
        inos[name] = put(host, name, below)
        host.mkdir(below, b"empty-" + name)
    end_peer(one)
    finish(*parts)
    for host in (one, other):
        above = host.find(TOP, b"above") or 0
        below = host.find(above, b"below") or 0
        assert {name: host.find(below, name) for name in inos} == inos
        assert host.find(below, b"empty-mine")
        assert host.find(below, b"empty-theirs")
    check_alike(url, one, other)


def copy(one: Host, other: Host, ino: int) -> None:
    """The other node takes a file over from the first, with its data."""

    def told(t: Transaction) -> tuple[bytes, held_names.HeldName | None]:
        path = held_names.path_of(t.get, ino) or b""
        return path, held_names.told(t, NS, path)

    path, name = one.mirror.read_now(told)
    assert name is not None
    holder = keys.pack_node(one.mirror.engine.node)
    other.write(lambda t: held_names.take_over(t, NS, path, name, holder))

    def bring(t: Transaction) -> None:
        inode = inodes.read_inode(t, ino)
        inodes.set_blocks(t, ino, inode, 8)
        inodes.write_inode(t, ino, inode)
        placements.hold(t, ino, inode.version)

    other.write(bring)


def both_orders(parts: tuple[Part, Part], first: int) -> tuple[Part, Part]:
    return parts if first == 0 else parts[::-1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_file_that_was_renamed_elsewhere_has_its_later_name(
    hosts: Hosts, parts: tuple[Part, Part], first: int
) -> None:
    """Its copy lies under the former name, which another file may have got by now."""
    one, other, url = hosts
    moved, plain = (one.create(TOP, name) for name in (b"former", b"plain"))
    for ino in (moved, plain):
        publish(one, ino, NOW, b"a")
        copy(one, other, ino)
    one.rename(TOP, b"former", TOP, b"later")
    one.rename(TOP, b"plain", TOP, b"plain-later")
    replaced = one.create(TOP, b"former")
    publish(one, replaced, NOW + 1, b"b")
    one.write(lambda t: _changed(t, moved, NOW + 5000))
    one.write(lambda t: _changed(t, plain, NOW + 5000))
    end_peer(one)
    finish(*both_orders(parts, first))
    for host in (one, other):
        found = [host.find(TOP, name) for name in (b"former", b"later", b"plain", b"plain-later")]
        assert found == [replaced, moved, None, plain]
    assert holders(one, moved) == holders(one, plain) == [1, 2]
    check_alike(url, one, other)


def _changed(t: Transaction, ino: int, now: int) -> None:
    inodes.set_attributes(t, ino, inodes.AttributeChanges(mode=0o600), now)


@pytest.mark.parametrize("first", [0, 1])
def test_the_record_that_was_changed_last_counts_whole(
    hosts: Hosts, parts: tuple[Part, Part], first: int
) -> None:
    """Owner and mode, attributes, a seal that was broken, and content."""
    one, other, url = hosts
    numbers = {}
    for name in (b"mode", b"attributes", b"unsealed", b"written"):
        ino = numbers[name] = one.create(TOP, name)
        publish(one, ino, NOW, b"a")
        copy(one, other, ino)
    later = NOW + 5000
    other.write(lambda t: _changed(t, numbers[b"mode"], later))
    for host, value, when in ((one, b"mine", later), (other, b"theirs", later + 1)):
        host.write(
            lambda t: inodes.set_xattr(t, numbers[b"attributes"], b"user.a", value, 0, when)  # noqa: B023
        )
    one.write(lambda t: lifecycle.reopen(t, numbers[b"unsealed"]))
    other.write(lambda t: _write_anew(t, numbers[b"written"], later))
    one.write(lambda t: _write_anew(t, numbers[b"written"], later + 1))
    end_peer(one)
    finish(*both_orders(parts, first))
    for host in (one, other):
        assert host.inode(numbers[b"mode"]).mode & 0o777 == 0o600
        attribute = host.mirror.read_now(
            lambda t: inodes.get_xattr(t, numbers[b"attributes"], b"user.a")
        )
        assert attribute == b"theirs"
        assert host.inode(numbers[b"written"]).mtime_ns == later + 1
    assert holders(one, numbers[b"mode"]) == [1, 2]
    assert holders(one, numbers[b"written"]) == [1]
    version = one.inode(numbers[b"written"]).version
    assert (numbers[b"written"], version) in parts[1].dropped
    assert one.mirror.read_now(lambda t: t.get(keys.unsealed(numbers[b"unsealed"])))
    check_alike(url, one, other)


def _write_anew(t: Transaction, ino: int, now: int) -> None:
    version = inodes.read_inode(t, ino).version + 1
    times = {"mtime_ns": now, "ctime_ns": now}
    lifecycle.publish(t, ino, size=20, blocks=16, boot=0, version=version, **times)


@pytest.mark.parametrize("first", [0, 1])
def test_files_that_are_open_keep_their_numbers(
    hosts: Hosts, parts: tuple[Part, Part], first: int
) -> None:
    """One that is being made gets its name; one that was removed while it is open stays until it is
    closed."""
    one, other, url = hosts
    open_, taken = (one.create(TOP, name) for name in (b"open", b"taken"))
    theirs = put(other, b"taken")
    removed = put(one, b"removed")
    one.write(lambda t: tree.unlink(t, TOP, b"removed", NOW, lambda _: True))
    end_peer(one)
    finish(*both_orders(parts, first))
    one.close_file(open_)
    one.close_file(taken)
    other.mirror.catch_up()
    assert (other.find(TOP, b"open"), other.find(TOP, b"taken")) == (open_, taken)
    orphans = one.mirror.read_now(lambda t: lifecycle.orphans(t, 0, 10))
    assert sorted(orphans) == sorted([theirs, removed])
    assert (holders(one, theirs), holders(one, removed)) == ([2], [1])
    check_alike(url, one, other)


@pytest.mark.parametrize("first", [0, 1])
def test_a_removal_that_a_node_has_not_heard_of_counts(
    hosts: Hosts, parts: tuple[Part, Part], first: int
) -> None:
    one, other, url = hosts
    removed = put(other, b"removed")
    other.mkdir(TOP, b"directory")
    put(one, b"kept")
    stones = parts[0].stones
    now = time.time_ns()
    stones.take([Tombstone(NS, b"removed", now, 1), Tombstone(NS, b"directory/\0", now, 1)])
    end_peer(one)
    finish(*both_orders(parts, first))
    assert names_of(one) == names_of(other) == [b"kept"]
    assert one.mirror.read_now(lambda t: lifecycle.orphans(t, 0, 10)) == [removed]
    check_alike(url, one, other)


def test_a_name_that_was_written_after_its_removal_stays(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    """Also where another node has a newer copy of before the removal."""
    one, other, url = hosts
    anew = put(other, b"name")
    older = one.create(TOP, b"name")
    publish(one, older, NOW + 100, b"a")
    stone = Tombstone(NS, b"name", time.time_ns(), 3)
    parts[1].stones.take([stone])
    parts[1].stones.renew([stone.name])
    end_peer(one)
    finish(*parts)
    assert one.find(TOP, b"name") == other.find(TOP, b"name") == anew
    check_alike(url, one, other)


@pytest.mark.parametrize("first", [0, 1])
def test_directories_and_links_are_those_of_all(
    hosts: Hosts, parts: tuple[Part, Part], first: int
) -> None:
    """A directory that two nodes made lets nobody pass who was kept out on one of them."""
    one, other, url = hosts
    for host, mode in ((one, 0o750), (other, 0o705)):
        made = host.mkdir(TOP, b"shared")
        host.write(lambda t: _set_mode(t, made, mode))  # noqa: B023
        link = Inode(
            mode=stat.S_IFLNK | 0o777,
            uid=0,
            gid=0,
            nlink=0,
            parent=0,
            atime_ns=NOW,
            mtime_ns=NOW,
            ctime_ns=NOW,
            name=b"",
            target=b"there",
        )
        number = host.number(NS)
        name = b"link%d" % mode
        host.write(lambda t: tree.add(t, made, name, number, link))  # noqa: B023
        host.write(lambda t: tree.add(t, TOP, b"both", number + 20, link))  # noqa: B023
    end_peer(one)
    finish(*both_orders(parts, first))
    for host in (one, other):
        shared = host.find(TOP, b"shared") or 0
        assert host.inode(shared).mode & 0o777 == 0o700
        assert host.find(shared, b"link%d" % 0o750)
        assert host.find(shared, b"link%d" % 0o705)
        assert host.inode(host.find(TOP, b"both") or 0).target == b"there"
    check_alike(url, one, other)


def _set_mode(t: Transaction, ino: int, mode: int) -> None:
    inodes.set_attributes(t, ino, inodes.AttributeChanges(mode=mode), NOW)


def test_files_with_many_attributes_are_told_in_parts(
    hosts: Hosts, parts: tuple[Part, Part]
) -> None:
    one, other, url = hosts
    value = bytes(60_000)
    for each in range(40):
        ino = put(one, b"%d" % each)
        one.write(lambda t: inodes.set_xattr(t, ino, b"user.a", value, 0, NOW))  # noqa: B023
    end_peer(one)
    finish(*parts)
    last = other.find(TOP, b"39") or 0
    assert other.mirror.read_now(lambda t: inodes.get_xattr(t, last, b"user.a")) == value
    check_alike(url, one, other)


def test_what_a_peer_namespace_cannot_be_is_refused(parts: tuple[Part, Part]) -> None:
    host = parts[0].host
    put(host, b"mine")
    for policy in (
        {"kind": "durable", "coherence": "strict"},
        {"capacity": 1},
        {"media": ["ram", "ssd"]},
    ):
        wanted: Any = {"coherence": "cache", **policy}
        with pytest.raises(NotSupported, match="ends being peer"):
            host.write(lambda t: namespaces.set_policy(t, NS, now=NOW, **wanted))  # noqa: B023
    assert put(host, b"more")


class Killed(Exception):
    """The node ends here."""


@pytest.mark.parametrize("seed", range(8))
def test_no_kill_loses_a_file_or_brings_one_back(
    hosts: Hosts, parts: tuple[Part, Part], seed: int
) -> None:
    """Two nodes write, rename and remove while both are killed at any step of their parts."""
    _, _, url = hosts
    chance = random.Random(seed)
    there: list[dict[bytes, int]] = [{}, {}]
    directories = [[TOP], [TOP]]
    count = 0

    def work(at: int) -> None:
        nonlocal count
        host = parts[at].host
        host.mirror.catch_up()
        if host.mirror.engine.ending.is_closed(NS):
            return
        count += 1
        name, own = b"%d-%d" % (at, count), there[at]
        what = chance.random()
        if what < 0.1 and len(directories[at]) < 3:
            directories[at].append(host.mkdir(TOP, b"d%d-%d" % (at, count)))
        elif what < 0.7 or not own:
            own[name] = put(host, name)
        elif what < 0.85:
            host.unlink(TOP, gone := chance.choice(list(own)))
            del own[gone]
        else:
            old = chance.choice(list(own))
            host.rename(TOP, old, TOP, name)
            own[name] = own.pop(old)

    def step(at: int) -> None:
        part, left = parts[at], chance.randrange(1, 40)
        engine = part.host.mirror.engine

        def dying(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal left
                left -= 1
                if not left:
                    raise Killed
                return method(*args, **options)

            return call

        methods = ("tell", "add", "take", "drop")
        dies = [(engine.ending, each) for each in methods] + [(engine, "transact")]
        for owner, each in dies:
            setattr(owner, each, dying(getattr(owner, each)))
        try:
            part.step()
        except Killed:
            part.restart()
        else:
            for owner, each in dies:
                delattr(owner, each)

    def check() -> None:
        for part in parts:
            found = {name: part.host.find(TOP, name) for own in there for name in own}
            assert found == {**there[0], **there[1]}
            assert [each for each in names_of(part.host) if each[:1] != b"d"] == sorted(found)
        check_alike(url, parts[0].host, parts[1].host)

    for _ in range(20):
        work(chance.randrange(2))
    while record_of(parts[0]).is_peer:
        if not record_of(parts[0]).switches_to:
            end_peer(parts[0].host)
        for _ in range(12):
            (work if chance.random() < 0.3 else step)(chance.randrange(2))
    finish(*parts)
    check()
